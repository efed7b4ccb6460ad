"""The metrics of a run that exists, written as CSV or TensorBoard events, the same forms that
launch.csv and launch.tensorboard give while a run trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from mpctl.errors import InputError
from mpctl.rundir.event_files import EventFiles, missing_tensorboard
from mpctl.rundir.metrics import LINES_PER_REPORT
from mpctl.rundir.metrics_csv import CsvFile
from mpctl.rundir.rank_files import StepRecord
from mpctl.runs.saved import SavedRun

Progress = Callable[[str, int, int], None]


def export(
    runs: list[SavedRun], csv: Path | None, tensorboard: Path | None, on_progress: Progress
) -> Iterator[Path]:
    """Write one run's metrics to a CSV file, to a folder of TensorBoard events, or to both; yields
    each path when it is written. on_progress: called with (path, records written, all records).

    Raises InputError for several runs, a missing package, a folder that is not empty, and a path
    that cannot be written.
    """
    if len(runs) != 1:
        option = "--csv" if csv else "--tensorboard"
        message = f"{len(runs)} runs were named, but only one is written"
        raise InputError.of("usage", option, message, "name one run")
    (run,) = runs
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


def _write(
    option: str, path: Path, sink: CsvFile | EventFiles, records: Iterator[StepRecord]
) -> Iterator[Path]:
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
