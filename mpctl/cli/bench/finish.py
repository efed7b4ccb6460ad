"""How every bench ends: its folder is written, and its report is shown."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from mpctl.bench.report import BenchReport

Report = TypeVar("Report", bound="BenchReport")


def finish(folder: Path, report: Report, show: Callable[[Report], None], *, as_json: bool) -> None:
    """Write a bench's folder and show its report: by `show` as tables, or as JSON on stdout.

    The report is written first, so that whatever happens afterwards costs no measurement, and the
    pictures last. A bench that Ctrl-C ended calls this too, and raises KeyboardInterrupt then.
    Raises InputError where the folder cannot be written.
    """
    from mpctl.bench.report import REPORT, TABLE, save_report
    from mpctl.render.output import print_json

    save_report(folder, report)
    if as_json:
        print_json(report)
    else:
        show(report)
    draw(folder, report, [REPORT, TABLE], as_json=as_json)


def draw(folder: Path, report: BenchReport, written: list[str], *, as_json: bool) -> None:
    """Write the page and the pictures of a report, and say what was written, after the names in
    `written`: on stdout, or on stderr where stdout is for JSON."""
    from mpctl.render.bench_files import NO_PNG, write_bench_files
    from mpctl.render.charts.png import has_matplotlib
    from mpctl.render.console import say

    names = [*written, *(path.name for path in write_bench_files(folder, report))]
    say(f"wrote {', '.join(names)} in {folder}", stderr=as_json)
    if not has_matplotlib():
        say(NO_PNG, stderr=as_json)
