"""`mpctl bench scaling`: train a job at several world sizes and layouts; show its efficiency."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mpctl.cli.bench.common import HostsBench, LayoutsOption, with_bench, with_layout_words
from mpctl.cli.options import JobSource, with_job

if TYPE_CHECKING:
    from mpctl.measure.bench.layouts import Along, Layout
    from mpctl.measure.bench.scaling import Mode
    from mpctl.spec.job import JobSpec

DEFAULT_JOB, DEFAULT_STEPS, QUICK_STEPS = "demo", 12, 6
DEFAULT_WORLDS, DEFAULT_ROUNDS = "1,2", 3
LITTLE_DATA = {"data.max_bytes": 1_000_000}  # prepared in seconds; a step takes as long

WorldOption = Annotated[
    str | None, typer.Option(help="World sizes; by default 1,2, or with --layouts any.", show_default=False)
]
MoreLayouts = Annotated[
    list[str] | None, typer.Argument(metavar="AXIS=SIZES", help="More words of --layouts.", show_default=False)
]
ModeOption = Annotated[
    Literal["strong", "weak", "both"],
    typer.Option(help="Keep the global batch (strong) or the samples per rank (weak)."),
]
AlongOption = Annotated[
    Literal["job", "tp", "cp", "pp", "dp"] | None,
    typer.Option(
        help="Without --layouts: one axis for all ranks, or by default the job's axes, then dp.", show_default=False
    ),
]
RoundsOption = Annotated[
    int | None,
    typer.Option(
        "--rounds",
        "--repeats",
        min=1,
        help=f"Rounds, each with all cases; by default {DEFAULT_ROUNDS}, with --quick 1.",
        show_default=False,
    ),
]


@with_job
@with_bench("scaling", HostsBench)
def scaling(
    job: JobSource,
    bench: HostsBench,
    words: MoreLayouts = None,
    world: WorldOption = None,
    layouts: LayoutsOption = None,
    mode: ModeOption = "both",
    along: AlongOption = None,
    rounds: RoundsOption = None,
) -> None:
    """Train JOB at several world sizes and layouts; compare speed, efficiency, MFU with the plan.

    efficiency = (tokens/s of N ranks / tokens/s of the smallest N0) / (N / N0). By it Megatron-LM published
    76 %: 15.1 PFLOP/s on 512 GPUs, 39 TFLOP/s on one (arXiv 1909.08053).

    Strong scaling keeps the global batch; weak scaling lets it grow with N. Each efficiency stands next to
    that of perfect cores or GPUs. More ranks than cores are a rehearsal, not a measurement. Without JOB the
    job is `demo`. A run has --steps 12, or 6 with --quick; the first two do not count. Ctrl-C keeps what was
    measured.
    """
    from mpctl.measure.bench.cases import RunCase, case_warnings, plan_cases
    from mpctl.measure.bench.runner import Budget, Watch
    from mpctl.measure.bench.scaling import ScalingBench, scaling_cases
    from mpctl.render.progress import TaskBar
    from mpctl.run.hosts.machine import this_machine

    job, named = with_layout_words(bench.on_hosts(job), layouts, words or [])
    source = job if job.source else JobSource(DEFAULT_JOB, {**LITTLE_DATA, **job.overrides})
    source = bench.job(source, steps=DEFAULT_STEPS, quick_steps=QUICK_STEPS)
    base, machine = source.plan().job, this_machine()
    modes: tuple[Mode, ...] = ("strong", "weak") if mode == "both" else (mode,)
    shapes = scaling_cases(base, _layouts(base, named, world, along), modes)
    to_run = [RunCase(case.name, partial(source.plan, case.settings(base)), case.title) for case in shapes]
    cases = plan_cases(to_run, bench.folder, machine, overwrite=bench.overwrite)
    measured = ScalingBench(
        bench.environment,
        bench.command,
        rounds or (1 if bench.quick else DEFAULT_ROUNDS),
        cases,
        base.name,
        shapes,
        modes,
    )
    bench.warn(case_warnings(cases))
    is_stopped = False
    with TaskBar(lines=True) as bar:
        try:
            watch = Watch(bar.update, bar.note, bar.print)
            measured.run(bench.folder, budget=Budget(bench.seconds), watch=watch)
        except KeyboardInterrupt:
            if not measured.runs:
                raise
            is_stopped = True
    bench.finish(measured.report(), is_stopped=is_stopped)


def _layouts(base: JobSpec, words: list[str] | None, world: str | None, along: Along | None) -> list[Layout]:
    """The layouts to be timed, at least two."""
    from mpctl.core.errors import InputError
    from mpctl.measure.bench.layouts import job_layouts, parse_layouts, parse_worlds

    if words and along:
        raise InputError.of("usage", "--along", "--layouts names the axes already", "use one of them")
    if words:
        found = parse_layouts(words, parse_worlds(world) if world else None)
    else:
        found = job_layouts(base.parallel, parse_worlds(world or DEFAULT_WORLDS), along or "job")
    if len(found) < 2:
        message = f"{found[0].name} alone is held against nothing"
        hint = "name two layouts at least: --world 1,2 or --layouts tp=1,2"
        raise InputError.of("bad-layouts", "--layouts" if words else "--world", message, hint)
    return found
