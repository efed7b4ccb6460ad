"""The metrics of a run that has ended, in the forms that launch.csv and launch.tensorboard give."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mpctl.errors import InputError
from mpctl.launch.events import EventFiles, missing_tensorboard
from mpctl.launch.metrics_csv import CsvFile
from mpctl.runs.saved import SavedRun


def export(runs: list[SavedRun], csv: Path | None, tensorboard: Path | None) -> Iterator[Path]:
    """Write what is asked for; yields each path once it is written.

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
        yield from _written("--csv", csv, CsvFile(csv), run)
    if tensorboard is not None:
        yield from _written("--tensorboard", tensorboard, EventFiles(tensorboard), run)


def _written(option: str, path: Path, sink: CsvFile | EventFiles, run: SavedRun) -> Iterator[Path]:
    try:
        sink.rebuild(run.records)
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
