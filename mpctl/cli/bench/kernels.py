"""`mpctl bench kernels` and `tensor-modes`: parts of a model here, compared with its plan."""

from __future__ import annotations

from typing import Annotated

import typer

from mpctl.cli.bench.common import HostsBench, with_bench
from mpctl.cli.options import JobSource, with_job

DEFAULT_PASSES, DEFAULT_ROUNDS, QUICK_ROUNDS = 5, 5, 2

RanksOption = Annotated[
    str | None,
    typer.Option(
        metavar="N,...",
        help="Numbers of ranks that run a kernel at the same time, such as 1,2; by default 1 and "
        "one for each core, or GPU.",
        show_default=False,
    ),
]
RoundsOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help=f"Rounds, each with all kernels; by default {DEFAULT_ROUNDS}, with --quick {QUICK_ROUNDS}.",
        show_default=False,
    ),
]


@with_job
@with_bench("kernels", HostsBench)
def kernels(job: JobSource, bench: HostsBench, ranks: RanksOption = None, rounds: RoundsOption = None) -> None:
    """Time the kernels of JOB's model at their local shapes; compare with the planner's estimate.

    Matrix products, attention, norms, activations, cross entropy, the optimizer, gradient accumulation,
    memory (STREAM's triad and copy), a full layer, and a tiny one for the host's time. Shares are of the
    device's peak FLOP/s or memory bandwidth. --dtype takes several (fp32,bf16). Without JOB the model is
    demo-gpt. Ctrl-C keeps what was measured.
    """
    from mpctl.measure.bench.kernel_cases import DEFAULT_JOB, DTYPE, kernel_cases, parse_dtypes, parse_ranks
    from mpctl.measure.bench.kernels import KernelBench
    from mpctl.run.hosts.machine import this_machine
    from mpctl.spec.load import load_job

    job = bench.joined(job)
    settings = {**({} if job.source else DEFAULT_JOB), **job.overrides}
    dtypes = parse_dtypes(settings.pop(DTYPE)) if DTYPE in settings else ()
    loaded, machine = load_job(job.source, settings), this_machine()
    counts = parse_ranks(ranks, machine, device=bench.device or loaded.launch.device)
    cases = kernel_cases(loaded, machine, ranks=counts, dtypes=dtypes, device=bench.device)
    measured = KernelBench(
        bench.environment,
        bench.command,
        rounds or (QUICK_ROUNDS if bench.quick else DEFAULT_ROUNDS),
        cases,
        bench.seconds,
        bench.quick,
    )
    bench.measure(measured, cases.warnings)
    bench.finish(measured.report(), is_stopped=measured.is_stopped)


LayerRanksOption = Annotated[int, typer.Option(min=1, help="Ranks that share the layer: 4 are a square, 8 a cube.")]
ModeRoundsOption = Annotated[
    int | None, typer.Option(min=1, help="Rounds, each with all modes; by default 5.", show_default=False)
]


@with_job
@with_bench("tensor-modes", HostsBench)
def tensor_modes(
    job: JobSource,
    bench: HostsBench,
    ranks: LayerRanksOption = 4,
    rounds: ModeRoundsOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print which modes would be timed, and time none.")
    ] = False,
) -> None:
    """Run one layer of JOB's model in each possible tensor mode; compare with its plan.

    Prints time, bytes sent, parameters and saved activations of a rank. A mode takes --steps
    forwards and backwards in each round, by default 5. Without JOB the layer is of the preset
    demo-gpt. Ctrl-C prints what was measured until then.
    """
    from mpctl.measure.bench.tensor_modes import DEFAULT_JOB, ModeBench, layer_job, mode_cases
    from mpctl.render.bench import print_mode_cases
    from mpctl.run.hosts.machine import this_machine

    job = bench.joined(job, is_dry=dry_run)
    settings = {**({} if job.source else DEFAULT_JOB), **job.overrides}
    steps = settings.pop("training.steps", DEFAULT_PASSES)
    loaded = layer_job(job.source, settings)
    rounds = rounds or (QUICK_ROUNDS if bench.quick else DEFAULT_ROUNDS)
    machine = this_machine()
    cases = mode_cases(loaded, ranks, machine, device=bench.device or loaded.launch.device)
    if dry_run:
        print_mode_cases(cases, rounds=rounds, steps=steps)
        return
    measured = ModeBench(bench.environment, bench.command, rounds, cases, steps, machine, bench.seconds)
    bench.measure(measured)
    bench.finish(measured.report(), is_stopped=measured.is_stopped)
