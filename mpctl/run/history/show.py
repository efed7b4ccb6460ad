"""Runs as documents: one run (mpctl.show/1), curves of runs (mpctl.series/1), metrics exported.

A metric is any number in a run's records, by its key; `ALIASES` are shorter names. Training time is
the sum of the steps' seconds, so that the time between an interruption and the resumption does not
count. CSV and TensorBoard events have the forms that launch.csv and launch.tensorboard give while a
run trains.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, NamedTuple

from typing_extensions import TypedDict  # pydantic needs it to validate them before Python 3.12

from mpctl.core.errors import InputError, Issue
from mpctl.core.records import json_value
from mpctl.plan.planning.layout_settings import layout_of, layout_text
from mpctl.records.rundir.directory import RunDir
from mpctl.records.rundir.launches import read_times_away
from mpctl.records.rundir.metrics import (
    LINES_PER_REPORT,
    CsvFile,
    EventFiles,
    missing_tensorboard,
    ordered,
    points,
    read_records,
)
from mpctl.records.rundir.rank_files import StepRecord
from mpctl.records.rundir.slow import read_slow
from mpctl.records.rundir.summary import PlanAndRun, training_progress
from mpctl.run.history.listing import iso
from mpctl.run.history.saved import CheckpointRow, SavedRun, Status, find_run, read_run, short_name

Progress = Callable[[str, int, int], None]
X = Literal["step", "tokens", "time"]
ALIASES = {"val": "validation_loss", "lr": "learning_rate", "tokens/s": "tokens_per_second"}


class ShownRun(PlanAndRun):
    """One run. steps: steps trained; steps_asked: steps that its job asks for; layout: in the words
    of `mpctl search`, or the sizes of the axes for a job without a model; started, ended: ISO 8601
    in UTC; plan_beside_run: plan and run compared, one row for each rank; problems: sentences on
    what is damaged. None stands for what is not known."""

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
    """Output of `mpctl show --json`."""

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
    for at, run in enumerate(runs):
        with suppress(OSError):  # read_run has put it among the run's problems
            records = read_records(run.path / "metrics.jsonl", partial(on_progress, run.name))
            runs[at] = replace(run, records=tuple(records))
    return runs


def show_document(runs: list[SavedRun]) -> ShowDocument:
    return {"schema": "mpctl.show/1", "runs": [show_run(run) for run in runs]}


def show_run(run: SavedRun) -> ShownRun:
    """One run as JSON; bytes and seconds. The run must have been read by `open_runs`."""
    job, summary, failure = run.job, run.summary, run.failure
    return {
        "name": run.name,
        "path": str(run.path),
        "status": run.status,
        "problems": list(run.problems),
        "job": job.model_dump(mode="json") if job else None,
        "layout": layout_text(layout_of(job)) if job and job.model else run.layout,
        "world_size": job.world_size if job else None,
        "steps_asked": run.steps,
        **training_progress(run.records, read_times_away(RunDir(run.path).launcher_log, run.records)),
        "training_seconds": sum(record["step_seconds"] for record in run.records),
        "predicted_step_seconds": job.launch.predicted_step_seconds if job else None,
        "figures_from": summary.figures_from if summary else [],
        "saves": summary.saves if summary else None,
        "started": iso(run.started),
        "ended": iso(run.ended),
        "attempts": summary.attempts if summary else None,
        "slow": [part.as_dict() for part in read_slow(RunDir(run.path).slow)],
        "plan_beside_run": summary.plan_beside_run if summary else [],
        "checkpoints": list(run.checkpoints),
        "failure": failure.as_dict() if failure else None,
    }


class Series(NamedTuple):
    """One metric of one run; x and y are equally long, x in steps, tokens or seconds."""

    run: str
    metric: str
    x: tuple[float, ...]
    y: tuple[float, ...]


class SeriesEntry(TypedDict):
    """One metric of one run; x and y are equally long."""

    run: str
    metric: str
    x: list[float]
    y: list[float]


class SeriesDocument(TypedDict):
    """Output of `mpctl show --plot METRIC --json`. x: the unit of the curves' x."""

    schema: Literal["mpctl.series/1"]
    x: X
    series: list[SeriesEntry]


def series_document(series: Sequence[Series], x: X) -> SeriesDocument:
    """Return the output of `mpctl show --plot --json`. x: the unit of the curves' x."""
    return {"schema": "mpctl.series/1", "x": x, "series": json_value(series)}


def find_series(runs: Sequence[SavedRun], metrics: Iterable[str], x: X) -> list[Series]:
    """A curve for each metric and each run that has it; runs must have been read by `open_runs`.

    Raises InputError, which lists the existing metrics, for one that no run has.
    """
    names = [ALIASES.get(name, name) for name in metrics]
    series = [_series(run, name, x) for name in names for run in runs]
    missing = [name for name in names if not any(s.y for s in series if s.metric == name)]
    if missing:
        numbers = (point.values for r in runs for record in r.records for point in points(record))
        present = ordered(name for values in numbers for name in values)
        who = runs[0].name if len(runs) == 1 else f"none of the {len(runs)} runs"
        message = f"{who} has no metric {missing[0]!r}"
        raise InputError.of("unknown-metric", "--plot", message, _ways_out(missing[0], present))
    return [one for one in series if one.y]


def _ways_out(name: str, present: list[str]) -> str:
    if not present:
        return "no step has been recorded yet"
    near = difflib.get_close_matches(name, [*present, *ALIASES], n=1)
    guess = f"did you mean {near[0]}? " if near else ""
    short = ", ".join(f"{alias} for {name}" for alias, name in ALIASES.items() if name in present)
    return f"{guess}there are {', '.join(present)}" + (f" ({short})" if short else "")


def _series(run: SavedRun, metric: str, x: X) -> Series:
    x_of_step = _x_of_step(run, x)
    pairs = [
        (x_of_step[point.step], point.values[metric])
        for record in run.records
        for point in points(record)
        if metric in point.values and point.step in x_of_step
    ]
    return Series(run.name, metric, tuple(x for x, _ in pairs), tuple(y for _, y in pairs))


def _x_of_step(run: SavedRun, x: X) -> dict[int, float]:
    """The x coordinate of every step; 0 before the first one."""
    steps = [record["step"] for record in run.records]
    before = [point.step for record in run.records[:1] for point in points(record)][:1]
    if x == "step":
        along: Iterable[float] = steps
    elif x == "tokens":
        along = (record["tokens"] for record in run.records)
    else:
        along = accumulate(record["step_seconds"] for record in run.records)
    return dict.fromkeys(before, 0.0) | dict(zip(steps, along, strict=True))


def only_run(runs: Sequence[SavedRun], option: str) -> SavedRun:
    """The only run of these. Raises InputError, which names the option, for several."""
    if len(runs) != 1:
        message = f"{len(runs)} runs were named, but only one is written"
        raise InputError.of("usage", option, message, "name one run")
    return runs[0]


def export(runs: list[SavedRun], csv: Path | None, tensorboard: Path | None, on_progress: Progress) -> Iterator[Path]:
    """Write one run's metrics to a CSV file, to a folder of TensorBoard events, or to both; yields
    each path when it is written. on_progress: called with (path, records written, all records).

    Raises InputError for several runs, a missing package, a folder that is not empty, and a path
    that cannot be written.
    """
    run = only_run(runs, "--csv" if csv else "--tensorboard")
    if tensorboard is not None:
        _require_free(tensorboard)
    if csv is not None:
        yield from _write("--csv", csv, CsvFile(csv), _reported(run, csv, on_progress))
    if tensorboard is not None:
        records = _reported(run, tensorboard, on_progress)
        yield from _write("--tensorboard", tensorboard, EventFiles(tensorboard), records)


def _reported(run: SavedRun, path: Path, on_progress: Progress) -> Iterator[StepRecord]:
    for number, record in enumerate(run.records):
        if number % LINES_PER_REPORT == 0:
            on_progress(f"writing {path.name}", number, len(run.records))
        yield record


def _write(option: str, path: Path, sink: CsvFile | EventFiles, records: Iterator[StepRecord]) -> Iterator[Path]:
    try:
        sink.rebuild(records)
    except OSError as error:
        message, hint = f"{path}: {error.strerror or error}", "name a path that can be written"
        raise InputError.of("unwritable", option, message, hint) from None
    yield path


def _require_free(folder: Path) -> None:
    """TensorBoard would draw events that are already in the folder into the same curves."""
    if issues := missing_tensorboard("--tensorboard"):
        raise InputError(issues)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        message = f"{folder} is not an empty folder"
        raise InputError.of("occupied", "--tensorboard", message, "name a new folder")
