"""The metrics of a run that has ended, in the forms that launch.csv and launch.tensorboard give."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from mpctl.errors import InputError
from mpctl.rundir.event_files import EventFiles, missing_tensorboard
from mpctl.rundir.metrics_csv import CsvFile
from mpctl.rundir.scalars import Record
from mpctl.runs.records import TOLD_EVERY
from mpctl.runs.saved import SavedRun

Progress = Callable[[str, int, int], None]


def export(
    runs: list[SavedRun], csv: Path | None, tensorboard: Path | None, on_progress: Progress
) -> Iterator[Path]:
    """Write what is asked for; yields each path once it is written. on_progress: (path, records
    written, all records).

    Raises InputError for several runs, a missing package, a folder that holds something, a path
    that cannot be written.
    """
    if len(runs) != 1:
        option = "--csv" if csv else "--tensorboard"
        message = f"{len(runs)} runs, but one is written at a time"
        raise InputError.of("usage", option, message, "name one run")
    (run,) = runs
    if tensorboard is not None:
        _require_free(tensorboard)
    if csv is not None:
        yield from _written("--csv", csv, CsvFile(csv), _told(run, csv, on_progress))
    if tensorboard is not None:
        records = _told(run, tensorboard, on_progress)
        yield from _written("--tensorboard", tensorboard, EventFiles(tensorboard), records)


def _told(run: SavedRun, path: Path, on_progress: Progress) -> Iterator[Record]:
    for number, record in enumerate(run.records):
        if number % TOLD_EVERY == 0:
            on_progress(f"writing {path.name}", number, len(run.records))
        yield record


def _written(
    option: str, path: Path, sink: CsvFile | EventFiles, records: Iterator[Record]
) -> Iterator[Path]:
    try:
        sink.rebuild(records)
    except OSError as error:
        raise InputError.of("unwritable", option, f"{path}: {error.strerror or error}",
                            "name a place that can be written") from None  # fmt: skip
    yield path


def _require_free(folder: Path) -> None:
    """TensorBoard would lay what is there already under the new curves."""
    if issues := missing_tensorboard("--tensorboard"):
        raise InputError(issues)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError.of("occupied", "--tensorboard", f"{folder} holds something already",
                            "name a new folder")  # fmt: skip
