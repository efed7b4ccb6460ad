"""`mpctl tune`: measure the layouts that tell most, and name the fastest."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mpctl.cli.launch import ExcludeOption, HostfileOption, IncludeOption, ssh_settings
from mpctl.cli.options import JobSource, command_line, typed_command, with_job
from mpctl.cli.search import FixOption
from mpctl.errors import InputError

if TYPE_CHECKING:
    from mpctl.planning.layout_settings import LayoutSettings
    from mpctl.search.request import SearchRequest
    from mpctl.tune.document import TuneDocument
    from mpctl.tune.loop import Tuning
    from mpctl.tune.trial import MakeTrial

DEFAULT_BUDGET = "30m"
UNITS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
LONGEST = 30 * 24 * 3600.0

BudgetOption = Annotated[
    str,
    typer.Option(
        metavar="TIME",
        help="Time for all trials together, of all sessions in this folder: 90s, 5m, 1h30m.",
    ),
]
TrialsOption = Annotated[
    int | None,
    typer.Option(
        min=1, help="Trials at most, of all sessions; by default as many as the budget allows.",
        show_default=False,
    ),
]  # fmt: skip
OutOption = Annotated[
    Path | None,
    typer.Option(help="Folder of the tuning, which goes on there; by default runs/tune-NAME."),
]
RanksOption = Annotated[
    int | None,
    typer.Option(
        min=1, help="Ranks on this host: --nodes 1 --gpus-per-node N.", show_default=False
    ),
]
DeviceOption = Annotated[
    Literal["auto", "cpu", "cuda"] | None,
    typer.Option(help="Where ranks run; by default as the job says.", show_default=False),
]
OnOption = Annotated[
    Literal["auto", "local", "slurm", "ssh", "kubernetes"] | None,
    typer.Option(
        help="Where trials run, as for `mpctl launch`: on this host, or on the hosts of an "
        "allocation or hostfile; kubernetes, which takes submissions alone, is refused.",
        show_default=False,
    ),
]
EmitOption = Annotated[
    str | None,
    typer.Option(
        metavar="LAUNCHER",
        help="Write the next trials for another launcher (megatron, torchtitan, ...) to "
        "OUT/trials/NNN.*, and read those before from OUT/trials/NNN.log, which you put there.",
        show_default=False,
    ),
]
AsJsonOption = Annotated[bool, typer.Option("--json", help="Print the answer as JSON on stdout.")]


@with_job
def tune(
    job: JobSource,
    budget: BudgetOption = DEFAULT_BUDGET,
    trials: TrialsOption = None,
    out: OutOption = None,
    ranks: RanksOption = None,
    fix: FixOption = None,
    device: DeviceOption = None,
    on: OnOption = None,
    hostfile: HostfileOption = None,
    include: IncludeOption = None,
    exclude: ExcludeOption = None,
    emit: EmitOption = None,
    as_json: AsJsonOption = False,
) -> None:
    """Find the fastest layout of JOB by measuring: plan all, run the few that tell most, learn.

    Each trial trains a layout for some steps on the target. After each, the planner is fitted to
    all trials and the next layout is chosen: where a measurement is expected to shorten the final
    choice most. It ends when no other layout has a real chance to be faster than the best measured
    one, or when the budget is spent. Layouts that run out of memory or fail are results, too.

    The folder has the trials, the fitted presets (presets/), the best layout as a job (best.toml)
    and a page (report.html). The same command again goes on there, after a kill as well.

    Exit codes: 0 a layout was measured; 1 every trial failed; 2 bad input, a refusing target; 3 no
    layout fits; 130 Ctrl-C, after which nothing measured is lost.
    """
    from mpctl.cli.plan_modes import for_launcher
    from mpctl.cli.signals import ended_by_signals
    from mpctl.hosts.machine import this_machine
    from mpctl.render.tune import TuneView
    from mpctl.rundir.directory import RunDir
    from mpctl.search.request import read_request
    from mpctl.tune.emitted import take_turn
    from mpctl.tune.loop import TuneLimits, TuneWatch, Tuning
    from mpctl.tune.state import TuneFolder
    from mpctl.tune.target import prepared_data

    limits = TuneLimits(read_budget(budget), trials)
    job = _placed(job, ranks, {"launch.device": device, "launch.on": on,
                               **ssh_settings(on, hostfile, include, exclude)})  # fmt: skip
    if emit is not None:
        job = for_launcher(job, emit, is_read=False)
    request = read_request(job.source, job.overrides, fix or [], {})
    accepts = _accepts(request, emit)
    folder = TuneFolder(out or Path("runs") / f"tune-{_name(job, request)}")
    folder.claim(request.job, request.fixed)
    command_of = partial(_command, job, request)
    with (
        RunDir(folder.path).locked(),
        ended_by_signals(f"{folder.path} has what was measured"),
        TuneView() as view,
    ):
        tuning = Tuning(
            request, folder, _measure(), limits, command=typed_command(),
            watch=TuneWatch(view.change, view.event, view.progress),
            prepare=lambda one: prepared_data(one, folder, this_machine(), _silent),
            accepts=accepts, launcher=emit,
        )  # fmt: skip
        ended: BaseException | None = None
        waiting: list[Path] = []
        try:
            if emit is None:
                tuning.run()
            else:
                waiting = take_turn(tuning, emit)
        except (KeyboardInterrupt, SystemExit) as error:
            ended = error
        document = _write(tuning, job, request, command_of)
    _show(document, waiting, as_json=as_json)
    if ended is not None:
        raise ended


def _accepts(request: SearchRequest, launcher: str | None) -> Callable[[LayoutSettings], bool]:
    """Whether the target can run a layout. Raises InputError where it can run none of the job."""
    from mpctl.tune.emitted import expressible
    from mpctl.tune.target import require_launched

    if launcher is not None:
        return expressible(request, launcher)
    require_launched(request.job)
    return lambda layout: True


def _silent(stage: str, done: int, total: int) -> None:
    pass


def _measure() -> MakeTrial:
    from mpctl.tune.trial import launch_trial

    return launch_trial


def read_budget(text: str) -> float:
    """Seconds of `90s`, `5m`, `1h30m` or `300`. Raises InputError for other text.

    >>> read_budget("1h30m"), read_budget("5 min"), read_budget("300")
    (5400.0, 300.0, 300.0)
    """
    words = re.findall(r"([0-9]+(?:\.[0-9]+)?)\s*(h|min|m|s|)", text, re.ASCII)
    rest = re.sub(r"([0-9]+(?:\.[0-9]+)?)\s*(h|min|m|s|)|\s", "", text, flags=re.ASCII)
    plain = any(not unit for _, unit in words) and len(words) > 1
    seconds = 0.0 if rest or plain else sum(float(n) * UNITS[u or "s"] for n, u in words)
    if not 0 < seconds <= LONGEST:
        raise InputError.of("bad-budget", "--budget", f"{text[:30]!r} is no time to measure in",
                            "give a time such as 5m, 90s or 1h30m, 30 days at most")  # fmt: skip
    return seconds


def _placed(job: JobSource, ranks: int | None, settings: dict[str, object]) -> JobSource:
    """The job on the target of the options. Raises InputError where --ranks contradicts another."""
    if ranks is not None:
        for name in ("cluster.nodes", "cluster.gpus_per_node"):
            if name in job.overrides:
                option = f"--{name.partition('.')[2].replace('_', '-')}"
                raise InputError.of("usage", "--ranks", f"--ranks {ranks} and {option} both say "
                                    "how many ranks there are", "use one of them")  # fmt: skip
        settings = {"cluster.nodes": 1, "cluster.gpus_per_node": ranks, **settings}
    return job.with_settings(settings)


def _name(job: JobSource, request: SearchRequest) -> str:
    if job.source:
        return Path(job.source).stem
    return (request.job.model.name if request.job.model else None) or "job"


def _settings(request: SearchRequest, layout: LayoutSettings) -> dict[str, object]:
    """The settings over the job's source that make this layout of it."""
    from mpctl.planning.layout_settings import changed_settings, layout_of

    settings = dict(request.typed)
    settings |= changed_settings(layout_of(request.job), layout)
    settings["parallel.dp"] = layout.dp
    return settings


def _command(job: JobSource, request: SearchRequest, layout: LayoutSettings) -> str:
    """The command line that launches the layout."""
    return command_line("launch", job.source, _settings(request, layout))


def _write(
    tuning: Tuning, job: JobSource, request: SearchRequest,
    command_of: Callable[[LayoutSettings], str],
) -> TuneDocument:  # fmt: skip
    """Fit the presets to the trials; write report.json, report.html and best.toml."""
    import json

    from mpctl.durable import write_whole
    from mpctl.render.html.tune import tune_page
    from mpctl.tune.document import tune_document
    from mpctl.tune.state import BEST, PAGE, REPORT, cannot_write

    tuning.learn()
    document, folder = tune_document(tuning, command_of), tuning.folder.path
    try:
        write_whole(folder / REPORT, json.dumps(document, indent=1) + "\n")
        write_whole(folder / PAGE, tune_page(document))
        if tuning.best is not None:
            write_whole(folder / BEST, _best_job(job, request, tuning.best, document))
    except OSError as error:
        raise cannot_write(folder, error) from None
    return document


def _best_job(
    job: JobSource, request: SearchRequest, layout: LayoutSettings, document: TuneDocument
) -> str:
    """The text of best.toml: the job that was tuned, with the layout."""
    from mpctl.bench.report import flat
    from mpctl.render.job_file import JobFile, job_text
    from mpctl.render.tune import verdict
    from mpctl.spec.presets import PRESET_TABLES, lasting_name

    kinds = {".".join(path): kind for path, kind in PRESET_TABLES.items() if path}
    settings: dict[str, object] = {}
    if job.source is not None:
        settings["preset"] = lasting_name("jobs", job.source)
    for name, value in _settings(request, layout).items():
        if name in kinds and isinstance(value, str):
            settings[f"{name}.preset"] = lasting_name(kinds[name], value)
        elif value is not None:
            settings.update(flat({name: value}))
    about = [f"The best layout that `mpctl tune` measured: {verdict(document)}"]
    return job_text(JobFile(about, settings, {}))


def _show(document: TuneDocument, waiting: list[Path], *, as_json: bool) -> None:
    from mpctl.render.output import print_json
    from mpctl.render.tune import print_tune, print_waiting

    if as_json:
        print_json(document)
    else:
        print_tune(document)
        print_waiting(waiting)
