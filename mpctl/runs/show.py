"""One run as a document (schema mpctl.show/1): its job, how far it came, what it left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mpctl.errors import InputError
from mpctl.launch.summary import reached
from mpctl.planning.layout_settings import layout_of, layout_text
from mpctl.runs.documents import FailureSummary, read_json
from mpctl.runs.listing import iso
from mpctl.runs.records import read_records
from mpctl.runs.saved import SavedRun, looks_like_run, read_run

Progress = Callable[[str, int, int], None]


def open_runs(names: list[Path], on_progress: Progress = lambda *_: None) -> list[SavedRun]:
    """Runs with their records, by path or by their name in runs/; curves call them as they were
    typed. on_progress: (run, bytes read, all bytes).

    Raises InputError for every name that is no run.
    """
    places = [_place(name) for name in names]
    missing = [name for name, place in zip(names, places, strict=True) if place is None]
    if missing:
        raise InputError([_no_run(name) for name in missing])
    found = zip(names, places, strict=True)
    runs = [read_run(place, _short(name)) for name, place in found if place is not None]
    return [_with_records(run, on_progress) for run in runs]


def _with_records(run: SavedRun, on_progress: Progress) -> SavedRun:
    try:
        records = read_records(run.path / "metrics.jsonl",
                               lambda done, total: on_progress(run.name, done, total))  # fmt: skip
    except OSError:  # told among the run's problems
        return run
    return replace(run, records=tuple(records))


def _place(name: Path) -> Path | None:
    return next((path for path in (name, Path("runs") / name) if looks_like_run(path)), None)


def _no_run(name: Path) -> Any:
    return InputError.of("no-run", "RUN", f"{name} does not hold a run of mpctl",
                         "`mpctl runs` lists those in runs/").issues[0]  # fmt: skip


def _short(name: Path) -> str:
    """`runs/demo/` is called demo, as in the list of runs."""
    parts = name.parts[1:] if name.parts[:1] == ("runs",) and len(name.parts) > 1 else name.parts
    return "/".join(parts) if not name.is_absolute() and parts else name.resolve().name


def show_document(run: SavedRun) -> dict[str, Any]:
    """What `mpctl show` tells of one run; numbers in base units."""
    job, summary = run.job, run.summary
    compared = summary.plan_beside_run if summary else []
    return {
        "name": run.name,
        "path": str(run.path),
        "status": run.status,
        "problems": list(run.problems),
        "job": job.model_dump(mode="json") if job else None,
        "layout": _layout(run),
        "world_size": job.world_size if job else None,
        "steps_asked": run.steps,
        **reached(run.records),
        "training_seconds": sum(record["step_seconds"] for record in run.records),
        "predicted_step_seconds": job.launch.predicted_step_seconds if job else None,
        "started": iso(run.started),
        "ended": iso(run.ended),
        "attempts": summary.attempts if summary else None,
        "plan_beside_run": [rank.model_dump() for rank in compared],
        "checkpoints": [saved.as_dict() for saved in run.checkpoints],
        "failure": failure.model_dump() if (failure := find_failure(run)) else None,
    }


def _layout(run: SavedRun) -> str | None:
    """As a search words it; axes alone for a job without a model."""
    if run.job is None or run.job.model is None:
        return run.layout
    return layout_text(layout_of(run.job))


def find_failure(run: SavedRun) -> FailureSummary | None:
    """The failure that the summary tells; without a summary the first that a rank recorded, real
    errors before those that a lost peer caused."""
    if run.summary is not None:
        return run.summary.failure
    read = (read_json(path) for path in sorted((run.path / "failures").glob("rank-*.json")))
    records = sorted((r for r in read if isinstance(r, dict)), key=lambda r: bool(r.get("is_echo")))
    for record in records:
        try:
            return FailureSummary.model_validate(record)
        except ValidationError:
            continue
    return None
