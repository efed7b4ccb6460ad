"""Kernels of a model at their local shapes, measured on this machine and estimated by the plan.

Ranks of a launch (bench/probe.py) run every kernel in rounds, A B C A B C: in each round alone
and then with all ranks at once, since cores share caches and memory. The seconds of a row are those
of one run of the kernel on the slowest rank, the median over the rounds.

    share of peak = FLOP/s over the peak of the dtype, or bytes/s over the memory's bandwidth

A product of 268 MFLOP in 2 ms is 134 GFLOP/s, of a core of 185 GFLOP/s 72.5 %.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from typing_extensions import TypedDict  # pydantic needs it to validate them before Python 3.12

from mpctl.bench.kernel_cases import KernelCases
from mpctl.bench.kernel_list import PlannedKernel
from mpctl.bench.probe import probe_answers
from mpctl.bench.report import (
    SCHEMA,
    BenchEnvelope,
    BenchEnvironment,
    BenchRow,
    environment_on,
    spread,
)
from mpctl.clusters.backend import OnEvent
from mpctl.hosts.machine import HostFacts
from mpctl.launch.set_up import Progress
from mpctl.rundir.directory import RunDir
from mpctl.rundir.requests import KernelRequest, KernelTiming

LEAST_SECONDS, QUICK_LEAST_SECONDS = 0.02, 0.005
STARTING, TIMING = "start the ranks", "time the kernels"


class KernelRow(BenchRow):
    """A kernel, run by so many ranks at once. site: where the model has it; cpu_seconds: processor
    time of one run, the median; flops, bytes: computed, and moved at least; share_of_peak: of the
    device's peak FLOP/s or memory bandwidth; predicted_seconds: the plan's. Both are None where the
    job's cluster does not describe the device."""

    kernel: str
    site: str
    part: str
    shape: dict[str, int]
    dtype: str
    ranks: int
    is_rehearsal: bool
    cpu_seconds: float
    flops: float
    bytes: float
    flops_per_second: float
    bytes_per_second: float
    share_of_peak: float | None
    predicted_seconds: float | None


class KernelFindings(TypedDict):
    """device: its preset's name, None where the job's cluster does not describe what ran;
    peak_flops: FLOP/s by dtype; memory_bandwidth: bytes/s; threads: of a rank."""

    device: str | None
    peak_flops: dict[str, float]
    memory_bandwidth: float | None
    threads: int


class KernelsReport(BenchEnvelope):
    """What `mpctl bench kernels --json` prints, and OUT/report.json."""

    results: list[KernelRow]
    findings: KernelFindings


@dataclass
class MeasuredKernels:
    """rows: in the order of the cases, each kernel with every number of ranks. is_complete: false
    after Ctrl-C, and where the budget ended before the last round; is_stopped: by Ctrl-C; hosts:
    facts of those that had the ranks, once known."""

    rows: list[KernelRow]
    is_complete: bool
    is_stopped: bool = False
    hosts: tuple[HostFacts, ...] = ()


OnRound = Callable[[MeasuredKernels], None]


def measure_kernels(
    cases: KernelCases, run: RunDir, *, rounds: int, seconds: float | None = None,
    quick: bool = False, on_progress: Progress, on_event: OnEvent,
    on_round: OnRound | None = None,
) -> MeasuredKernels:  # fmt: skip
    """Time every kernel; what Ctrl-C leaves is incomplete.

    run: the directory of the launch, replaced. seconds: that all rounds may take; the first is
    always completed. quick: shorter timings. on_progress: called with (stage, timings done, all);
    on_event: messages for people; on_round: given what was measured after each round. Raises
    InputError where the hosts cannot run the ranks, RunFailed when a rank fails.
    """
    training, timings = cases.job.training, list[KernelTiming]()
    request: KernelRequest = {
        "task": "kernels", "cases": [kernel.case for kernel in cases.kernels],
        "dropout": training.dropout, "attention_dropout": training.attention_dropout,
        "ranks": list(cases.ranks), "rounds": rounds, "seconds": seconds,
        "least_seconds": QUICK_LEAST_SECONDS if quick else LEAST_SECONDS,
    }  # fmt: skip

    def keep(answer: KernelTiming) -> None:
        timings.append(answer)
        on_progress(TIMING, len(timings), rounds * cases.timings)
        if on_round and len(timings) % cases.timings == 0:
            on_round(MeasuredKernels(kernel_rows(cases, timings), is_complete=False))

    on_progress(STARTING, 0, 0)
    ended = probe_answers(cases.plan, request, run, on_answer=keep, on_event=on_event)
    there = replace(cases, cores=cases.units(ended.machine))
    is_complete = len(timings) == rounds * cases.timings
    rows = kernel_rows(there, timings)
    return MeasuredKernels(rows, is_complete, not ended.is_complete, ended.hosts)


def kernel_rows(cases: KernelCases, timings: Sequence[KernelTiming]) -> list[KernelRow]:
    """A row for each kernel and number of ranks of which something was timed."""
    by_case: dict[tuple[int, int], list[KernelTiming]] = {}
    for timing in timings:
        by_case.setdefault((timing["case"], timing["ranks"]), []).append(timing)
    return [
        _row(cases, cases.kernels[number], ranks, own)
        for (number, ranks), own in sorted(by_case.items())
    ]


def _row(
    cases: KernelCases, kernel: PlannedKernel, ranks: int, timings: Sequence[KernelTiming]
) -> KernelRow:
    case, times = kernel.case, spread([timing["seconds"] for timing in timings])
    flops, moved = kernel.flops / times["seconds"], kernel.bytes / times["seconds"]
    return {
        "name": f"{kernel.name} x{ranks}",
        **times,
        "kernel": case["kernel"],
        "site": kernel.site,
        "part": case["part"],
        "shape": case["shape"],
        "dtype": case["dtype"],
        "ranks": ranks,
        "is_rehearsal": ranks > cases.cores,
        "cpu_seconds": median(timing["cpu_seconds"] for timing in timings),
        "flops": kernel.flops,
        "bytes": kernel.bytes,
        "flops_per_second": flops,
        "bytes_per_second": moved,
        "share_of_peak": _share(cases, kernel, flops, moved),
        "predicted_seconds": kernel.predicted_seconds,
    }


def _share(cases: KernelCases, kernel: PlannedKernel, flops: float, moved: float) -> float | None:
    device = cases.device
    if device is None:
        return None
    peak = (
        device.peak_flops.get(kernel.case["dtype"])
        if kernel.is_compute
        else device.memory_bandwidth
    )
    return (flops if kernel.is_compute else moved) / peak if peak else None


def kernels_report(
    cases: KernelCases, measured: MeasuredKernels, environment: BenchEnvironment, *, command: str
) -> KernelsReport:
    """What was measured, as JSON."""
    device, model = cases.device, cases.job.model
    peaks = device.peak_flops if device else {}
    return {
        "schema": SCHEMA,
        "bench": "kernels",
        "job": cases.job.name or (model.name if model else None),
        "is_complete": measured.is_complete,
        "environment": environment_on(environment, measured.hosts),
        "command": command,
        "results": measured.rows,
        "findings": {
            "device": device.name if device else None,
            "peak_flops": {str(dtype): rate for dtype, rate in peaks.items()},
            "memory_bandwidth": device.memory_bandwidth if device else None,
            "threads": cases.threads,
        },
    }
