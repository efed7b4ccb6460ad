"""`mpctl bench compare`: two reports of one bench, and exit code 1 where rows became slower."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mpctl.cli.bench.options import AsJsonOption

ReportArgument = typer.Argument(help="A report.json of mpctl bench, or the folder that holds it.")
ThresholdOption = Annotated[
    float,
    typer.Option(min=0, metavar="PERCENT", help="How much slower a row may become."),
]


def compare(
    a: Annotated[Path, ReportArgument],
    b: Annotated[Path, ReportArgument],
    threshold: ThresholdOption = 10.0,
    as_json: AsJsonOption = False,
) -> None:
    """Compare report B with the older report A; exit code 1 where a row became slower.

    Rows are matched by name. A row is slower where its median grew by more than --threshold percent
    and every round of B took longer than every round of A. Warns where machine, versions or command
    differ. Exit code 2 for files that are no reports of the same bench.
    """
    from contextlib import suppress
    from math import isfinite

    from mpctl.bench.compare import compare_reports
    from mpctl.bench.documents import read_reports
    from mpctl.errors import InputError
    from mpctl.render.bench_compare import print_bench_comparison
    from mpctl.render.output import print_json

    if not isfinite(threshold):
        raise InputError.of("bad-threshold", "--threshold", f"{threshold} is no number of percent",
                            "for example --threshold 10")  # fmt: skip
    before, after = read_reports({"A": a, "B": b})
    comparison = compare_reports(before, after, threshold)
    with suppress(BrokenPipeError):  # `| head` does not change the exit code
        if as_json:
            print_json(comparison)
        else:
            print_bench_comparison(comparison)
    if comparison["regressions"]:
        raise typer.Exit(1)
