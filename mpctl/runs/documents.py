"""The JSON documents of a run directory: job.json and summary.json, or what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError, field_validator

from mpctl.errors import InputError
from mpctl.launch.summary import STATES
from mpctl.spec.job import JobSpec
from mpctl.spec.load import parse


class PlannedMeasured(BaseModel):
    """A number of the plan and the one that was measured."""

    planned: int
    measured: int


class CollectiveTotals(BaseModel):
    """Collectives of one kind: how many, and their bytes together."""

    count: int
    bytes: int


class StepTraffic(BaseModel):
    """Collectives of a step by axis and kind, planned and measured."""

    planned: dict[str, CollectiveTotals]
    measured: dict[str, CollectiveTotals]


class RankComparison(BaseModel):
    """One rank of the summary's plan_beside_run."""

    rank: int
    agrees: bool
    parameters: PlannedMeasured
    step_traffic: StepTraffic
    peak_memory_bytes: int
    memory: dict[str, PlannedMeasured] = Field(default_factory=dict)

    @field_validator("memory")
    @classmethod
    def _whole(cls, memory: dict[str, PlannedMeasured]) -> dict[str, PlannedMeasured]:
        """A step that was not measured whole is not compared."""
        is_whole = {*STATES, "peak"} <= memory.keys() and memory["peak"].measured > 0
        return memory if is_whole else {}


class FailureSummary(BaseModel):
    """The rank that failed first, and why."""

    rank: int | None
    coords: dict[str, int] = Field(default_factory=dict)
    error: str
    doing: str = ""
    log: str = ""
    last_lines: list[str] = Field(default_factory=list)


class RunSummary(BaseModel):
    """What is read of summary.json (schema mpctl.run/1)."""

    status: Literal["finished", "stopped", "failed"]
    attempts: int = 1
    failure: FailureSummary | None = None
    plan_beside_run: list[RankComparison] = Field(default_factory=list)


def read_job(path: Path) -> JobSpec | str:
    """The job, or in words why it cannot be read."""
    raw = read_json(path)
    if isinstance(raw, str):
        return raw
    try:
        return parse(raw)
    except InputError as error:
        return f"{path.name}: {error.issues[0]}"


def read_summary(path: Path) -> RunSummary | str | None:
    """The summary; None while there is none; words when it cannot be read."""
    if not path.exists():
        return None
    raw = read_json(path)
    if isinstance(raw, str):
        return raw
    try:
        return RunSummary.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        return f"{path.name}: {where}: {first['msg']}"


def read_json(path: Path) -> dict[str, Any] | str:
    """The object that a file holds, or in words why there is none."""
    try:
        document = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return f"{path.name}: {error.strerror or error}"
    except (ValueError, RecursionError):
        return f"{path.name} is not valid JSON"
    return document if isinstance(document, dict) else f"{path.name} does not hold an object"
