"""One run directory as it is on disk: its documents, its progress, whether it is running.

Nothing here raises for the content of a directory: damage becomes a sentence in `problems`. Of
summary.json and launcher.json little is required, since older versions wrote less.

A run is running while the process that launched it exists. On the launcher's host this is checked
by process id and start time. The lock of the directory shows it too (mpctl/core/locks.py), unless the
file system has no locks. On another host, where neither may be
available, a run counts as running while it gives signs of life: a step or a report of the launcher
within SIGN_SECONDS by the clocks of both hosts.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationError
from typing_extensions import TypedDict  # pydantic needs it to validate them before Python 3.12

from mpctl.core.errors import InputError, Issue
from mpctl.core.locks import is_held
from mpctl.plan.planning.summary import sizes_text
from mpctl.records.checkpoint.folder import list_checkpoints
from mpctl.records.checkpoint.manifest import read_manifest
from mpctl.records.rundir.directory import RunDir
from mpctl.records.rundir.group_names import with_group_names
from mpctl.records.rundir.launcher import has_ended, launcher_is_alive, read_launcher, written
from mpctl.records.rundir.marker import require_own
from mpctl.records.rundir.metrics import KeyRecords, is_number, read_key_records
from mpctl.records.rundir.rank_files import StepRecord
from mpctl.records.rundir.summary import FAILURE, STATES, Failure, RankComparison, RunStatus, SaveSummary
from mpctl.run.launch.status_file import read_status
from mpctl.spec.figure_sources import FigureSource
from mpctl.spec.job import JobSpec
from mpctl.spec.load import parse
from mpctl.spec.names import with_all_new_names

SIGN_SECONDS = 90.0
"""A network file system may show what another host writes a minute later."""
Status = Literal["submitted", "running", "finished", "stopped", "failed", "interrupted", "unreadable"]
MARKS = (".mpctl-run", "job.json", "metrics.jsonl")


def _with_later_keys(row: object) -> object:
    """Plan and run of a rank with the keys that older versions did not write."""
    later: dict[str, object] = {"memory": {}, "reserved_memory_bytes": None, "device": None}
    return {**later, **row} if isinstance(row, dict) else row


def _as_today(row: RankComparison) -> RankComparison:
    """The same with today's names of groups; without a step for which some kind of memory was not
    measured."""
    memory, traffic = row["memory"], row["step_traffic"]
    is_complete = {*STATES, "peak"} <= memory.keys() and memory["peak"]["measured"] > 0
    planned, measured = with_group_names(traffic["planned"]), with_group_names(traffic["measured"])
    row["memory"] = memory if is_complete else {}
    row["step_traffic"] = {"planned": planned, "measured": measured}
    return row


SavedComparison = Annotated[RankComparison, BeforeValidator(_with_later_keys), AfterValidator(_as_today)]


class SavedSummary(BaseModel):
    """The keys read from a RunSummary (schemas mpctl.run/1 and /2); older versions wrote fewer."""

    status: RunStatus
    attempts: int = 1
    signal: int | None = None
    failure: Failure | None = None
    saves: SaveSummary | None = None
    plan_beside_run: list[SavedComparison] = Field(default_factory=list)
    figures_from: list[FigureSource] = Field(default_factory=list)


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
    if not path.exists():
        return None
    raw = read_json(path)
    if isinstance(raw, str):
        return raw
    try:
        return SavedSummary.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        return f"{path.name}: {where}: {first['msg']}"


def read_json(path: Path) -> dict[str, Any] | str:
    """The JSON object in a file, or a sentence on why there is none."""
    try:
        document = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return f"{path.name}: {error.strerror or error}"
    except (ValueError, RecursionError):
        return f"{path.name} is not valid JSON"
    return document if isinstance(document, dict) else f"{path.name} does not hold an object"


def is_running(path: Path) -> bool:
    if has_ended(path):
        return False
    launcher = read_launcher(path)
    if (launcher is not None and launcher_is_alive(launcher)) or is_held(path):
        return True
    is_elsewhere = launcher is not None and launcher.host != platform.node()
    return is_elsewhere and time.time() - last_sign(path) < SIGN_SECONDS


def is_submitted(path: Path) -> bool:
    """Whether the run was submitted to a scheduler and has not started since; the submitting
    process has ended."""
    launcher = read_launcher(path)
    if launcher is None or launcher.job_id is None:
        return False
    traces = (path / "summary.json", RunDir(path).torchrun_log)
    return max(map(written, traces)) < written(path / "launcher.json")


def last_sign(path: Path) -> float:
    """Time of the run's last sign of life, in seconds since 1970; 0 if there was none."""
    files = ("metrics.jsonl", "launcher.json", "nodes/status.json")
    return max(written(path / name) for name in files)


class CheckpointRow(TypedDict):
    """A checkpoint and the size of its files. problem: what is wrong with it, None when it can be
    read."""

    step: int
    bytes: int
    path: str
    problem: str | None


@dataclass(frozen=True)
class SavedRun:
    """One run. name: its name in lists; job, summary: None when they cannot be read; records: all
    records, oldest first, where `open_runs` has read them."""

    path: Path
    name: str
    job: JobSpec | None
    summary: SavedSummary | None
    key_records: KeyRecords
    checkpoints: tuple[CheckpointRow, ...]
    status: Status
    problems: tuple[str, ...] = ()
    records: tuple[StepRecord, ...] = ()

    @property
    def step(self) -> int:
        return self.key_records.last["step"] if self.key_records.last else 0

    @property
    def steps(self) -> int | None:
        """Steps that the job asks for; None for a bench or a program, which set none."""
        if self.job is None or self.job.launch.program or RunDir(self.path).bench.exists():
            return None
        return self.job.training.steps

    @property
    def program(self) -> list[str] | None:
        """Program that the ranks run instead of mpctl's training, with the plan's flags; None if they train."""
        launch = self.job.launch if self.job else None
        return (launch.program_argv or launch.program or None) if launch else None

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
        return sum(saved["bytes"] for saved in self.checkpoints)

    @property
    def started(self) -> float | None:
        """Start of the first recorded step, in seconds since 1970; without a record, the time when the job was
        written."""
        first = self.key_records.first
        if first and is_number(first.get("time")):
            return float(first["time"] - first["step_seconds"])
        return written(self.path / "job.json") or None

    @property
    def ended(self) -> float | None:
        """End of the last recorded step, in seconds since 1970; None while the run is running."""
        if self.status == "running":
            return None
        last = self.key_records.last
        if last and is_number(last.get("time")):
            return float(last["time"])
        ended = (written(self.path / name) for name in ("summary.json", "metrics.jsonl"))
        return next(filter(None, ended), None)

    @property
    def failure(self) -> Failure | None:
        """The failure in the summary; without a summary the first that a rank recorded, real errors
        before those that a lost peer caused."""
        if self.summary is not None:
            return self.summary.failure
        records = recorded_failures(self.path)
        for record in sorted(records, key=lambda record: bool(record.get("is_echo"))):
            with suppress(ValidationError):
                return FAILURE.validate_python(record)
        return None


def recorded_failures(path: Path) -> list[Mapping[str, Any]]:
    """The failures that ranks recorded in the last attempt, as the launcher last reported them;
    older versions had them write RUN/failures."""
    report = read_status(RunDir(path).status)
    files = sorted((path / "failures").glob("rank-*.json"))
    records: list[Mapping[str, Any]] = [r for f in files if isinstance(r := read_json(f), dict)]
    return records if report is None else [*records, *report.state.failures]


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
    """The same, for commands that use paths which the run names. Raises InputError also for another
    user's run."""
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


def _status(path: Path, job: JobSpec | None, summary: SavedSummary | None, key_records: KeyRecords) -> Status:
    if is_running(path):
        return "running"
    if job is None:
        return "unreadable"
    if is_submitted(path):
        return "submitted"
    if summary is not None:
        return summary.status
    if recorded_failures(path):
        return "failed"
    if job.launch.program:
        return "interrupted"
    done = key_records.last is not None and key_records.last["step"] >= job.training.steps
    return "finished" if done else "interrupted"


def _checkpoints(root: Path) -> tuple[CheckpointRow, ...]:
    try:
        return tuple(_saved(step, path) for step, path in list_checkpoints(root))
    except OSError:
        return ()


def _saved(step: int, path: Path) -> CheckpointRow:
    size, problem = 0, None
    with suppress(OSError):
        size = sum(entry.stat(follow_symlinks=False).st_size for entry in os.scandir(path))
    try:
        read_manifest(path)
    except InputError as error:
        problem = error.issues[0].message
    except (OSError, RecursionError) as error:
        problem = str(error)
    return {"step": step, "bytes": size, "path": str(path), "problem": problem}
