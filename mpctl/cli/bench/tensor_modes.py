"""`mpctl bench tensor-modes`: one layer in every mode of tensor parallelism, beside its plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from mpctl.cli.bench.bench import BenchCommand, with_bench
from mpctl.cli.bench.hosts import RANKS, with_joined_hosts
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
@with_bench("tensor-modes")
def tensor_modes(
    job: JobSource,
    bench: BenchCommand,
    ranks: RanksOption = 4,
    rounds: RoundsOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say which modes would be timed, and time none.")
    ] = False,
) -> None:
    """Run one layer of JOB's model in every tensor mode that the ranks allow, beside its plan.

    Prints time, bytes sent, parameters and saved activations of a rank. A mode takes --steps
    forwards and backwards in each round, by default 5. Without JOB the layer is of the preset
    demo-gpt. Ctrl-C prints what was measured until then.
    """
    from mpctl.bench.report import save_report, take_folder
    from mpctl.bench.tensor_modes import DEFAULT_JOB, bench_report, layer_job, measure, mode_cases
    from mpctl.cli.signals import ended_by_signals
    from mpctl.hosts.machine import this_machine
    from mpctl.render.bench_modes import print_cases, print_report
    from mpctl.render.progress import TaskBar
    from mpctl.rundir.directory import RunDir

    settings = {**({} if job.source else DEFAULT_JOB), **job.overrides}
    steps = settings.pop("training.steps", DEFAULT_PASSES)
    loaded = layer_job(job.source, settings)
    rounds = rounds or (QUICK_ROUNDS if bench.quick else DEFAULT_ROUNDS)
    cases = mode_cases(loaded, ranks, this_machine(), device=bench.device or loaded.launch.device)
    if dry_run:
        print_cases(cases, rounds=rounds, steps=steps)
        return
    folder = bench.folder
    bench.warn([])
    take_folder(folder)

    def report_of(measured: MeasuredModes) -> TensorModesReport:
        return bench_report(cases, measured, bench.environment, steps=steps, command=bench.command)

    with (
        ended_by_signals(f"{folder} has what was measured"),
        TaskBar(lines=not bench.as_json) as bar,
    ):
        measured = measure(
            cases, RunDir(folder / RANKS), rounds=rounds, steps=steps, seconds=bench.seconds,
            on_progress=bar.update, on_event=bar.print,
            on_round=lambda measured: save_report(folder, report_of(measured)),
        )  # fmt: skip
    bench.finish(report_of(measured), print_report, is_stopped=measured.is_stopped)
