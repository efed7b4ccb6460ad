"""The JSON files of a run, read back, or a sentence on what is wrong with them.

The models here are what `mpctl runs`, `show` and `status` need of summary.json and launcher.json.
rundir/summary.py and rundir/launcher.py define all of them; what older versions did not write has a
default.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, Field, ValidationError, field_validator

from mpctl.errors import InputError
from mpctl.rundir.summary import (
    STATES,
    OtherFailureSummary,
    PlannedMeasured,
    RunStatus,
    SaveSummary,
    TrafficComparison,
)
from mpctl.spec.job import JobSpec
from mpctl.spec.load import parse
from mpctl.spec.names import with_all_new_names

Model = TypeVar("Model", bound=BaseModel)


class SavedRankComparison(BaseModel):
    """What is read of a RankComparison: plan and run of one rank."""

    rank: int
    agrees: bool
    parameters: PlannedMeasured
    step_traffic: TrafficComparison
    peak_memory_bytes: int
    memory: dict[str, PlannedMeasured] = Field(default_factory=dict)
    reserved_memory_bytes: int | None = None
    device: str | None = None

    @field_validator("memory")
    @classmethod
    def _complete(cls, memory: dict[str, PlannedMeasured]) -> dict[str, PlannedMeasured]:
        """A step of which some kind was not measured is not compared."""
        is_complete = {*STATES, "peak"} <= memory.keys() and memory["peak"]["measured"] > 0
        return memory if is_complete else {}


class SavedFailure(BaseModel):
    """What is read of a FailureSummary, or of the FailureRecord of a rank: which rank failed first,
    and why."""

    rank: int | None
    host: str = ""
    coords: dict[str, int] = Field(default_factory=dict)
    error: str
    doing: str = ""
    log: str = ""
    last_lines: list[str] = Field(default_factory=list)
    others: list[OtherFailureSummary] = Field(default_factory=list)


class SavedSummary(BaseModel):
    """What is read of a RunSummary (schema mpctl.run/1)."""

    status: RunStatus
    attempts: int = 1
    failure: SavedFailure | None = None
    saves: SaveSummary | None = None
    plan_beside_run: list[SavedRankComparison] = Field(default_factory=list)


class SavedLauncher(BaseModel):
    """What is read of a LauncherRecord (schema mpctl.launcher/1): which process launched the run
    last; rundir/launcher.py says what each field is."""

    backend: str = "local"
    host: str
    pid: int
    process_started: float | None = None
    started: float | None = None
    job_id: str | None = None
    hosts: list[str] | None = None


def read_launcher(path: Path) -> SavedLauncher | str | None:
    """Who launched the run; None for a run of a version that did not say; a sentence when it cannot
    be read."""
    return _read(path, SavedLauncher)


def read_job(path: Path) -> JobSpec | str:
    """The job, or a sentence on why it cannot be read."""
    raw = read_json(path)
    if isinstance(raw, str):
        return raw
    try:
        return parse(with_all_new_names(raw))
    except InputError as error:
        return f"{path.name}: {error.issues[0]}"


def read_summary(path: Path) -> SavedSummary | str | None:
    """The summary; None while there is none; a sentence when it cannot be read."""
    return _read(path, SavedSummary)


def _read(path: Path, model: type[Model]) -> Model | str | None:
    if not path.exists():
        return None
    raw = read_json(path)
    if isinstance(raw, str):
        return raw
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        return f"{path.name}: {where}: {first['msg']}"


def read_json(path: Path) -> dict[str, Any] | str:
    """The JSON object that a file holds, or a sentence on why there is none."""
    try:
        document = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return f"{path.name}: {error.strerror or error}"
    except (ValueError, RecursionError):
        return f"{path.name} is not valid JSON"
    return document if isinstance(document, dict) else f"{path.name} does not hold an object"
