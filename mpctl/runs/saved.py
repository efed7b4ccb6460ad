"""One run directory as it lies on disk: what it is, how far it came, how it ended.

Nothing here raises for what a directory holds: whatever is damaged becomes a line of `problems`.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from mpctl.errors import InputError
from mpctl.planning.document import axis_sizes
from mpctl.rundir.checkpoints import list_checkpoints, read_manifest
from mpctl.rundir.directory import RunDir
from mpctl.rundir.scalars import Record, is_number
from mpctl.runs.documents import RunSummary, read_job, read_summary
from mpctl.runs.records import KeyRecords, read_ends
from mpctl.spec.job import JobSpec

Status = Literal["running", "finished", "stopped", "failed", "interrupted", "unreadable"]
MARKS = (".mpctl-run", "job.json", "metrics.jsonl")


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint: its step, the bytes of its files, and what is wrong with it, if anything."""

    step: int
    bytes: int
    path: Path
    problem: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return {"step": self.step, "bytes": self.bytes, "path": str(self.path),
                "problem": self.problem}  # fmt: skip


@dataclass(frozen=True)
class SavedRun:
    """name: what a list calls it; job, summary, ends: what could be read of it; records: all that
    are whole, oldest first, once `open_runs` has read them."""

    path: Path
    name: str
    job: JobSpec | None
    summary: RunSummary | None
    ends: KeyRecords
    checkpoints: tuple[SavedCheckpoint, ...]
    status: Status
    problems: tuple[str, ...] = ()
    records: tuple[Record, ...] = ()

    @property
    def step(self) -> int:
        """Steps trained."""
        return self.ends.last["step"] if self.ends.last else 0

    @property
    def steps(self) -> int | None:
        """Steps that the job asks for."""
        return self.job.training.steps if self.job else None

    @property
    def model(self) -> str | None:
        """The model's name, or its family and size where it has none."""
        model = self.job.model if self.job else None
        if model is None:
            return None
        return model.name or f"{model.family} {model.all_layers} x {model.hidden}"

    @property
    def layout(self) -> str | None:
        """`tp 2 x dp 2`."""
        return axis_sizes(self.job.sizes.items()) if self.job else None

    @property
    def checkpoint_bytes(self) -> int:
        return sum(saved.bytes for saved in self.checkpoints)

    @property
    def started(self) -> float | None:
        """When the first step on record began, in seconds since 1970; without such a record, when
        the job was written."""
        first = self.ends.first
        if first and is_number(first.get("time")):
            return float(first["time"] - first["step_seconds"])
        return _written(self.path / "job.json")

    @property
    def ended(self) -> float | None:
        """When the last step on record was done; None while the run goes on."""
        if self.status == "running":
            return None
        last = self.ends.last
        if last and is_number(last.get("time")):
            return float(last["time"])
        return _written(self.path / "summary.json") or _written(self.path / "metrics.jsonl")


def looks_like_run(path: Path) -> bool:
    """Whether a launch may have written what is here."""
    try:
        return path.is_dir() and any((path / name).is_file() for name in MARKS)
    except OSError:
        return False


def read_run(path: Path, name: str | None = None) -> SavedRun:
    """What the directory holds; never raises for its content."""
    job, summary = read_job(path / "job.json"), read_summary(path / "summary.json")
    problems = [text for text in (job, summary) if isinstance(text, str)]
    try:
        ends = read_ends(path / "metrics.jsonl")
    except OSError as error:
        ends = KeyRecords()
        problems.append(f"metrics.jsonl: {error.strerror or error}")
    found = _checkpoints(path / "checkpoints")
    whole = job if isinstance(job, JobSpec) else None
    told = summary if isinstance(summary, RunSummary) else None
    status = _status(path, whole, told, ends)
    return SavedRun(path, name or path.name, whole, told, ends, found, status, tuple(problems))


def _status(
    path: Path, job: JobSpec | None, summary: RunSummary | None, ends: KeyRecords
) -> Status:
    if is_running(path):
        return "running"
    if job is None:
        return "unreadable"
    if summary is not None:
        return summary.status
    if RunDir(path).has_failures:
        return "failed"
    done = ends.last is not None and ends.last["step"] >= job.training.steps
    return "finished" if done else "interrupted"


def is_running(path: Path) -> bool:
    """Whether a launch holds the directory's lock, or its torchrun is alive (a file system
    without locks, or a bench, which takes none)."""
    with suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(handle)
    try:
        process = psutil.Process(int(RunDir(path).torchrun_pid.read_text("utf-8")))
        return str(path.resolve()) in process.cmdline()
    except (OSError, ValueError, OverflowError, psutil.Error):
        return False


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
