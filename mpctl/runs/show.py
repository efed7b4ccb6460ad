"""One run as a document, schema mpctl.show/1: its job, how far it came, what it saved, why it
failed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypedDict, cast

from mpctl.errors import InputError, Issue
from mpctl.planning.layout_settings import layout_of, layout_text
from mpctl.rundir.metrics import read_records
from mpctl.rundir.summary import PlanAndRun, RankComparison, training_progress
from mpctl.runs.listing import iso
from mpctl.runs.saved import CheckpointRow, SavedRun, Status, find_run, read_run, short_name

Progress = Callable[[str, int, int], None]


class ShownRun(PlanAndRun):
    """One run. steps: steps trained; steps_asked: steps that its job asks for; layout: as `mpctl
    search` words it; started, ended: ISO 8601 in UTC; plan_beside_run: plan and run compared, a row
    a rank; problems: sentences on what is damaged. None stands for what is not known."""

    name: str
    path: str
    status: Status
    problems: list[str]
    job: dict[str, Any] | None
    layout: str | None
    world_size: int | None
    steps_asked: int | None
    training_seconds: float
    started: str | None
    ended: str | None
    attempts: int | None
    checkpoints: list[CheckpointRow]
    failure: dict[str, Any] | None


class ShowDocument(TypedDict):
    """What `mpctl show --json` prints."""

    schema: Literal["mpctl.show/1"]
    runs: list[ShownRun]


def open_runs(names: list[Path], on_progress: Progress = lambda *_: None) -> list[SavedRun]:
    """Runs with all their records, by path or by name in runs/. on_progress: called with (run,
    bytes read, all bytes).

    Raises InputError with an issue for every name that is not a run.
    """
    paths = [find_run(name) for name in names]
    missing = [path for path in paths if isinstance(path, Issue)]
    if missing:
        raise InputError(missing)
    pairs = zip(names, paths, strict=True)
    runs = [read_run(path, short_name(name)) for name, path in pairs if isinstance(path, Path)]
    return [_with_records(run, on_progress) for run in runs]


def _with_records(run: SavedRun, on_progress: Progress) -> SavedRun:
    try:
        records = read_records(
            run.path / "metrics.jsonl", lambda done, total: on_progress(run.name, done, total)
        )
    except OSError:  # read_run has put it among the run's problems
        return run
    return replace(run, records=tuple(records))


def show_document(runs: list[SavedRun]) -> ShowDocument:
    """The runs as JSON."""
    return {"schema": "mpctl.show/1", "runs": [show_run(run) for run in runs]}


def show_run(run: SavedRun) -> ShownRun:
    """One run as JSON; bytes and seconds. The run must have been read by `open_runs`."""
    job, summary, failure = run.job, run.summary, run.failure
    compared = [rank.model_dump() for rank in summary.plan_beside_run] if summary else []
    return {
        "name": run.name,
        "path": str(run.path),
        "status": run.status,
        "problems": list(run.problems),
        "job": job.model_dump(mode="json") if job else None,
        "layout": _layout(run),
        "world_size": job.world_size if job else None,
        "steps_asked": run.steps,
        **training_progress(run.records),
        "training_seconds": sum(record["step_seconds"] for record in run.records),
        "predicted_step_seconds": job.launch.predicted_step_seconds if job else None,
        "saves": summary.saves if summary else None,
        "started": iso(run.started),
        "ended": iso(run.ended),
        "attempts": summary.attempts if summary else None,
        "plan_beside_run": cast(list[RankComparison], compared),
        "checkpoints": [saved.as_dict() for saved in run.checkpoints],
        "failure": failure.model_dump() if failure else None,
    }


def _layout(run: SavedRun) -> str | None:
    """As a search words it; the sizes of the axes alone for a job without a model."""
    if run.job is None or run.job.model is None:
        return run.layout
    return layout_text(layout_of(run.job))
