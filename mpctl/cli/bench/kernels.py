"""`mpctl bench kernels`: the kernels of a model on this machine, beside the planner's estimate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from mpctl.cli.bench.bench import BenchCommand, with_bench
from mpctl.cli.bench.hosts import RANKS, with_joined_hosts
from mpctl.cli.options import JobSource, with_job

if TYPE_CHECKING:
    from mpctl.bench.kernels import KernelsReport, MeasuredKernels

DEFAULT_ROUNDS, QUICK_ROUNDS = 5, 2

RanksOption = Annotated[
    str | None,
    typer.Option(
        metavar="N,...",
        help="How many ranks run a kernel at the same time, such as 1,2; by default 1 and one for "
        "each core, or GPU.",
        show_default=False,
    ),
]
RoundsOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help=f"Rounds of all kernels, in alternation; by default {DEFAULT_ROUNDS}, with --quick "
        f"{QUICK_ROUNDS}.",
        show_default=False,
    ),
]


@with_job
@with_joined_hosts
@with_bench("kernels")
def kernels(
    job: JobSource,
    bench: BenchCommand,
    ranks: RanksOption = None,
    rounds: RoundsOption = None,
) -> None:
    """Time the kernels of JOB's model at their local shapes, beside the planner's estimate.

    Matrix products and attention, forward and backward, norms with their residual sums,
    activations, cross entropy, the optimizer's step, gradient accumulation, memory (STREAM's triad
    and copy), a whole layer and a tiny one, whose time is the host's. Shares are of the peak FLOP/s
    or memory bandwidth of the cluster's device. --dtype takes several, such as fp32,bf16. Without
    JOB the kernels are of the preset demo-gpt. Ctrl-C keeps what was measured.
    """
    from mpctl.bench.kernel_cases import (
        DEFAULT_JOB,
        DTYPE,
        kernel_cases,
        parse_dtypes,
        parse_ranks,
    )
    from mpctl.bench.kernels import kernels_report, measure_kernels
    from mpctl.bench.report import save_report, take_folder
    from mpctl.cli.signals import ended_by_signals
    from mpctl.hosts.machine import this_machine
    from mpctl.render.bench_kernels import print_kernels
    from mpctl.render.progress import TaskBar
    from mpctl.rundir.directory import RunDir
    from mpctl.spec.load import load_job

    settings = {**({} if job.source else DEFAULT_JOB), **job.overrides}
    dtypes = parse_dtypes(settings.pop(DTYPE)) if DTYPE in settings else ()
    loaded, machine = load_job(job.source, settings), this_machine()
    counts = parse_ranks(ranks, machine, device=bench.device or loaded.launch.device)
    cases = kernel_cases(loaded, machine, ranks=counts, dtypes=dtypes, device=bench.device)
    folder = bench.folder
    bench.warn(cases.warnings)
    take_folder(folder)

    def report_of(measured: MeasuredKernels) -> KernelsReport:
        return kernels_report(cases, measured, bench.environment, command=bench.command)

    with (
        ended_by_signals(f"{folder} has what was measured"),
        TaskBar(lines=not bench.as_json) as bar,
    ):
        measured = measure_kernels(
            cases, RunDir(folder / RANKS), seconds=bench.seconds, quick=bench.quick,
            rounds=rounds or (QUICK_ROUNDS if bench.quick else DEFAULT_ROUNDS),
            on_progress=bar.update, on_event=bar.print,
            on_round=lambda measured: save_report(folder, report_of(measured)),
        )  # fmt: skip
    bench.finish(report_of(measured), print_kernels, is_stopped=measured.is_stopped)
