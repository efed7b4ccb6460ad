"""One run directory as it is on disk: its job, how far it came, how it ended.

Nothing here raises for the content of a directory: damage becomes a sentence in `problems`.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypedDict

from pydantic import ValidationError

from mpctl.errors import InputError, Issue
from mpctl.planning.summary import sizes_text
from mpctl.rundir.checkpoints import list_checkpoints
from mpctl.rundir.directory import RunDir
from mpctl.rundir.metrics import KeyRecords, read_key_records
from mpctl.rundir.owner import require_own
from mpctl.rundir.rank_files import StepRecord
from mpctl.rundir.scalars import is_number
from mpctl.rundir.shards import read_manifest
from mpctl.runs.documents import SavedFailure, SavedSummary, read_job, read_json, read_summary
from mpctl.runs.liveness import is_running, is_submitted
from mpctl.spec.job import JobSpec

Status = Literal[
    "submitted", "running", "finished", "stopped", "failed", "interrupted", "unreadable"
]
MARKS = (".mpctl-run", "job.json", "metrics.jsonl")


class CheckpointRow(TypedDict):
    """A checkpoint in mpctl.show/1. problem: what is wrong with it, None when it can be read."""

    step: int
    bytes: int
    path: str
    problem: str | None


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint: its step, the size of its files, and what is wrong with it, if anything."""

    step: int
    bytes: int
    path: Path
    problem: str | None = None

    def as_dict(self) -> CheckpointRow:
        """The checkpoint as JSON."""
        return {
            "step": self.step,
            "bytes": self.bytes,
            "path": str(self.path),
            "problem": self.problem,
        }


@dataclass(frozen=True)
class SavedRun:
    """One run. name: what a list calls it; job, summary: None when they cannot be read; records:
    all records, oldest first, where `open_runs` has read them."""

    path: Path
    name: str
    job: JobSpec | None
    summary: SavedSummary | None
    key_records: KeyRecords
    checkpoints: tuple[SavedCheckpoint, ...]
    status: Status
    problems: tuple[str, ...] = ()
    records: tuple[StepRecord, ...] = ()

    @property
    def step(self) -> int:
        """Steps trained."""
        return self.key_records.last["step"] if self.key_records.last else 0

    @property
    def steps(self) -> int | None:
        """Steps that the job asks for; None where a bench measured instead."""
        if self.job is None or RunDir(self.path).bench.exists():
            return None
        return self.job.training.steps

    @property
    def model(self) -> str | None:
        """The model's name, or its family and size where it has none."""
        model = self.job.model if self.job else None
        if model is None:
            return None
        return model.name or f"{model.family} {model.all_layers} x {model.hidden}"

    @property
    def layout(self) -> str | None:
        """The sizes of the axes, `tp 2 x dp 2`."""
        return sizes_text(self.job) if self.job else None

    @property
    def checkpoint_bytes(self) -> int:
        """The size of all checkpoints together."""
        return sum(saved.bytes for saved in self.checkpoints)

    @property
    def started(self) -> float | None:
        """When the first recorded step began, in seconds since 1970; without a record, when the
        job was written."""
        first = self.key_records.first
        if first and is_number(first.get("time")):
            return float(first["time"] - first["step_seconds"])
        return _written(self.path / "job.json")

    @property
    def ended(self) -> float | None:
        """When the last recorded step was done, in seconds since 1970; None while the run goes
        on."""
        if self.status == "running":
            return None
        last = self.key_records.last
        if last and is_number(last.get("time")):
            return float(last["time"])
        return _written(self.path / "summary.json") or _written(self.path / "metrics.jsonl")

    @property
    def failure(self) -> SavedFailure | None:
        """The failure in the summary; without a summary the first that a rank recorded, real errors
        before those that a lost peer caused."""
        if self.summary is not None:
            return self.summary.failure
        files = sorted((self.path / "failures").glob("rank-*.json"))
        records = [record for file in files if isinstance(record := read_json(file), dict)]
        for record in sorted(records, key=lambda record: bool(record.get("is_echo"))):
            with suppress(ValidationError):
                return SavedFailure.model_validate(record)
        return None


def looks_like_run(path: Path) -> bool:
    """Whether this is a directory that a launch may have written."""
    try:
        return path.is_dir() and any((path / name).is_file() for name in MARKS)
    except OSError:
        return False


def find_run(name: Path) -> Path | Issue:
    """The directory of a run by its path or its name in runs/; an issue when there is none."""
    path = next((path for path in (name, Path("runs") / name) if looks_like_run(path)), None)
    message = f"{name} does not contain a run of mpctl"
    return path or Issue("no-run", "RUN", message, "`mpctl runs` lists the runs in runs/")


def require_run(name: Path) -> Path:
    """The directory of a run by its path or its name in runs/. Raises InputError without one."""
    path = find_run(name)
    if isinstance(path, Issue):
        raise InputError([path])
    return path


def require_own_run(name: Path, *, allow_other_owner: bool) -> Path:
    """The same, for commands that act on what the run names. Raises InputError also where it is
    another user's."""
    path = require_run(name)
    if not allow_other_owner:
        require_own(path)
    return path


def short_name(name: Path) -> str:
    """`runs/demo/` is called demo, as in the list of runs."""
    parts = name.parts[1:] if name.parts[:1] == ("runs",) and len(name.parts) > 1 else name.parts
    return "/".join(parts) if not name.is_absolute() and parts else name.resolve().name


def read_run(path: Path, name: str | None = None) -> SavedRun:
    """The run in a directory; never raises for its content."""
    read = read_job(path / "job.json"), read_summary(path / "summary.json")
    problems = [text for text in read if isinstance(text, str)]
    try:
        key_records = read_key_records(path / "metrics.jsonl")
    except OSError as error:
        key_records = KeyRecords()
        problems.append(f"metrics.jsonl: {error.strerror or error}")
    job = None if isinstance(read[0], str) else read[0]
    summary = None if isinstance(read[1], str) else read[1]
    return SavedRun(
        path=path,
        name=name or path.name,
        job=job,
        summary=summary,
        key_records=key_records,
        checkpoints=_checkpoints(path / "checkpoints"),
        status=_status(path, job, summary, key_records),
        problems=tuple(problems),
    )


def _status(
    path: Path, job: JobSpec | None, summary: SavedSummary | None, key_records: KeyRecords
) -> Status:
    if is_running(path):
        return "running"
    if job is None:
        return "unreadable"
    if is_submitted(path):
        return "submitted"
    if summary is not None:
        return summary.status
    if RunDir(path).has_failures:
        return "failed"
    done = key_records.last is not None and key_records.last["step"] >= job.training.steps
    return "finished" if done else "interrupted"


def _checkpoints(root: Path) -> tuple[SavedCheckpoint, ...]:
    try:
        return tuple(_saved(step, path) for step, path in list_checkpoints(root))
    except OSError:
        return ()


def _saved(step: int, path: Path) -> SavedCheckpoint:
    size, problem = 0, None
    with suppress(OSError):
        size = sum(entry.stat(follow_symlinks=False).st_size for entry in os.scandir(path))
    try:
        read_manifest(path)
    except InputError as error:
        problem = error.issues[0].message
    except (OSError, RecursionError) as error:
        problem = str(error)
    return SavedCheckpoint(step, size, path, problem)


def _written(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None
