"""The folder that a bench writes: used when it is free, cleared only of what a bench wrote.

OUT/ .mpctl-bench report.json data/ CASE-rN/ (a run directory for each repeat of a case)
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from mpctl.errors import Issue
from mpctl.rundir.directory import RunDir, cannot_write
from mpctl.rundir.marker import is_launched

BENCH_MARKER, REPORT, DATA = ".mpctl-bench", "report.json", "data"
SCHEMA = "mpctl.bench.scaling/1"


def check_folder(out: Path, *, overwrite: bool) -> Iterator[Issue]:
    """An issue when the folder contains something that this bench may not replace."""
    if not _is_occupied(out):
        return
    if not overwrite:
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
        raise cannot_write(out, error) from None


def _clear(out: Path) -> None:
    (out / REPORT).unlink(missing_ok=True)
    if not (out / DATA).is_symlink():
        shutil.rmtree(out / DATA, ignore_errors=True)
    for path in out.glob("*-r*"):
        if path.is_dir() and not path.is_symlink() and is_launched(path):
            RunDir(path).clear()
            with suppress(OSError):  # something of the user's is left in it
                path.rmdir()


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
    return isinstance(report, dict) and report.get("schema") == SCHEMA
