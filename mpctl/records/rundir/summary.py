"""RUN/summary.json, schema mpctl.run/2: how a run ended and how far it got, plan and run compared.

The launcher writes it when the last rank has ended, and `mpctl launch --json` prints it. It is read
back by run/history/saved.py, which requires little of it, since older versions wrote less.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Literal, NotRequired, TypeAlias, cast

from pydantic import Field, TypeAdapter
from pydantic.dataclasses import dataclass
from typing_extensions import TypedDict  # pydantic needs it to validate them before Python 3.12

from mpctl.core.durable import write_whole
from mpctl.core.units import plural, ranks_text
from mpctl.records.checkpoint.folder import SaveTimes
from mpctl.records.rundir.goodput import recorded_goodput
from mpctl.records.rundir.launches import Away
from mpctl.records.rundir.metrics import is_number
from mpctl.records.rundir.rank_files import StepRecord, Traffic
from mpctl.spec.figure_sources import FigureSource

SCHEMA: Literal["mpctl.run/2"] = "mpctl.run/2"
RunStatus = Literal["finished", "stopped", "failed"]
WARM_UP_STEPS = 2
STATES = {"parameters": "parameter_bytes", "gradients": "gradient_bytes", "optimizer": "optimizer_bytes"}
"""Kinds of memory that must be equal in plan and run: their names in a report of a rank, and the
attributes of the plan's StageMemory."""


class PlannedMeasured(TypedDict):
    """A number of the plan and the same number as the run measured it."""

    planned: int
    measured: int


class TrafficComparison(TypedDict):
    """Collectives by axis and kind, as planned and as counted."""

    planned: Traffic
    measured: Traffic


class RankComparison(TypedDict):
    """Plan and run of one rank that finished.

    agrees: parameters, collectives and the bytes of parameters, gradients and optimizer are equal;
    parameters: number of elements; memory: bytes of one steady step by kind, without the kinds that
    were not measured; reserved_memory_bytes: the most that the allocator took from the GPU, and
    device: its name, None on a CPU, both absent in summaries of older versions.
    """

    rank: int
    agrees: bool
    parameters: PlannedMeasured
    step_traffic: TrafficComparison
    peak_memory_bytes: int
    memory: dict[str, PlannedMeasured]
    reserved_memory_bytes: NotRequired[int | None]
    device: NotRequired[str | None]


class RankSummary(RankComparison):
    """The same with the collectives of the last validation, None when there was none."""

    validation_traffic: TrafficComparison | None


@dataclass(frozen=True)
class OtherFailure:
    """Ranks that failed alike, other than the first. error: their error, with `…` where they
    differ; is_echo: it only reports a lost peer."""

    ranks: tuple[int, ...]
    error: str
    is_echo: bool

    def __str__(self) -> str:
        who = ranks_text(self.ranks, most=4)
        if not self.is_echo:
            return f"{who}: {self.error}"
        whose = "its peer" if len(self.ranks) == 1 else "their peers"
        return f"{plural(len(self.ranks), 'rank')} lost {whose} ({who}): {self.error}"


@dataclass(frozen=True)
class Failure:
    """The rank that failed first: its coordinates, its error, what it was doing (step, stage and
    micro batch), the path and the end of its log. rank: None when no single rank is at fault; host:
    its host, empty where there is one or it is not known; others: the failures of other ranks;
    blamed: the host on which the cause lies, empty where it may lie elsewhere.

    Not in the document: would_repeat: the same would happen again from the same state, as far as is
    known: an exception or a crash, not a kill, a stop, a hang or a lost host. rollback: the step
    that is to be left out by starting again from the newest checkpoint, None for other failures.
    """

    rank: int | None
    error: str
    coords: dict[str, int] = Field(default_factory=dict)
    doing: str = ""
    log: str = ""
    last_lines: tuple[str, ...] = ()
    host: str = ""
    others: tuple[OtherFailure, ...] = ()
    blamed: str = ""
    would_repeat: bool = Field(default=False, exclude=True)
    rollback: int | None = Field(default=None, exclude=True)

    def as_dict(self) -> dict[str, Any]:
        document: dict[str, Any] = FAILURE.dump_python(self, mode="json")
        return document

    def __str__(self) -> str:
        if self.rank is None:
            return f"{self.error} ({self.log})"
        coords = ", ".join(f"{axis} {index}" for axis, index in self.coords.items())
        where = f" on host {self.host}" if self.host else ""
        return f"rank {self.rank}{where} ({coords}) failed at {self.doing}: {self.error}"


FAILURE: TypeAdapter[Failure] = TypeAdapter(Failure)


class ExpertSummary(TypedDict):
    """Medians over steps of the figures of a model with experts: aux_loss, expert_load, rank_load
    and near_ties as in a StepRecord."""

    aux_loss: float
    expert_load: float
    rank_load: float
    near_ties: float


class TrainingProgress(TypedDict):
    """Progress of a run by its records.

    Losses are None, and tables of losses empty, where there is none; validation_losses are those of
    further corpora by name. step_seconds and tokens_per_second are medians over the steps with the
    forecast of the last one, as a resumption in another layout has another, after WARM_UP_STEPS;
    so are communication_seconds, of rank 0 by axis, and mfu and hfu, shares of the device's peak
    (plan/estimate/flops.py), None where no record has them; experts: None without layers with experts;
    goodput: the share of the time with a launch since the first step that went into steps that count, absent in
    summaries of older versions.
    """

    steps: int
    final_loss: float | None
    validation_loss: float | None
    initial_validation_loss: float | None
    validation_losses: dict[str, float]
    initial_validation_losses: dict[str, float]
    tokens: int
    step_seconds: float | None
    tokens_per_second: float | None
    communication_seconds: dict[str, float] | None
    mfu: float | None
    hfu: float | None
    experts: ExpertSummary | None
    goodput: NotRequired[float | None]


class SaveSummary(TypedDict):
    """The checkpoints that the last attempt saved: how many, and medians of how long one took and
    of how long training waited for it, seconds."""

    count: int
    seconds: float
    stall_seconds: float


class PlanAndRun(TrainingProgress):
    """Progress of a run, compared with the plan's figures, a row for each rank that finished.
    figures_from: the user's presets behind the plan's figures; saves: None where they were not recorded; slow:
    ranks and links that held it up (slow.py); figures_from and slow are absent in summaries of older versions."""

    predicted_step_seconds: float | None
    figures_from: NotRequired[list[FigureSource]]
    saves: SaveSummary | None
    plan_beside_run: Sequence[RankComparison]
    slow: NotRequired[list[dict[str, Any]]]


class RunSummary(PlanAndRun):
    """The document. sizes: of the axes; checkpoint: step of the newest one, 0 without any; signal:
    the number of the signal that stopped the run; command: the command line, as a shell takes it.
    program: what the ranks ran instead of mpctl's training, None where they trained; absent in
    summaries of older versions.
    """

    schema: Literal["mpctl.run/2"]
    status: RunStatus
    world_size: int
    sizes: dict[str, int]
    checkpoint: int
    warnings: list[str]
    attempts: int
    signal: int | None
    failure: dict[str, Any] | None
    command: str
    program: NotRequired[list[str] | None]


class FinishedSummary(TypedDict):
    """The summary of a run that has nothing left to train and has not written one."""

    schema: Literal["mpctl.run/2"]
    status: RunStatus
    steps: int
    checkpoint: int


class UnstartedSummary(FinishedSummary):
    """The summary of a run whose submitted job ended before a rank was started. attempts: 0;
    failure: why the launcher refused, None where the job was cancelled."""

    attempts: int
    failure: dict[str, Any] | None


AnySummary: TypeAlias = RunSummary | UnstartedSummary | FinishedSummary
"""What `mpctl launch --json` prints."""


def training_progress(records: Sequence[StepRecord], away: Sequence[Away] = ()) -> TrainingProgress:
    """Summarize the progress of a run. records: all of them, oldest first; away: times without a launch."""
    alike = _last_alike(records)
    steady = alike[WARM_UP_STEPS:] or alike
    validated = next((r for r in reversed(records) if "validation_loss" in r), None)
    first, last = (records[0], records[-1]) if records else (None, None)
    return {
        "steps": last["step"] if last else 0,
        "final_loss": last["loss"] if last else None,
        "validation_loss": validated.get("validation_loss") if validated else None,
        "initial_validation_loss": first.get("initial_validation_loss") if first else None,
        "validation_losses": validated.get("validation_losses", {}) if validated else {},
        "initial_validation_losses": first.get("initial_validation_losses", {}) if first else {},
        "tokens": last["tokens"] if last else 0,
        "step_seconds": median(r["step_seconds"] for r in steady) if steady else None,
        "tokens_per_second": median(r["tokens_per_second"] for r in steady) if steady else None,
        "communication_seconds": medians_by_axis(
            [r["communication_seconds"] for r in steady if "communication_seconds" in r]
        ),
        "mfu": recorded_median(steady, "mfu"),
        "hfu": recorded_median(steady, "hfu"),
        "experts": expert_summary(steady),
        "goodput": recorded_goodput(records, away),
    }


def expert_summary(records: Sequence[StepRecord]) -> ExpertSummary | None:
    """The medians of these records; None where none is of a model with experts."""
    names = ExpertSummary.__annotations__
    found = {name: recorded_median(records, name) for name in names}
    return None if None in found.values() else cast(ExpertSummary, found)


def recorded_median(records: Iterable[StepRecord], name: str) -> float | None:
    """The median of a number that some records have; None where none has it."""
    values = [value for record in records if is_number(value := record.get(name))]
    return median(values) if values else None


def medians_by_axis(steps: Sequence[Mapping[str, float]]) -> dict[str, float] | None:
    """The median over the steps of each axis's seconds, 0 in a step that did not use the axis; None
    without a step.

    >>> medians_by_axis([{"tp": 3.0}, {"tp": 1.0, "pp": 4.0}])
    {'pp': 2.0, 'tp': 2.0}
    """
    if not steps:
        return None
    axes = sorted({axis for seconds in steps for axis in seconds})
    return {axis: median(seconds.get(axis, 0.0) for seconds in steps) for axis in axes}


def _last_alike(records: Sequence[StepRecord]) -> Sequence[StepRecord]:
    """The last records that have the same predicted step time."""
    forecasts = [record.get("predicted_step_seconds") for record in records]
    others = (n for n, forecast in enumerate(forecasts, 1) if forecast != forecasts[-1])
    return records[max(others, default=0) :]


def save_summary(times: Sequence[SaveTimes]) -> SaveSummary | None:
    """Summarize the save times measured by rank 0; None without a save. The first save meets fresh
    memory on the host and counts only if it is the only one."""
    if not times:
        return None
    steady = times[1:] or times
    return {
        "count": len(times),
        "seconds": median(save["seconds"] for save in steady),
        "stall_seconds": median(save["stall_seconds"] for save in steady),
    }


def write_summary(path: Path, summary: RunSummary | UnstartedSummary) -> None:
    """Write summary.json atomically. Raises OSError."""
    write_whole(path, json.dumps(summary, indent=1) + "\n")
