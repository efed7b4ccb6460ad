"""Scaling efficiency: the same job at several world sizes.

    speed-up S(N) = throughput(N) / throughput(N0)        efficiency E(N) = S(N) / (N / N0)

against the smallest world N0. Strong scaling keeps the global batch, weak scaling keeps the work of
a rank: the global batch grows with N. The published figure in this form (Megatron-LM, arXiv
1909.08053, section 5.1): 15.1 PFLOP/s on 512 GPUs against 39 TFLOP/s on one, 15100 / (512 x 39) =
76 %. Every case runs with the same number of threads a rank, so that one rank does not quietly use
the cores of the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from statistics import median
from typing import Literal

from typing_extensions import TypedDict  # pydantic needs it to validate them before Python 3.12

from mpctl.bench.cases import TIMED_SETTINGS
from mpctl.bench.report import BenchEnvelope, BenchRow, spread
from mpctl.bench.runner import CaseRun
from mpctl.errors import InputError
from mpctl.spec.job import JobSpec

Mode = Literal["strong", "weak"]
Along = Literal["job", "tp", "dp"]


@dataclass(frozen=True, slots=True)
class Case:
    """One layout to be timed, and the scaling modes of which it is a row."""

    world: int
    tp: int
    dp: int
    global_batch_size: int
    modes: tuple[Mode, ...]

    @property
    def settings(self) -> Mapping[str, object]:
        """The settings that make the job this case, without validations and checkpoints."""
        return {
            "cluster.nodes": 1,
            "cluster.gpus_per_node": self.world,
            "parallel.tp": self.tp,
            "parallel.dp": self.dp,
            "training.global_batch_size": self.global_batch_size,
            **TIMED_SETTINGS,
        }

    @property
    def name(self) -> str:
        """`strong-2` or `strong+weak-1`."""
        return f"{'+'.join(self.modes)}-{self.world}"


def scaling_cases(
    job: JobSpec, worlds: Sequence[int], *, along: Along, modes: Sequence[Mode]
) -> list[Case]:
    """The cases in order of world size; a layout that both modes need is one case.

    along: `job` uses tp up to the job's tp, then dp; `tp` and `dp` use that axis alone. The job's
    global batch is that of the smallest world.
    """
    smallest, batch = min(worlds), job.training.global_batch_size or 1
    modes_of: dict[tuple[int, int], list[Mode]] = {}
    for world in sorted(set(worlds)):
        for mode in modes:
            size = batch if mode == "strong" else batch * world // smallest
            modes_of.setdefault((world, size), []).append(mode)
    return [
        Case(world, tp := _tp(job, world, along), world // tp, size, tuple(names))
        for (world, size), names in modes_of.items()
    ]


def _tp(job: JobSpec, world: int, along: Along) -> int:
    return {"job": gcd(job.parallel.tp, world), "tp": world, "dp": 1}[along]


def parse_worlds(text: str) -> list[int]:
    """`"1,2,4"` -> [1, 2, 4]; raises InputError for anything else."""
    words = text.split(",")
    if not all(word.strip().isdigit() and int(word) > 0 for word in words):
        raise InputError.of("bad-worlds", "--world", f"{text!r} is not a list of world sizes",
                            "for example --world 1,2,4")  # fmt: skip
    return sorted({int(word) for word in words})


@dataclass(frozen=True, slots=True)
class Timing:
    """The steps of one case after the warm-up, over all its repeats. cpu_seconds: processor time
    of rank 0 in each step; predicted: the plan's step time in seconds."""

    case: Case
    step_seconds: tuple[float, ...]
    cpu_seconds: tuple[float, ...]
    tokens_per_step: int
    predicted: float | None

    @property
    def seconds(self) -> float:
        """The median time of a step."""
        return median(self.step_seconds)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all ranks together, at the median step time."""
        return self.tokens_per_step / self.seconds


def timing_of(case: Case, runs: Sequence[CaseRun]) -> Timing:
    """The timing of a case from its runs, at least one."""
    steady = [record for run in runs for record in run.steady]
    first = runs[0].case
    return Timing(
        case=case,
        step_seconds=tuple(record["step_seconds"] for record in steady),
        cpu_seconds=tuple(record["cpu_seconds"] for record in steady),
        tokens_per_step=first.tokens_per_step,
        predicted=first.job.launch.predicted_step_seconds,
    )


class ScalingRow(BenchRow):
    """One world size of one mode; its seconds are those of a step. sizes: of the parallel axes;
    cpu_seconds: the median processor time of rank 0; speed_up, efficiency: against the smallest
    world of the mode."""

    mode: Mode
    world_size: int
    sizes: dict[str, int]
    global_batch_size: int
    cpu_seconds: float
    predicted_seconds: float | None
    tokens_per_second: float
    speed_up: float
    efficiency: float


class ScalingFindings(TypedDict):
    """steps_timed: of each case, over all its rounds."""

    steps_timed: int


class ScalingReport(BenchEnvelope):
    """What `mpctl bench scaling --json` prints, and OUT/report.json."""

    results: list[ScalingRow]
    findings: ScalingFindings


def scaling_rows(timings: Sequence[Timing], mode: Mode) -> list[ScalingRow]:
    """One row for each world size of this mode."""
    of_mode = [timing for timing in timings if mode in timing.case.modes]
    return [_row(timing, of_mode[0], mode) for timing in of_mode]


def _row(timing: Timing, base: Timing, mode: Mode) -> ScalingRow:
    case = timing.case
    speed_up = timing.tokens_per_second / base.tokens_per_second
    return {
        "name": f"{mode} {case.world}",
        **spread(timing.step_seconds),
        "mode": mode,
        "world_size": case.world,
        "sizes": {"tp": case.tp, "dp": case.dp},
        "global_batch_size": case.global_batch_size,
        "cpu_seconds": median(timing.cpu_seconds),
        "predicted_seconds": timing.predicted,
        "tokens_per_second": timing.tokens_per_second,
        "speed_up": speed_up,
        "efficiency": speed_up / (case.world / base.case.world),
    }
