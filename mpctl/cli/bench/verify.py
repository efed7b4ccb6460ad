"""`mpctl bench verify`: compare predicted with measured step time, memory and bytes of layouts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mpctl.cli import complete
from mpctl.cli.bench.common import HostsBench, LayoutsOption, with_bench, with_layout_words
from mpctl.cli.options import JobSource, with_job
from mpctl.core.errors import InputError, RunFailed

if TYPE_CHECKING:
    from mpctl.measure.bench.cases import PlannedCase
    from mpctl.measure.bench.verify_cases import Wanted
    from mpctl.plan.planning.plan import Overrides, Plan

DEFAULT_JOB, DEFAULT_STEPS, QUICK_STEPS, DEFAULT_ROUNDS = "demo", 10, 6, 3

MoreJobs = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[JOB ...]",
        help="More jobs; the options apply to all of them.",
        autocompletion=complete.preset_of("jobs"),
        show_default=False,
    ),
]
RoundsOption = Annotated[
    int | None,
    typer.Option(
        min=1, help=f"Rounds, each with all layouts; by default {DEFAULT_ROUNDS}, with --quick 1.", show_default=False
    ),
]
WithinOption = Annotated[
    float | None,
    typer.Option(
        metavar="PERCENT",
        help="Exit with 1 if the mean error of step time is larger, over the layouts in which "
        "each rank has a core (or GPU), or over all if there are none.",
        show_default=False,
    ),
]


@with_job
@with_bench("verify", HostsBench)
def verify(
    job: JobSource,
    bench: HostsBench,
    more: MoreJobs = None,
    layouts: LayoutsOption = None,
    rounds: RoundsOption = None,
    within: WithinOption = None,
) -> None:
    """Run layouts on this machine and compare step time, memory and bytes with their plans.

    Without JOB 20 built-in layouts of 1 to 4 ranks run, of the job `demo` or of --model. Several JOBs run
    unchanged; --layouts tp=1,2 pp=1,2 runs every combination for one JOB. A run has --steps 10 (6 with
    --quick). Plan with the preset of this machine: --cluster FILE, as `mpctl bench machine` writes it.

    Prints error = predicted / measured - 1 of each layout, the mean of |error| (MAPE), the worst, Spearman's
    rank correlation and the share inside the band, apart for layouts with a core for each rank. Parameters,
    states and messages must equal the plan.

    Exit codes: 0 done; 1 a failed run, or an error above --within; 2 bad input.
    """
    from mpctl.measure.bench.cases import case_warnings, plan_cases
    from mpctl.measure.bench.runner import Budget, Watch
    from mpctl.measure.bench.verify import Verification
    from mpctl.measure.bench.verify_cases import verify_cases
    from mpctl.render.progress import TaskBar
    from mpctl.run.hosts.machine import this_machine

    job, share = bench.on_hosts(job), _share(within)
    named: list[str] | None = None
    if layouts:
        (job, named), more = with_layout_words(job, layouts, more or []), []
    source = bench.job(job, steps=DEFAULT_STEPS, quick_steps=QUICK_STEPS)
    wanted, left_out = _wanted(source, more or [], named, quick=bench.quick)
    folder, to_run = bench.folder, verify_cases(wanted)
    cases = plan_cases(to_run, folder, this_machine(), overwrite=bench.overwrite)
    bench.warn(case_warnings(cases))
    verification = Verification(
        bench.environment,
        bench.command,
        rounds or (1 if bench.quick else DEFAULT_ROUNDS),
        cases,
        None if more else _name(source, cases),
        within=share,
        left_out=left_out,
    )
    ended: BaseException | None = None
    with TaskBar(lines=True) as bar:
        try:
            watch = Watch(bar.update, bar.note, bar.print)
            verification.run(folder, budget=Budget(bench.seconds), watch=watch)
        except (KeyboardInterrupt, SystemExit, RunFailed) as error:
            ended = error
    says_why = bench.as_json and isinstance(ended, RunFailed)  # the one document on stdout
    if ended is not None and (says_why or not verification.runs):
        raise ended
    report = verification.report()
    bench.finish(report)
    if ended is not None:
        raise ended
    if report["findings"]["passed"] is False:
        raise typer.Exit(1)


def _share(within: float | None) -> float | None:
    """Percent as a fraction. Raises InputError unless it is a number above 0."""
    if within is not None and not 0 < within < inf:
        raise InputError.of(
            "bad-within",
            "--within",
            f"{within:g} % is no bound of an error",
            "give percent above 0, such as --within 10",
        )
    return None if within is None else within / 100


def _name(source: JobSource, cases: Sequence[PlannedCase] = ()) -> str:
    """The name of a JOB; without one that of the model which the cases train."""
    if source.source is not None:
        return Path(source.source).stem
    names = [case.job.model.name for case in cases if case.job.model]
    return (names and names[0]) or DEFAULT_JOB


def _wanted(
    source: JobSource, more: list[str], layouts: list[str] | None, *, quick: bool
) -> tuple[list[Wanted], dict[str, str]]:
    """The layouts to verify: the jobs unchanged, layouts of one job, or without either the built-in
    set; and the layouts of the set that cannot run, with the reason."""
    from mpctl.measure.bench.cases import TIMED_SETTINGS
    from mpctl.measure.bench.layouts import DEFAULT_SETTINGS, parse_layouts
    from mpctl.measure.bench.verify_cases import built_in_set, wanted_plan
    from mpctl.run.hosts.machine import this_machine

    def plan_with(settings: Overrides) -> Plan:
        return base.plan({**settings, **TIMED_SETTINGS})

    base = source
    if source.source is None:
        base = JobSource(DEFAULT_JOB, {**DEFAULT_SETTINGS, **source.overrides})
    if layouts:
        parsed, job = parse_layouts(layouts), base.plan().job
        return [wanted_plan(partial(plan_with, each.settings(job))) for each in parsed], {}
    if source.source is None:
        return built_in_set(plan_with, source.overrides, this_machine(), quick=quick)
    sources = [source, *(JobSource(name, source.overrides) for name in more)]
    jobs = [_name(each) if more else "" for each in sources]
    wanted = (wanted_plan(partial(each.plan, TIMED_SETTINGS), name) for name, each in zip(jobs, sources, strict=True))
    return list(wanted), {}
