"""`mpctl tune`: measure the layouts that tell most, and name the fastest."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import typer

from mpctl.cli.launch import ExcludeOption, HostfileOption, IncludeOption, ssh_settings
from mpctl.cli.options import AsJsonOption, JobSource, typed_command, with_job
from mpctl.cli.search import FixOption
from mpctl.core.errors import InputError

if TYPE_CHECKING:
    from mpctl.measure.tune.document import TuneDocument
    from mpctl.measure.tune.loop import TuneLimits, Tuning
    from mpctl.measure.tune.state import TuneFolder
    from mpctl.measure.tune.trial import MakeTrial
    from mpctl.plan.planning.layout_settings import LayoutSettings
    from mpctl.plan.search.request import SearchRequest
    from mpctl.spec.job import JobSpec

DEFAULT_BUDGET = "30m"
NUMBER = r"[0-9]+(?:\.[0-9]+)?"
TIME = rf"\s*(?:({NUMBER})\s*h)?\s*(?:({NUMBER})\s*m(?:in)?)?\s*(?:({NUMBER})\s*s)?\s*"
LONGEST = 30 * 24 * 3600.0

BudgetOption = Annotated[str, typer.Option(metavar="TIME", help="Time for all trials in this folder: 90s, 5m, 1h30m.")]
TrialsOption = Annotated[
    int | None,
    typer.Option(help="Most trials in this folder; by default as many as the budget allows.", show_default=False),
]
OutOption = Annotated[Path | None, typer.Option(help="Folder of the tuning; by default runs/tune-NAME.")]
RanksOption = Annotated[
    int | None, typer.Option(min=1, help="Ranks on this host: --nodes 1 --gpus-per-node N.", show_default=False)
]
DeviceOption = Annotated[
    Literal["auto", "cpu", "cuda"] | None,
    typer.Option(help="Where ranks run; by default as the job says.", show_default=False),
]
OnOption = Annotated[
    Literal["auto", "local", "slurm", "ssh", "kubernetes"] | None,
    typer.Option(
        help="Where trials run, as for `mpctl launch`. With kubernetes, and with slurm outside an "
        "allocation, each trial is a submitted job.",
        show_default=False,
    ),
]
EmitOption = Annotated[
    str | None,
    typer.Option(
        metavar="LAUNCHER",
        help="Write the next trials for another launcher, as `mpctl plan --emit` does, to "
        "OUT/trials/NNN.*; read your logs of earlier ones from OUT/trials/NNN.log.",
        show_default=False,
    ),
]
SubmitOption = Annotated[
    bool, typer.Option("--submit", help="Submit the whole tuning to Slurm as one batch job and return at once.")
]
ShowOption = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Print what the tuning in DIR found and write its page; measure nothing.",
        show_default=False,
    ),
]


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
    submit: SubmitOption = False,
    show: ShowOption = None,
    as_json: AsJsonOption = False,
) -> None:
    """Find the fastest layout of JOB by running likely ones.

    Each trial trains a layout for some steps on the target; then the planner is fitted to all trials and
    chooses the next one. It ends when no other layout is likely to be faster than the best measured one,
    or when the budget is spent. Layouts that fail or run out of memory are results too.

    The folder has the trials, fitted presets (presets/), the best layout as a job (best.toml) and a page
    (report.html). The same command continues there, also after a kill.

    Exit codes: 0 a layout was measured; 1 every trial failed; 2 bad input or a target that refuses; 3 no
    layout fits; 130 Ctrl-C, which loses no measurement.
    """
    from mpctl.cli.signals import ended_by_signals
    from mpctl.core.errors import MpctlError
    from mpctl.measure.tune.emitted import take_turn
    from mpctl.measure.tune.loop import TuneWatch, Tuning
    from mpctl.measure.tune.target import prepared_data, require_target
    from mpctl.records.rundir.directory import RunDir
    from mpctl.render.tune import TuneView
    from mpctl.run.hosts.machine import this_machine

    if show is not None:
        _show(_saved(show, job), [], as_json=as_json)
        return
    hosts = ssh_settings(on, hostfile, include, exclude)
    settings = {"launch.device": device, "launch.on": on, **hosts}
    asked = _asked(job, settings, ranks, budget, trials, fix or [], emit, out)
    job, request, folder = asked.job, asked.request, asked.folder
    if submit:
        _submit(asked, emit, as_json=as_json)
        return
    command_of = partial(_command, job, request)
    with (
        RunDir(folder.path).locked("--out"),
        ended_by_signals(f"{folder.path} has what was measured"),
        TuneView() as view,
    ):

        def on_change(tuning: Tuning) -> None:
            view.change(tuning)
            if tuning.records:
                _write(tuning, command_of)

        tuning = Tuning(
            request,
            folder,
            _measure(request.job),
            asked.limits,
            command=typed_command(),
            watch=TuneWatch(on_change, view.event, view.progress, view.wait),
            check=lambda one: require_target(one, folder, this_machine()),
            prepare=lambda one: prepared_data(one, folder, this_machine(), _silent),
            accepts=asked.accepts,
            launcher=emit,
        )
        ended: BaseException | None = None
        waiting: list[Path] = []
        try:
            if emit is None:
                tuning.run()
            else:
                waiting = take_turn(tuning, emit)
        except (KeyboardInterrupt, SystemExit, MpctlError) as error:
            if not tuning.records:
                raise
            ended = error
        tuning.learn()
        document = _write(tuning, command_of)
        _write_best(tuning, job, document)
    if not (as_json and isinstance(ended, MpctlError)):  # which is a document of its own
        _show(document, waiting, as_json=as_json)
    if ended is not None:
        raise ended


class Asked(NamedTuple):
    """Return the request of the command line. accepts: whether the target can run a layout."""

    job: JobSource
    request: SearchRequest
    limits: TuneLimits
    folder: TuneFolder
    accepts: Callable[[LayoutSettings], bool]


def _asked(
    job: JobSource,
    settings: Mapping[str, object],
    ranks: int | None,
    budget: str,
    trials: int | None,
    fix: list[str],
    emit: str | None,
    out: Path | None,
) -> Asked:
    """The command line as read. Raises InputError with everything that is wrong with it."""
    from mpctl.cli.emit import for_launcher
    from mpctl.core.errors import Issue, attempt
    from mpctl.measure.tune.loop import TuneLimits, assumed_start_seconds, time_issue
    from mpctl.measure.tune.state import TuneFolder
    from mpctl.plan.search.request import read_request

    def read_job() -> tuple[JobSource, SearchRequest]:
        placed = _on_target(job, ranks, settings)
        placed = placed if emit is None else for_launcher(placed, emit)
        return placed, read_request(placed.source, placed.own, fix, {}, read=placed.others)

    issues: list[Issue] = []
    seconds = attempt(issues, partial(read_budget, budget))
    if trials is not None and trials < 1:
        issues.append(
            Issue("bad-trials", "--trials", f"{trials} trials measure nothing", "give 1 or more, or leave it out")
        )
    if (read := attempt(issues, read_job)) is None:
        raise InputError(issues)
    placed, request = read
    accepts = attempt(issues, partial(_accepts, request, emit))
    folder = TuneFolder(out or Path("runs") / f"tune-{_name(placed, request)}")
    attempt(issues, partial(folder.check, request.job, request.fixed))
    known = attempt(issues, folder.records)
    if seconds is not None and emit is None and not known:
        short = time_issue(seconds, assumed_start_seconds(request.job))
        issues += [short] if short else []
    if issues or seconds is None or accepts is None:
        raise InputError(issues)
    return Asked(placed, request, TuneLimits(seconds, trials), folder, accepts)


def _submit(asked: Asked, launcher: str | None, *, as_json: bool) -> None:
    """Submit the tuning as one batch job, and print how to follow it."""
    import os
    import sys

    from mpctl.measure.tune.submitted import submit_tuning
    from mpctl.records.rundir.directory import RunDir
    from mpctl.render.console import say
    from mpctl.render.output import print_json
    from mpctl.render.run import submission_document
    from mpctl.run.clusters.registry import chosen_name

    folder, request = asked.folder, asked.request
    name = chosen_name(request.job, os.environ)
    if launcher or name != "slurm":
        where = "trials of --emit are made elsewhere" if launcher else f"--on {name} has none"
        raise InputError.of(
            "nothing-to-submit",
            "--submit",
            f"an allocation for a whole tuning is Slurm's, and {where}",
            "use --on slurm, or leave out --submit",
        )
    words = [word for word in sys.argv[1:] if word != "--submit"]
    command = [sys.executable, "-P", "-m", "mpctl", *words]
    with RunDir(folder.path).locked("--out"):
        job_id = submit_tuning(request, folder, asked.limits.seconds, command)
    if as_json:
        print_json(submission_document(name, job_id, str(folder.path)))
        return
    log = RunDir(folder.path).batch_log(job_id)
    say(f"submitted to {name} as job {job_id}; its folder is {folder.path}")
    say(f"  mpctl tune --show {folder.path}\n  tail -f {log}\n  scancel {job_id}")


def _saved(path: Path, job: JobSource) -> TuneDocument:
    """What a tuning has found, by its folder; its page is written again where it can be. Raises
    InputError for a folder without it, and where a job is named as well."""
    from contextlib import suppress

    from mpctl.core.durable import write_whole
    from mpctl.measure.tune.document import read_document
    from mpctl.measure.tune.state import PAGE, REPORT
    from mpctl.render.tune import tune_page

    if job.source or job.overrides:
        raise InputError.of("usage", "--show", "the folder says which job was tuned", "leave out JOB and its settings")
    document = read_document(path / REPORT)
    document["folder"] = str(path)  # which may have moved
    with suppress(OSError):
        write_whole(path / PAGE, tune_page(document))
    return document


def _accepts(request: SearchRequest, launcher: str | None) -> Callable[[LayoutSettings], bool]:
    """Whether the target can run a layout. Raises InputError where it can run none of the job."""
    from mpctl.measure.tune.emitted import expressible
    from mpctl.measure.tune.target import require_launched

    if launcher is not None:
        return expressible(request, launcher)
    require_launched(request.job)
    return lambda layout: True


def _silent(stage: str, done: int, total: int) -> None:
    pass


def _measure(job: JobSpec) -> MakeTrial:
    from mpctl.measure.tune.submitted import is_submitted, submitted_trial
    from mpctl.measure.tune.trial import launch_trial

    return submitted_trial if is_submitted(job) else launch_trial


def read_budget(text: str) -> float:
    """Seconds of `90s`, `5m`, `1h30m` or `300`. Raises InputError for other text.

    >>> read_budget("1h30m"), read_budget("5 min"), read_budget("300")
    (5400.0, 300.0, 300.0)
    """
    is_plain = re.fullmatch(NUMBER, text.strip(), re.ASCII) is not None
    match = re.fullmatch(TIME, f"{text}s" if is_plain else text, re.ASCII)
    parts = zip(match.groups("0"), (3600, 60, 1), strict=True) if match else ()
    seconds = sum(float(part) * unit for part, unit in parts)
    if not 0 < seconds <= LONGEST:
        raise InputError.of(
            "bad-budget",
            "--budget",
            f"{text[:30]!r} is no time to measure in",
            "give a time such as 5m, 90s or 1h30m, 30 days at most",
        )
    return seconds


def _on_target(job: JobSource, ranks: int | None, settings: Mapping[str, object]) -> JobSource:
    """The job on the target of the options. Raises InputError where --ranks contradicts another."""
    if ranks is not None:
        for name in ("cluster.nodes", "cluster.gpus_per_node"):
            if name in job.overrides:
                option = f"--{name.partition('.')[2].replace('_', '-')}"
                raise InputError.of(
                    "usage",
                    "--ranks",
                    f"--ranks {ranks} and {option} both say how many ranks there are",
                    "use one of them",
                )
        settings = {"cluster.nodes": 1, "cluster.gpus_per_node": ranks, **settings}
    return job.with_settings(settings)


def _name(job: JobSource, request: SearchRequest) -> str:
    if job.source:
        return Path(job.source).stem
    return (request.job.model.name if request.job.model else None) or "job"


def _settings(request: SearchRequest, layout: LayoutSettings) -> dict[str, object]:
    """The settings over the job's source that make this layout of it."""
    from mpctl.plan.planning.layout_settings import changed_settings, layout_of

    settings = dict(request.typed)
    settings |= changed_settings(layout_of(request.job), layout)
    settings["parallel.dp"] = layout.dp
    return settings


def _command(job: JobSource, request: SearchRequest, layout: LayoutSettings) -> str:
    """The command line that launches the layout, or submits it as its trials were."""
    from mpctl.measure.tune.submitted import is_submitted

    line = job.line("launch", _settings(request, layout))
    return f"{line} --submit" if is_submitted(request.job) else line


def _write(tuning: Tuning, command_of: Callable[[LayoutSettings], str]) -> TuneDocument:
    """Write what is found so far to report.json and report.html."""
    import json

    from mpctl.core.durable import write_whole
    from mpctl.measure.tune.document import tune_document
    from mpctl.measure.tune.state import PAGE, REPORT, cannot_write
    from mpctl.render.tune import tune_page

    document, folder = tune_document(tuning, command_of), tuning.folder.path
    try:
        write_whole(folder / REPORT, json.dumps(document, indent=1) + "\n")
        write_whole(folder / PAGE, tune_page(document))
    except OSError as error:
        raise cannot_write(folder, error) from None
    return document


def _write_best(tuning: Tuning, job: JobSource, document: TuneDocument) -> None:
    """Write the best layout as a job, best.toml."""
    from mpctl.core.durable import write_whole
    from mpctl.measure.tune.state import BEST, cannot_write

    if tuning.best is None:
        return
    text = _best_job(job, tuning.request, tuning.best, document)
    try:
        write_whole(tuning.folder.path / BEST, text)
    except OSError as error:
        raise cannot_write(tuning.folder.path, error) from None


def _best_job(job: JobSource, request: SearchRequest, layout: LayoutSettings, document: TuneDocument) -> str:
    """The text of best.toml: the job that was tuned, with the layout."""
    from mpctl.cli.job_toml import job_toml
    from mpctl.render.tune import verdict

    about = [f"The best layout that `mpctl tune` measured: {verdict(document)}"]
    return job_toml(job.source, {**job.others, **_settings(request, layout)}, about)


def _show(document: TuneDocument, waiting: list[Path], *, as_json: bool) -> None:
    from mpctl.render.output import print_json
    from mpctl.render.tune import print_tune, print_waiting

    if as_json:
        print_json(document)
    else:
        print_tune(document)
        print_waiting(waiting)
