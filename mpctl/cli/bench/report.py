"""`mpctl bench report`: page, pictures and table of a report that was written before."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mpctl.cli.bench.compare import ReportArgument
from mpctl.cli.bench.finish import draw
from mpctl.cli.bench.options import OverwriteOption

FolderOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Folder for a copy of the report with its page and pictures; by default the folder "
        "of the report.",
        show_default=False,
    ),
]


def report(
    source: Annotated[Path, ReportArgument],
    out: FolderOption = None,
    overwrite: OverwriteOption = False,
) -> None:
    """Draw the page, the pictures and the CSV of a report again.

    That helps with reports of other machines, and where matplotlib was missing. Exit code 2 for a
    file that is no report of mpctl bench, and for a folder that cannot be written or has files of
    others.
    """
    from mpctl.bench.documents import read_report, report_path
    from mpctl.bench.report import REPORT, TABLE, check_redrawn, save_report
    from mpctl.errors import InputError
    from mpctl.render.html.bench import report_warnings
    from mpctl.render.output import print_warnings

    found = read_report(source, "SOURCE")
    folder = report_path(source).parent if out is None else out
    if issues := list(check_redrawn(folder, is_own=out is None, overwrite=overwrite)):
        raise InputError(issues)
    save_report(folder, found)
    print_warnings(list(report_warnings(found)))
    draw(folder, found, [REPORT, TABLE], as_json=False)
