"""The runs of a folder, as rows: schema mpctl.runs/1."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mpctl.errors import InputError
from mpctl.rundir.scalars import is_number
from mpctl.runs.saved import SavedRun, looks_like_run, read_run

DEPTH = 2  # runs/NAME, and runs/bench-scaling/NAME
SORTED_BY = ("name", "status", "model", "step", "loss", "validation_loss", "tokens_per_second",
             "started", "ended", "checkpoint_bytes")  # fmt: skip
OnProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class Listing:
    """rows: one a run, in the order asked for; others: names in the folder that are no runs."""

    folder: Path
    rows: tuple[dict[str, Any], ...]
    others: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return {"schema": "mpctl.runs/1", "folder": str(self.folder), "runs": list(self.rows),
                "others": list(self.others)}  # fmt: skip


def list_runs(
    folder: Path, *, sort: str = "started", reverse: bool = False,
    on_progress: OnProgress = lambda done, total: None,
) -> Listing:  # fmt: skip
    """Every run in a folder or one folder below; the folder itself when it is a run.

    Runs that lack the key come last. Raises InputError for a folder that cannot be listed and for
    an unknown key.
    """
    if sort not in SORTED_BY:
        raise InputError.of("bad-sort", "--sort", f"there is no column {sort!r}",
                            f"use {', '.join(SORTED_BY)}")  # fmt: skip
    found = [folder] if looks_like_run(folder) else list(_runs(folder, DEPTH))
    rows = []
    for number, path in enumerate(found):
        on_progress(number, len(found))
        name = path.name if path == folder else str(path.relative_to(folder))
        rows.append(row(read_run(path, name)))
    known = sorted((r for r in rows if r[sort] is not None), key=lambda r: r[sort], reverse=reverse)
    unknown = [r for r in rows if r[sort] is None]
    holding = {Path(r["name"]).parts[0] for r in rows}
    others = [] if found == [folder] else [p.name for p in _entries(folder)]
    return Listing(folder, (*known, *unknown), tuple(o for o in others if o not in holding))


def _runs(folder: Path, depth: int) -> Iterator[Path]:
    for path in _entries(folder):
        if looks_like_run(path):
            yield path
        elif depth > 1:
            try:
                yield from _runs(path, depth - 1)
            except InputError:
                continue  # a folder that is not ours to read: listed among the others


def _entries(folder: Path) -> list[Path]:
    """Its folders by name, hidden ones and links left out."""
    try:
        return sorted(
            path for path in folder.iterdir()
            if path.is_dir() and not path.is_symlink() and not path.name.startswith(".")
        )  # fmt: skip
    except OSError as error:
        raise InputError.of("no-such-folder", "FOLDER", f"{folder}: {error.strerror or error}",
                            "name a folder that holds runs; `mpctl launch` writes to runs/"
                            ) from None  # fmt: skip


def row(run: SavedRun) -> dict[str, Any]:
    """One run: names, numbers in base units, times in ISO 8601 (UTC)."""
    last, validated = run.ends.last or {}, run.ends.validated or {}
    return {
        "name": run.name,
        "path": str(run.path),
        "status": run.status,
        "model": run.model,
        "layout": run.layout,
        "step": run.step,
        "steps": run.steps,
        "loss": last.get("loss"),
        "validation_loss": value if is_number(value := validated.get("validation_loss")) else None,
        "tokens_per_second": last.get("tokens_per_second"),
        "started": iso(run.started),
        "ended": iso(run.ended),
        "checkpoints": len(run.checkpoints),
        "checkpoint_bytes": run.checkpoint_bytes,
        "problems": list(run.problems),
    }


def iso(seconds: float | None) -> str | None:
    """Seconds since 1970 as `2026-11-21T20:13:05+00:00`; None for what is no moment."""
    try:
        moment = None if seconds is None else datetime.fromtimestamp(seconds, UTC)
    except (OverflowError, ValueError, OSError):
        return None
    return None if moment is None else moment.isoformat(timespec="seconds")
