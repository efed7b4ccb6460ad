"""The folder that a bench writes: used when it is free, cleared only of what a bench wrote.

OUT/ .mpctl-bench    marks the folder as a bench's
     report.json     schema mpctl.bench/1, written whole after every round
     report.csv      its rows
     report.html, *.png, *.svg    page and pictures of the report
     data/N/         prepared data that runs of the bench share
     CASE-rN/        a run directory for each round of a case
"""

from __future__ import annotations

import csv
import io
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpctl.bench.report import SCHEMA, BenchReport
from mpctl.durable import write_whole
from mpctl.errors import InputError, Issue
from mpctl.rundir.directory import RunDir
from mpctl.rundir.marker import is_launched

BENCH_MARKER, REPORT, TABLE, DATA = ".mpctl-bench", "report.json", "report.csv", "data"
WRITTEN = ("report.*", "*.png", "*.svg", "presets/*/*.toml")
"""What a bench writes beside run directories, as patterns."""
FAMILY = SCHEMA.split("/")[0]  # older versions wrote mpctl.bench.scaling/1


def check_folder(out: Path, *, overwrite: bool) -> Iterator[Issue]:
    """An issue when the folder contains something that this bench may not replace."""
    if not _is_occupied(out):
        return
    if not out.is_dir():
        yield Issue("bench-no-folder", "--out", f"{out} is a file", "name a folder")
    elif not overwrite:
        yield Issue("bench-occupied", "--out", f"{out} already contains {_what(out)}",
                    "use --overwrite to replace it, or another --out")  # fmt: skip
    elif not _is_bench(out):
        yield Issue("bench-foreign", "--out", f"{out} was not written by mpctl bench; nothing was "
                    "removed", "use another --out")  # fmt: skip


def take_folder(out: Path) -> None:
    """Remove what an earlier bench wrote and mark the folder as a bench's. Raises InputError when
    it cannot be written."""
    try:
        if _is_occupied(out):
            _clear(out)
        out.mkdir(parents=True, exist_ok=True)
        (out / BENCH_MARKER).write_text("", "utf-8")
    except OSError as error:
        raise _cannot_write(out, error) from None


def _cannot_write(out: Path, error: OSError) -> InputError:
    message = f"{out} cannot be written: {error.strerror or error}"
    return InputError.of("bench-unwritable", "--out", message, "name a folder that can be written")


def check_redrawn(out: Path, *, is_own: bool, overwrite: bool) -> Iterator[Issue]:
    """An issue when a report may not be written to a folder. is_own: it was read there, so that it
    replaces itself, but what is no bench's folder holds files of others."""
    if is_own and not _is_bench(out):
        yield Issue("bench-foreign", "--out", f"{out} was not written by mpctl bench",
                    "name a new folder by --out")  # fmt: skip
    elif not is_own:
        yield from check_folder(out, overwrite=overwrite)


def save_report(out: Path, report: BenchReport) -> None:
    """Write OUT/report.json and OUT/report.csv; OUT is made where it is missing. Raises InputError
    when they cannot be written."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_whole(out / REPORT, json.dumps(report, indent=1) + "\n")
        write_whole(out / TABLE, csv_text(report["results"]))
    except OSError as error:
        raise _cannot_write(out, error) from None


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as CSV: a column for each key of any row, `sizes.tp` for a key of an inner table.

    >>> csv_text([{"name": "a", "sizes": {"tp": 2}}, {"name": "b", "wrong": 0}])
    'name,sizes.tp,wrong\\r\\na,2,\\r\\nb,,0\\r\\n'
    """
    tables = [dict(flat(row)) for row in rows]
    columns = dict.fromkeys(key for table in tables for key in table)
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(columns), restval="")
    writer.writeheader()
    writer.writerows(tables)
    return stream.getvalue()


def flat(table: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Keys and values of a table, such as a row; those of an inner one as `sizes.tp`. Nothing for
    what is no table."""
    for key, value in table.items() if isinstance(table, Mapping) else ():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _clear(out: Path) -> None:
    for pattern in WRITTEN:
        for path in out.glob(pattern):
            path.unlink(missing_ok=True)
    if not (out / DATA).is_symlink():
        shutil.rmtree(out / DATA, ignore_errors=True)
    for path in out.glob("*-r*"):
        if path.is_dir() and not path.is_symlink() and is_launched(path):
            RunDir(path).abandon()


def _is_occupied(out: Path) -> bool:
    return out.exists() and (not out.is_dir() or any(out.iterdir()))


def _is_bench(out: Path) -> bool:
    return (out / BENCH_MARKER).is_file() or _has_report(out)


def _what(out: Path) -> str:
    return "a bench's report" if _has_report(out) else "files"


def _has_report(out: Path) -> bool:
    try:
        report = json.loads((out / REPORT).read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(report, dict) and str(report.get("schema")).startswith(FAMILY)
