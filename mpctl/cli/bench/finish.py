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

    The folder is first, so that whatever happens afterwards costs no measurement. A bench that
    Ctrl-C ended calls this too, and raises KeyboardInterrupt then. Raises InputError where the
    folder cannot be written.
    """
    from mpctl.bench.folder import save_report
    from mpctl.render.console import say
    from mpctl.render.json import print_json

    save_report(folder, report)
    if as_json:
        print_json(report)
        return
    show(report)
    say(f"wrote {folder}")
