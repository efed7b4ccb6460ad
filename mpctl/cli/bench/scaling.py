"""`mpctl bench scaling`: the same job at several world sizes and layouts, and its efficiency."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mpctl.cli.bench.finish import finish
from mpctl.cli.bench.hosts import with_hosts
from mpctl.cli.bench.layout_words import LayoutsOption, with_layout_words
from mpctl.cli.bench.options import (
    AsJsonOption,
    BudgetOption,
    DeviceOption,
    OutOption,
    OverwriteOption,
    QuickOption,
    bench_folder,
    budget_seconds,
    command_text,
)
from mpctl.cli.options import JobSource, with_job

if TYPE_CHECKING:
    from pathlib import Path

    from mpctl.bench.cases import PlannedCase
    from mpctl.bench.layouts import Along, Layout
    from mpctl.bench.scaling import Mode
    from mpctl.bench.scaling_rows import MeasuredScaling
    from mpctl.launch.node.machine import Machine
    from mpctl.spec.job import JobSpec

DEFAULT_JOB, DEFAULT_STEPS, QUICK_STEPS = "demo", 12, 6
DEFAULT_WORLDS, DEFAULT_ROUNDS = "1,2", 3
LITTLE_DATA = {"data.max_bytes": 1_000_000}  # prepared in seconds; a step takes as long

WorldOption = Annotated[
    str | None,
    typer.Option(help="World sizes; 1,2 by default, with --layouts any.", show_default=False),
]
MoreLayouts = Annotated[
    list[str] | None,
    typer.Argument(metavar="AXIS=SIZES", help="Further words of --layouts.", show_default=False),
]
ModeOption = Annotated[
    Literal["strong", "weak", "both"],
    typer.Option(help="Keep the global batch (strong), or the samples of a rank (weak)."),
]
AlongOption = Annotated[
    Literal["job", "tp", "cp", "pp", "dp"] | None,
    typer.Option(
        help="Without --layouts: one axis for all ranks, or by default the job's axes, then dp.",
        show_default=False,
    ),
]
RoundsOption = Annotated[
    int | None,
    typer.Option(
        "--rounds",
        "--repeats",
        min=1,
        help=f"Rounds of all cases, in alternation; by default {DEFAULT_ROUNDS}, with --quick 1.",
        show_default=False,
    ),
]


@with_job
@with_hosts
def scaling(
    job: JobSource,
    words: MoreLayouts = None,
    world: WorldOption = None,
    layouts: LayoutsOption = None,
    mode: ModeOption = "both",
    along: AlongOption = None,
    rounds: RoundsOption = None,
    device: DeviceOption = None,
    out: OutOption = None,
    overwrite: OverwriteOption = False,
    quick: QuickOption = False,
    budget: BudgetOption = None,
    as_json: AsJsonOption = False,
) -> None:
    """Train JOB at several world sizes and layouts; print speed, efficiency, MFU beside the plan.

    efficiency = (tokens/s of N ranks / tokens/s of the smallest N0) / (N / N0).

    In this form Megatron-LM published 76 %: 15.1 PFLOP/s on 512 GPUs against 39 TFLOP/s on one,
    15100 / (512 x 39) (arXiv 1909.08053). Strong scaling keeps the global batch; weak scaling lets
    it grow with N. Beside each efficiency stands what perfect cores (or GPUs) would reach; more
    ranks than cores are a rehearsal, not a measurement. MFU and HFU count the FLOP of the model and
    of the hardware (with recomputation) against the peak of the job's device.

    Without JOB the job is `demo`. A run takes --steps 12, or 6 with --quick, the first two of which
    do not count. Ctrl-C keeps what was measured.
    """
    from mpctl.bench.cases import case_warnings
    from mpctl.bench.report import bench_environment, load_warnings
    from mpctl.bench.scaling import scaling_cases
    from mpctl.bench.scaling_rows import MeasuredScaling
    from mpctl.launch.node.machine import this_machine
    from mpctl.render.bench import print_scaling
    from mpctl.render.errors import print_warnings

    seconds, environment = budget_seconds(budget, quick=quick), bench_environment()
    job, named = with_layout_words(job, layouts, words or [])
    source = job if job.source else JobSource(DEFAULT_JOB, {**LITTLE_DATA, **job.overrides})
    source = source.with_default("training.steps", QUICK_STEPS if quick else DEFAULT_STEPS)
    source = source if device is None else source.with_default("launch.device", device)
    base, machine = source.plan().job, this_machine()
    modes: tuple[Mode, ...] = ("strong", "weak") if mode == "both" else (mode,)
    measured = MeasuredScaling(
        base.name, scaling_cases(base, _layouts(base, named, world, along), modes), modes,
        rounds or (1 if quick else DEFAULT_ROUNDS), environment, command_text(),
    )  # fmt: skip
    folder = bench_folder("scaling", out, overwrite=overwrite)
    planned = _planned(measured, source, base, machine, folder, overwrite=overwrite)
    print_warnings([*case_warnings(planned), *load_warnings(environment)])
    is_stopped = _measure(measured, planned, folder, seconds)
    finish(folder, measured.report(), print_scaling, as_json=as_json)
    if is_stopped:
        raise KeyboardInterrupt


def _layouts(
    base: JobSpec, words: list[str] | None, world: str | None, along: Along | None
) -> list[Layout]:
    """The layouts to be timed, two at least."""
    from mpctl.bench.layouts import job_layouts, parse_layouts, parse_worlds
    from mpctl.errors import InputError

    if words and along:
        raise InputError.of(
            "usage", "--along", "--layouts names the axes already", "use one of them"
        )
    if words:
        found = parse_layouts(words, parse_worlds(world) if world else None)
    else:
        found = job_layouts(base.parallel, parse_worlds(world or DEFAULT_WORLDS), along or "job")
    if len(found) < 2:
        message = f"{found[0].name} alone is held against nothing"
        hint = "name two layouts at least: --world 1,2 or --layouts tp=1,2"
        raise InputError.of("bad-layouts", "--layouts" if words else "--world", message, hint)
    return found


def _planned(
    measured: MeasuredScaling, source: JobSource, base: JobSpec, machine: Machine, folder: Path, *,
    overwrite: bool,
) -> list[PlannedCase]:  # fmt: skip
    """Every case with its plan. Raises InputError with all issues of all cases."""
    from mpctl.bench.cases import RunCase, plan_cases

    to_run = [
        RunCase(case.name, partial(source.plan, case.settings(base)), case.title)
        for case in measured.cases
    ]
    return plan_cases(to_run, folder, machine, overwrite=overwrite)


def _measure(
    measured: MeasuredScaling, planned: list[PlannedCase], folder: Path, seconds: float | None
) -> bool:
    """Run the cases; the report is saved after every run. Returns whether Ctrl-C ended it after
    something was measured."""
    from mpctl.bench.budget import Budget
    from mpctl.bench.folder import save_report
    from mpctl.bench.runner import Watch, run_cases
    from mpctl.render.tasks import TaskBar

    try:
        with TaskBar(lines=True) as bar:
            for run in run_cases(
                planned, folder, command=measured.command, rounds=measured.rounds,
                budget=Budget(seconds), watch=Watch(bar.update, bar.note, bar.print),
            ):  # fmt: skip
                measured.add(run)
                save_report(folder, measured.report())
    except KeyboardInterrupt:
        if not measured.runs:
            raise
        return True
    return False
