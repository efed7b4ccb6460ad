"""`mpctl bench kernels`: the kernels of a model on this machine, beside the planner's estimate."""

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
def kernels(
    job: JobSource,
    ranks: RanksOption = None,
    rounds: RoundsOption = None,
    device: DeviceOption = None,
    out: OutOption = None,
    overwrite: OverwriteOption = False,
    as_json: AsJsonOption = False,
    quick: QuickOption = False,
    budget: BudgetOption = None,
) -> None:
    """Time the kernels of JOB's model at their local shapes, beside the planner's estimate.

    Matrix products and attention, forward and backward, norms with their residual sums,
    activations, cross entropy, the optimizer's step, gradient accumulation, memory (STREAM's triad
    and copy), a whole layer and a tiny one, whose time is the host's. Shares are of the peak FLOP/s
    or memory bandwidth of the cluster's device. --dtype takes several, such as fp32,bf16. Without
    JOB the kernels are of the preset demo-gpt. Ctrl-C keeps what was measured.
    """
    from mpctl.bench.folder import save_report, take_folder
    from mpctl.bench.kernel_cases import (
        DEFAULT_JOB,
        DTYPE,
        kernel_cases,
        parse_dtypes,
        parse_ranks,
    )
    from mpctl.bench.kernels import kernels_report, measure_kernels
    from mpctl.bench.report import bench_environment, load_warnings
    from mpctl.cli.signals import ended_by_signals
    from mpctl.launch.node.machine import this_machine
    from mpctl.render.bench_kernels import print_kernels
    from mpctl.render.errors import print_warnings
    from mpctl.render.tasks import TaskBar
    from mpctl.rundir.directory import RunDir
    from mpctl.spec.load import load_job

    settings = {**({} if job.source else DEFAULT_JOB), **job.overrides}
    dtypes = parse_dtypes(settings.pop(DTYPE)) if DTYPE in settings else ()
    seconds, machine = budget_seconds(budget, quick=quick), this_machine()
    loaded = load_job(job.source, settings)
    counts = parse_ranks(ranks, machine, device=device or loaded.launch.device)
    cases = kernel_cases(loaded, machine, ranks=counts, dtypes=dtypes, device=device)
    folder = bench_folder("kernels", out, overwrite=overwrite)
    environment = bench_environment()
    print_warnings([*cases.warnings, *load_warnings(environment)])
    take_folder(folder)

    def report_of(measured: MeasuredKernels) -> KernelsReport:
        return kernels_report(cases, measured, environment, command=command_text())

    with ended_by_signals(f"{folder} has what was measured"), TaskBar(lines=not as_json) as bar:
        measured = measure_kernels(
            cases, RunDir(folder / RANKS), seconds=seconds, quick=quick,
            rounds=rounds or (QUICK_ROUNDS if quick else DEFAULT_ROUNDS),
            on_progress=bar.update, on_event=bar.print,
            on_round=lambda measured: save_report(folder, report_of(measured)),
        )  # fmt: skip
    finish(folder, report_of(measured), print_kernels, as_json=as_json)
    if measured.is_stopped:
        raise KeyboardInterrupt
