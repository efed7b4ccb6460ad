"""`mpctl bench collectives`: collectives along each axis of a layout, measured as by nccl-tests."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from mpctl.cli.bench.common import HostsBench, with_bench
from mpctl.cli.options import JobSource, with_job
from mpctl.core.errors import RunFailed

MinBytes = Annotated[str, typer.Option("-b", "--minbytes", help="Smallest size: 8, 64K, 1M.")]
MaxBytes = Annotated[str, typer.Option("-e", "--maxbytes", help="Largest size.")]
StepFactor = Annotated[
    float | None, typer.Option("-f", "--stepfactor", show_default=False, help="Factor between sizes; by default 4.")
]
StepBytes = Annotated[
    str | None, typer.Option("-i", "--stepbytes", show_default=False, help="Step in bytes, instead of -f.")
]
Iterations = Annotated[
    int | None, typer.Option("-n", "--iters", min=1, show_default=False, help="Calls in a round; 20.")
]
WarmUp = Annotated[
    int, typer.Option("-w", "--warmup-iters", "--warmup_iters", min=0, help="Untimed calls before them.")
]
DataType = Annotated[
    str, typer.Option("-d", "--datatype", help="float, double, half, bfloat16, int8, uint8, int32 or int64.")
]
Op = Annotated[Literal["sum", "max"], typer.Option("-o", "--op", help="Operation of reductions.")]
Root = Annotated[
    int, typer.Option("-r", "--root", help="Rank of the group that broadcasts, or receives the reduction.")
]
Check = Annotated[int, typer.Option("-c", "--check", min=0, help="0: do not check results.")]
Kinds = Annotated[
    str,
    typer.Option(
        help="From all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce, sendrecv; by default all.",
        show_default=False,
    ),
]
Axes = Annotated[
    str,
    typer.Option(
        help="Axes of the layout, such as tp,dp,ep, or world; by default all with more than one rank.",
        show_default=False,
    ),
]
Transports = Annotated[
    str, typer.Option(help="Backends: gloo,shared on CPU, nccl on GPUs; by default all.", show_default=False)
]
Rounds = Annotated[
    int | None, typer.Option(min=1, show_default=False, help="Rounds, each with all cases; by default 3.")
]


@with_job
@with_bench("collectives", HostsBench)
def collectives(
    job: JobSource,
    bench: HostsBench,
    minbytes: MinBytes = "1K",
    maxbytes: MaxBytes = "16M",
    stepfactor: StepFactor = None,
    stepbytes: StepBytes = None,
    iterations: Iterations = None,
    warm_up: WarmUp = 5,
    datatype: DataType = "float",
    op: Op = "sum",
    root: Root = 0,
    check: Check = 1,
    kinds: Kinds = "",
    axes: Axes = "",
    transports: Transports = "",
    rounds: Rounds = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be timed, and time nothing.")] = False,
) -> None:
    """Time and check collectives along each axis of JOB's layout, as nccl-tests does.

    All groups of an axis run at once, as in training. Without JOB and a layout, tp covers the cores or GPUs
    of this machine. busbw = size / time x 2(n-1)/n for all_reduce, (n-1)/n for all_gather, reduce_scatter
    and all_to_all, 1 for the others. Exit code 1 if a result is wrong. Ctrl-C keeps what was measured.
    """
    from mpctl.measure.bench.collective_cases import CollectiveFlags, plan_collectives
    from mpctl.measure.bench.collectives import CollectiveBench
    from mpctl.render.bench import print_collective_cases
    from mpctl.run.hosts.machine import this_machine

    job = bench.joined(job, is_dry=dry_run)
    flags = CollectiveFlags(
        minbytes,
        maxbytes,
        stepfactor or (16.0 if bench.quick and stepbytes is None else None),
        stepbytes,
        kinds,
        axes,
        transports,
        datatype,
        op=op,
        root=root,
        warm_up=warm_up,
        iterations=iterations or (5 if bench.quick else 20),
        rounds=rounds or (2 if bench.quick else 3),
        check=check > 0,
        seconds=bench.seconds,
    )
    source = job.with_settings({"launch.device": bench.device})
    cases = plan_collectives(source.source, source.overrides, flags, this_machine())
    if dry_run:
        print_collective_cases(cases)
        return
    measured = CollectiveBench(bench.environment, bench.command, cases.options.rounds, cases)
    bench.measure(measured)
    bench.finish(measured.report())
    if wrong := [row["name"] for row in measured.rows if row["wrong"] > 0]:
        names = ", ".join(wrong[:3])
        raise RunFailed(f"{len(wrong)} of {len(measured.rows)} rows are wrong: {names}")
    if measured.is_stopped:
        raise KeyboardInterrupt
