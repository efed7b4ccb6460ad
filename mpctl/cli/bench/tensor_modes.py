"""`mpctl bench tensor-modes`: one layer in every mode of tensor parallelism, beside its plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from mpctl.cli.bench.finish import finish
from mpctl.cli.bench.hosts import RANKS, with_joined_hosts
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
    from mpctl.bench.tensor_modes import MeasuredModes, TensorModesReport

DEFAULT_PASSES, DEFAULT_ROUNDS, QUICK_ROUNDS = 5, 5, 2


RanksOption = Annotated[
    int, typer.Option(min=1, help="Ranks that share the layer: 4 are a square, 8 a cube.")
]
RoundsOption = Annotated[
    int | None,
    typer.Option(
        min=1, help="Rounds of all modes, in alternation; by default 5.", show_default=False
    ),
]


@with_job
@with_joined_hosts
def tensor_modes(
    job: JobSource,
    ranks: RanksOption = 4,
    rounds: RoundsOption = None,
    device: DeviceOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say which modes would be timed, and time none.")
    ] = False,
    out: OutOption = None,
    overwrite: OverwriteOption = False,
    as_json: AsJsonOption = False,
    quick: QuickOption = False,
    budget: BudgetOption = None,
) -> None:
    """Run one layer of JOB's model in every tensor mode that the ranks allow, beside its plan.

    Prints time, bytes sent, parameters and saved activations of a rank. A mode takes --steps
    forwards and backwards in each round, by default 5. Without JOB the layer is of the preset
    demo-gpt. Ctrl-C prints what was measured until then.
    """
    from mpctl.bench.folder import save_report, take_folder
    from mpctl.bench.mode_cases import DEFAULT_JOB, layer_job, mode_cases
    from mpctl.bench.report import bench_environment, load_warnings
    from mpctl.bench.tensor_modes import bench_report, measure
    from mpctl.cli.signals import ended_by_signals
    from mpctl.launch.node.machine import this_machine
    from mpctl.render.bench_modes import print_cases, print_report
    from mpctl.render.errors import print_warnings
    from mpctl.render.tasks import TaskBar
    from mpctl.rundir.directory import RunDir

    settings = {**({} if job.source else DEFAULT_JOB), **job.overrides}
    steps = settings.pop("training.steps", DEFAULT_PASSES)
    loaded, seconds = layer_job(job.source, settings), budget_seconds(budget, quick=quick)
    rounds = rounds or (QUICK_ROUNDS if quick else DEFAULT_ROUNDS)
    cases = mode_cases(loaded, ranks, this_machine(), device=device or loaded.launch.device)
    if dry_run:
        print_cases(cases, rounds=rounds, steps=steps)
        return
    folder, environment = (
        bench_folder("tensor-modes", out, overwrite=overwrite),
        bench_environment(),
    )
    print_warnings(load_warnings(environment))
    take_folder(folder)

    def report_of(measured: MeasuredModes) -> TensorModesReport:
        return bench_report(cases, measured, environment, steps=steps, command=command_text())

    with ended_by_signals(f"{folder} has what was measured"), TaskBar(lines=not as_json) as bar:
        measured = measure(
            cases, RunDir(folder / RANKS), rounds=rounds, steps=steps, seconds=seconds,
            on_progress=bar.update, on_event=bar.print,
            on_round=lambda measured: save_report(folder, report_of(measured)),
        )  # fmt: skip
    finish(folder, report_of(measured), print_report, as_json=as_json)
    if measured.is_stopped:
        raise KeyboardInterrupt
