"""Kernels of a model at their local shapes, measured on this machine and estimated by the plan.

Ranks of a launch (measure/bench/probe.py) run every kernel in rounds, A B C A B C: in each round alone
and then with all ranks at once, since cores share caches and memory. The seconds of a row are those
of one run of the kernel on the slowest rank, the median over the rounds.

    share of peak = FLOP/s over the peak of the dtype, or bytes/s over the memory's bandwidth

A product of 268 MFLOP in 2 ms is 134 GFLOP/s, of a core of 185 GFLOP/s 72.5 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from typing_extensions import TypedDict  # pydantic needs it to validate them before Python 3.12

from mpctl.measure.bench.kernel_cases import KernelCases
from mpctl.measure.bench.kernel_list import PlannedKernel
from mpctl.measure.bench.probe import RankBench
from mpctl.measure.bench.report import BenchEnvelope, BenchRow, envelope, spread
from mpctl.records.rundir.requests import KernelRequest, KernelTiming
from mpctl.run.hosts.machine import Machine

LEAST_SECONDS, QUICK_LEAST_SECONDS = 0.02, 0.005


class KernelRow(BenchRow):
    """A kernel, run by `ranks` ranks together. site: where the model has it; cpu_seconds: processor
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
    """Output of `mpctl bench kernels --json`, also written to OUT/report.json."""

    results: list[KernelRow]
    findings: KernelFindings


@dataclass
class KernelBench(RankBench):
    """Every kernel, timed by every number of ranks. seconds: limit of all rounds, the first of
    which is always completed; quick: shorter timings."""

    cases: KernelCases
    seconds: float | None = None
    quick: bool = False

    timing = "time the kernels"

    @property
    def round_timings(self) -> int:
        """A timing of each kernel by each number of ranks."""
        return self.cases.timings

    def request(self) -> KernelRequest:
        training = self.cases.job.training
        return {
            "task": "kernels",
            "cases": [kernel.case for kernel in self.cases.kernels],
            "dropout": training.dropout,
            "attention_dropout": training.attention_dropout,
            "ranks": list(self.cases.ranks),
            "rounds": self.rounds,
            "seconds": self.seconds,
            "least_seconds": QUICK_LEAST_SECONDS if self.quick else LEAST_SECONDS,
        }

    def use(self, machine: Machine) -> None:
        self.cases = replace(self.cases, cores=self.cases.units(machine))

    @property
    def rows(self) -> list[KernelRow]:
        """A row for each kernel and number of ranks with any timing."""
        by_case: dict[tuple[int, int], list[KernelTiming]] = {}
        for timing in self.timings:
            by_case.setdefault((timing["case"], timing["ranks"]), []).append(timing)
        return [
            _row(self.cases, self.cases.kernels[number], ranks, own) for (number, ranks), own in sorted(by_case.items())
        ]

    def report(self) -> KernelsReport:
        cases = self.cases
        device, model = cases.device, cases.job.model
        peaks = device.peak_flops if device else {}
        return {
            **envelope(
                "kernels",
                cases.job.name or (model.name if model else None),
                self.environment,
                self.command,
                is_complete=self.is_complete,
                hosts=self.hosts,
            ),
            "results": self.rows,
            "findings": {
                "device": device.name if device else None,
                "peak_flops": {str(dtype): rate for dtype, rate in peaks.items()},
                "memory_bandwidth": device.memory_bandwidth if device else None,
                "threads": cases.threads,
            },
        }


def _row(cases: KernelCases, kernel: PlannedKernel, ranks: int, timings: Sequence[KernelTiming]) -> KernelRow:
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
    if cases.device is None:
        return None
    if not kernel.is_compute:
        peak = cases.device.memory_bandwidth
        return moved / peak if peak else None
    peak = cases.device.peak_flops.get(kernel.case["dtype"])
    return flops / peak if peak else None
