"""The errors of the last release by source of runs, and which of them are worse today.

A source is a table of tests/recorded: `group` of a row, rows with experts apart. Its error is the mean of
|estimated / measured - 1| over its steps in percent, `inside` the percentage of steps in the plan's band.
A source is worse if its error has grown by more than POINT. recorded/accuracy_released.json holds the
figures of the release; `python -m benchmarks.accuracy_gate --release` writes it.

By hand, errors of 4.0 before and 5.1 today: worse; 4.9: not.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import get_context
from statistics import fmean

from mpctl.measure.calibrate.runs import Run
from tests.finetuning import judged_rows
from tests.outside import outside_runs
from tests.published import RECORDED, expert_runs, mlperf6_runs, published_runs

RELEASED = RECORDED / "accuracy_released.json"
POINT = 1.0  # percentage points by which a source may get worse


@dataclass(frozen=True)
class Source:
    """How far the plans of a source's rows are off, in percent. rows: those with a measured step; bias: mean error."""

    rows: int
    error: float
    bias: float
    inside: float

    @classmethod
    def of(cls, steps: Iterable[tuple[float, bool]]) -> Source:
        """Summarise (relative error, whether the band holds the step) of each row."""
        errors, inside = zip(*steps, strict=True)
        size, bias = fmean(map(abs, errors)), fmean(errors)
        return cls(len(errors), *(round(100 * value, 2) for value in (size, bias, fmean(inside))))


@dataclass(frozen=True)
class Planned:
    """A run beside its plan. planned, measured: seconds of a step; band: the factor of the plan's band."""

    id: str
    source: str
    planned: float
    measured: float
    band: float
    inside: bool

    @classmethod
    def of(cls, run: Run) -> Planned:
        """Plan a run."""
        time, seconds = run.estimate(), run.measured["step_seconds"]
        is_inside = time.low <= seconds <= time.high
        return cls(run.id, source_of(run), time.total, seconds, time.band.factor, is_inside)

    @property
    def error(self) -> float:
        """(planned - measured) / measured."""
        return self.planned / self.measured - 1


def source_of(run: Run) -> str:
    """The source of a run."""
    has_experts = run.job.model is not None and bool(run.job.model.experts)
    return run.group if not has_experts or run.group.endswith("_moe") else f"{run.group}, experts"


def quick_runs() -> tuple[Run, ...]:
    """The runs that are cheap to plan: those with experts, and MLPerf Training 6.0."""
    return (*mlperf6_runs(), *expert_runs(software=True))


def every_plan(processes: int | None = None) -> list[Planned]:
    """Plans of all runs, MLPerf 6.0 and experts first: some 20 s of one core. processes: one a core when absent."""
    runs = [run for run in (*quick_runs(), *published_runs()) if "step_seconds" in run.measured]
    with get_context("fork").Pool(processes) as pool:
        return pool.map(Planned.of, runs, 16)


def sources_of(plans: Iterable[Planned]) -> dict[str, Source]:
    """How far plans are off, by source."""
    steps: dict[str, list[tuple[float, bool]]] = defaultdict(list)
    for own in plans:
        steps[own.source].append((own.error, own.inside))
    return {name: Source.of(own) for name, own in steps.items()}


def other_sources() -> dict[str, Source]:
    """Fine-tuning by source, and systems that no preset knows."""
    judged: dict[str, list[tuple[float, bool]]] = defaultdict(list)
    for row in judged_rows():
        if row.step:
            judged[f"fine-tuning: {row.group}"].append((row.step_error, row.inside))
    unknown = ((run.error, run.in_band) for run in outside_runs())
    tuned = {name: Source.of(steps) for name, steps in judged.items()}
    return {**tuned, "systems that no preset knows": Source.of(unknown)}


def read_released() -> dict[str, Source]:
    """The sources as they were planned at the last release."""
    table = json.loads(RELEASED.read_text("utf-8"))["sources"]
    return {name: Source(**own) for name, own in table.items()}


def worse(before: Mapping[str, Source], now: Mapping[str, Source]) -> Iterator[str]:
    """Yield a line for each source of `now` whose error grew by more than POINT or whose rows are others."""
    for name, own in now.items():
        then = before.get(name)
        if then is None or then.rows != own.rows:
            yield f"{name}: {own.rows} rows, {then.rows if then else 0} at the release"
        elif own.error > then.error + POINT:
            yield f"{name}: {own.error:.1f} % off, {then.error:.1f} % at the release"
