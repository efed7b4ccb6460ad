"""The runs in a folder as rows of a table: schema mpctl.runs/1."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args

from typing_extensions import TypedDict  # pydantic needs it to validate them before Python 3.12

from mpctl.core.errors import InputError
from mpctl.records.rundir.directory import RunDir
from mpctl.records.rundir.metrics import is_number
from mpctl.run.history.saved import SavedRun, Status, looks_like_run, read_run

DEPTH = 2  # runs/NAME, and runs/bench-scaling/NAME
SortKey = Literal[
    "name",
    "status",
    "model",
    "step",
    "loss",
    "validation_loss",
    "tokens_per_second",
    "started",
    "ended",
    "checkpoint_bytes",
]
SORT_KEYS: tuple[SortKey, ...] = get_args(SortKey)
OnProgress = Callable[[int, int], None]


class RunRow(TypedDict):
    """One run. step: steps trained; steps: steps that its job asks for; loss, tokens_per_second: of
    the last step; started, ended: ISO 8601 in UTC; failure: why it failed; problems: sentences on
    what is damaged. None: not known."""

    name: str
    path: str
    status: Status
    model: str | None
    layout: str | None
    step: int
    steps: int | None
    loss: float | None
    validation_loss: float | None
    tokens_per_second: float | None
    started: str | None
    ended: str | None
    checkpoints: int
    checkpoint_bytes: int
    failure: str | None
    problems: list[str]


class RunsDocument(TypedDict):
    """Output of `mpctl runs --json`. others: folders that are not runs and contain none."""

    schema: Literal["mpctl.runs/1"]
    folder: str
    runs: list[RunRow]
    others: list[str]


def list_runs(
    folder: Path, *, sort: str = "started", reverse: bool = False, on_progress: OnProgress = lambda done, total: None
) -> RunsDocument:
    """Every run in a folder or one folder below, sorted; the folder itself when it is a run.

    Runs for which the sort key is not known come last. Raises InputError for a folder that cannot
    be listed and for an unknown key. on_progress: called with (runs read, all runs).
    """
    if sort not in SORT_KEYS:
        message = f"there is no column {sort!r}"
        raise InputError.of("bad-sort", "--sort", message, f"use {', '.join(SORT_KEYS)}")
    paths = [folder] if looks_like_run(folder) else list(_find_runs(folder, DEPTH))
    rows = []
    for number, path in enumerate(paths):
        on_progress(number, len(paths))
        name = path.name if path == folder else str(path.relative_to(folder))
        rows.append(_row(read_run(path, name)))
    with_runs = {Path(row["name"]).parts[0] for row in rows}
    found = [] if paths == [folder] else [path.name for path in _subfolders(folder)]
    known: list[Any] = [row for row in rows if row[sort] is not None]
    known.sort(key=lambda row: row[sort], reverse=reverse)
    return {
        "schema": "mpctl.runs/1",
        "folder": str(folder),
        "runs": [*known, *(row for row in rows if row[sort] is None)],
        "others": [name for name in found if name not in with_runs],
    }


def _find_runs(folder: Path, depth: int) -> Iterator[Path]:
    """The directories of training runs, without those of benches."""
    for path in _subfolders(folder):
        if RunDir(path).bench.exists():
            continue
        if looks_like_run(path):
            yield path
        elif depth > 1:
            try:
                yield from _find_runs(path, depth - 1)
            except InputError:
                continue  # a folder that this user may not read: listed among the others


def _subfolders(folder: Path) -> list[Path]:
    """The folders in it by name, without hidden ones and links."""
    try:
        return sorted(
            path
            for path in folder.iterdir()
            if path.is_dir() and not path.is_symlink() and not path.name.startswith(".")
        )
    except OSError as error:
        raise InputError.of(
            "no-such-folder",
            "FOLDER",
            f"{folder}: {error.strerror or error}",
            "name a folder that contains runs; `mpctl launch` writes to runs/",
        ) from None


def _row(run: SavedRun) -> RunRow:
    last, validated = run.key_records.last, run.key_records.validated
    validation_loss = validated.get("validation_loss") if validated else None
    failure = run.failure if run.status == "failed" else None
    return {
        "name": run.name,
        "path": str(run.path),
        "status": run.status,
        "model": run.model,
        "layout": run.layout,
        "step": run.step,
        "steps": run.steps,
        "loss": last["loss"] if last else None,
        "validation_loss": validation_loss if is_number(validation_loss) else None,
        "tokens_per_second": last["tokens_per_second"] if last else None,
        "started": iso(run.started),
        "ended": iso(run.ended),
        "checkpoints": len(run.checkpoints),
        "checkpoint_bytes": run.checkpoint_bytes,
        "failure": None if failure is None else failure.error,
        "problems": list(run.problems),
    }


def iso(seconds: float | None) -> str | None:
    """Seconds since 1970 as `2026-11-21T20:13:05+00:00`; None when they are out of range."""
    try:
        moment = None if seconds is None else datetime.fromtimestamp(seconds, UTC)
    except (OverflowError, ValueError, OSError):
        return None
    return None if moment is None else moment.isoformat(timespec="seconds")
