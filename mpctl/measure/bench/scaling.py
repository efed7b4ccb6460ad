"""Scaling efficiency: the same job at several world sizes and in several layouts.

    speed-up S(N) = throughput(N) / throughput(N0)        efficiency E(N) = S(N) / (N / N0)

against the fastest layout of the smallest world N0. Strong scaling keeps the global batch, weak
scaling keeps the work of a rank: the global batch grows with N. The published figure in this form
(Megatron-LM, arXiv 1909.08053, section 5.1): 15.1 PFLOP/s on 512 GPUs against 39 TFLOP/s on one,
15100 / (512 x 39) = 76 %. Every case runs with the same number of threads a rank, so that one rank
does not quietly use the cores of the others.

FLOP of a step are counted, not measured (plan/estimate/flops.py): model FLOP/s of a device are those of
a rank over the step's seconds, MFU is their share of the device's peak, and HFU the same with the
FLOP that recomputation repeats. Perfect cores reach min(N, cores) / N: 4 ranks on 2 cores 50 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from typing_extensions import TypedDict  # pydantic needs it to validate them before Python 3.12

from mpctl.measure.bench.cases import TIMED_SETTINGS, PlannedCase
from mpctl.measure.bench.layouts import Layout
from mpctl.measure.bench.report import BenchEnvelope, BenchRow, envelope, spread
from mpctl.measure.bench.runner import CaseBench, CaseRun, communication_share, group_runs, hosts_of, planned_share
from mpctl.plan.estimate.flops import Utilization, device_peak, model_and_hardware_flops
from mpctl.plan.estimate.step import StepTime
from mpctl.plan.planning.plan import Overrides
from mpctl.spec.job import JobSpec

Mode = Literal["strong", "weak"]


@dataclass(frozen=True)
class ScalingCase:
    """A layout with a global batch, and the modes of scaling in which it is a row."""

    layout: Layout
    global_batch_size: int
    modes: tuple[Mode, ...]

    @property
    def name(self) -> str:
        """`strong-tp2-dp2` or `strong+weak-1-rank`, the prefix of its run directories."""
        return f"{'+'.join(self.modes)}-{self.layout.name.replace(' ', '-')}"

    @property
    def title(self) -> str:
        """`strong tp2 dp2` or `strong and weak 1 rank`."""
        return f"{' and '.join(self.modes)} {self.layout.name}"

    def settings(self, job: JobSpec) -> Overrides:
        """The settings that make a job this case, without validations and checkpoints."""
        batch = {"training.global_batch_size": self.global_batch_size}
        return {**self.layout.settings(job), **batch, **TIMED_SETTINGS}


def scaling_cases(job: JobSpec, layouts: Sequence[Layout], modes: Sequence[Mode]) -> list[ScalingCase]:
    """The cases in order of world size; a layout of which both modes need the same batch is one
    case. The job's global batch is that of the smallest world."""
    ordered = sorted(layouts, key=lambda layout: layout.world_size)
    smallest, batch = ordered[0].world_size, job.training.global_batch_size or 1
    modes_of: dict[tuple[str, int], list[Mode]] = {}
    for layout in ordered:
        for mode in modes:
            size = batch if mode == "strong" else batch * layout.world_size // smallest
            modes_of.setdefault((layout.name, size), []).append(mode)
    named = {layout.name: layout for layout in ordered}
    return [ScalingCase(named[name], size, tuple(found)) for (name, size), found in modes_of.items()]


def efficiency(speed: float, ranks: int, base_speed: float, base_ranks: int) -> float:
    """The share of the speed that `ranks` ranks would have if each were as fast as those of the
    baseline; speeds of all ranks together, in any unit.

    >>> round(efficiency(15100, 512, 39, 1), 3)  # Megatron-LM, TFLOP/s
    0.756
    """
    return speed / base_speed / (ranks / base_ranks)


class ScalingRow(BenchRow):
    """A layout in one mode of scaling; its seconds are those of a step.

    layout: `tp2 dp2`, `1 rank`; sizes: of the parallel axes; cpu_seconds: the median processor time
    of rank 0 in a step; predicted_..: the plan's, None where it states no time; flops_per_second:
    model FLOP/s of a device; mfu, hfu: None where the plan does not describe the device that ran;
    speed_up, efficiency: against the row that the findings name as baseline; perfect_efficiency:
    where every core (or GPU) did its share of the work and nothing else took time; is_rehearsal:
    ranks share cores; communication_share: of a step, that a rank on the average waits in
    collectives, None where runs do not report it, and predicted as messages and bubbles.
    """

    mode: Mode
    layout: str
    world_size: int
    sizes: dict[str, int]
    global_batch_size: int
    cpu_seconds: float
    predicted_seconds: float | None
    low_seconds: float | None
    high_seconds: float | None
    tokens_per_second: float
    flops_per_second: float
    mfu: float | None
    hfu: float | None
    speed_up: float
    efficiency: float
    predicted_efficiency: float | None
    perfect_efficiency: float
    is_rehearsal: bool
    communication_share: float | None
    predicted_communication_share: float | None


class ScalingFindings(TypedDict):
    """steps_timed: of each case in a round; units: cores or GPUs that the ranks shared, and unit,
    which of the two; baselines: by mode, the name of the row that the others are compared with."""

    steps_timed: int
    units: int
    unit: Literal["core", "GPU"]
    baselines: dict[str, str]


class ScalingReport(BenchEnvelope):
    """Output of `mpctl bench scaling --json`, also written to OUT/report.json."""

    results: list[ScalingRow]
    findings: ScalingFindings


@dataclass(frozen=True)
class Timing:
    """Measurements of one case: one or more runs."""

    case: ScalingCase
    runs: Sequence[CaseRun]

    @property
    def planned(self) -> PlannedCase:
        return self.runs[0].case

    @property
    def units(self) -> int:
        """Cores or GPUs that the ranks shared."""
        return self.runs[0].units

    @property
    def world(self) -> int:
        return self.case.layout.world_size

    @property
    def seconds(self) -> float:
        """The median over the rounds of their median step."""
        return median(run.step_seconds for run in self.runs)

    @property
    def speed(self) -> float:
        """Tokens a second of all ranks together."""
        return self.planned.tokens_per_step / self.seconds

    @property
    def planned_time(self) -> StepTime | None:
        """The plan's step, None where it states no time."""
        estimate = self.planned.plan.estimate
        time = estimate.time if estimate else None
        return time if isinstance(time, StepTime) else None

    @property
    def planned_speed(self) -> float | None:
        time = self.planned_time
        return self.planned.tokens_per_step / time.total if time else None


def scaling_rows(timings: Sequence[Timing], mode: Mode) -> list[ScalingRow]:
    """One row for each layout of this mode that was timed, in their order."""
    of_mode = [timing for timing in timings if mode in timing.case.modes]
    if not of_mode:
        return []
    base = find_baseline(of_mode)
    return [_row(timing, base, mode) for timing in of_mode]


def find_baseline(timings: Sequence[Timing]) -> Timing:
    """The fastest layout of the smallest world, of at least one."""
    smallest = min(timing.world for timing in timings)
    return max((t for t in timings if t.world == smallest), key=lambda timing: timing.speed)


def row_name(timing: Timing, mode: Mode) -> str:
    return f"{mode} {timing.case.layout.name}"


def _row(timing: Timing, base: Timing, mode: Mode) -> ScalingRow:
    case, time, layout = timing.case, timing.planned_time, timing.planned.plan.layout
    assert layout is not None, "a case trains a model"
    peak = None if time is None else device_peak(timing.planned.job)  # of the device that a rank ran on
    used = Utilization(*model_and_hardware_flops(layout), peak)
    planned, planned_base = timing.planned_speed, base.planned_speed

    def against(speed: float, base_speed: float) -> float:
        return efficiency(speed, timing.world, base_speed, base.world)

    return {
        "name": row_name(timing, mode),
        **spread([run.step_seconds for run in timing.runs]),
        "mode": mode,
        "layout": case.layout.name,
        "world_size": timing.world,
        "sizes": dict(case.layout.sizes),
        "global_batch_size": case.global_batch_size,
        "cpu_seconds": median(r["cpu_seconds"] for run in timing.runs for r in run.steady),
        "predicted_seconds": time.total if time else None,
        "low_seconds": time.low if time else None,
        "high_seconds": time.high if time else None,
        "tokens_per_second": timing.speed,
        "flops_per_second": used.model_flops / timing.seconds,
        "mfu": used.mfu(timing.seconds),
        "hfu": used.hfu(timing.seconds),
        "speed_up": timing.speed / base.speed,
        "efficiency": against(timing.speed, base.speed),
        "predicted_efficiency": against(planned, planned_base) if planned and planned_base else None,
        "perfect_efficiency": against(min(timing.world, timing.units), min(base.world, base.units)),
        "is_rehearsal": timing.world > timing.units,
        "communication_share": communication_share(timing.runs),
        "predicted_communication_share": planned_share(time) if time else None,
    }


@dataclass
class ScalingBench(CaseBench):
    """Layouts that are trained and compared with the fastest of the smallest world.

    job: its name; shapes: the layout of each of the cases.
    """

    job: str | None
    shapes: Sequence[ScalingCase]
    modes: Sequence[Mode]

    def report(self) -> ScalingReport:
        runs = group_runs(self.runs)
        timings = [Timing(case, runs[case.name]) for case in self.shapes if case.name in runs]
        baselines: dict[str, str] = {
            mode: row_name(find_baseline(of_mode), mode)
            for mode in self.modes
            if (of_mode := [timing for timing in timings if mode in timing.case.modes])
        }
        return {
            **envelope(
                "scaling",
                self.job,
                self.environment,
                self.command,
                is_complete=self.is_complete,
                hosts=hosts_of(self.runs),
            ),
            "results": [row for mode in self.modes for row in scaling_rows(timings, mode)],
            "findings": {
                "steps_timed": len(timings[0].runs[0].steady),
                "units": max(timing.units for timing in timings),
                "unit": "GPU" if timings[0].planned.job.launch.device == "cuda" else "core",
                "baselines": baselines,
            },
        }
