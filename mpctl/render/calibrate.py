"""A fit as a table: how far off each group of runs was, is, and is where it is left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import expm1
from pathlib import Path

from rich.table import Table

from mpctl.calibrate.cross import Residuals
from mpctl.calibrate.runs import Run
from mpctl.render.console import Console


def print_fit(runs: Sequence[Run], columns: Mapping[str, Residuals], paths: Sequence[Path]) -> None:
    """columns: of residuals, `fitted` among them."""
    console, table = Console(highlight=False), Table(box=None)
    for name in ("runs", "n", *columns, "bias"):
        table.add_column(name, justify="left" if name == "runs" else "right")
    for group in dict.fromkeys(run.group for run in runs):
        own = [run.id for run in runs if run.group == group]
        found = {name: [r for run in own for r in column[run]] for name, column in columns.items()}
        bias = expm1(sum(found["fitted"]) / len(found["fitted"]))
        errors = map(_error, found.values())
        table.add_row(group or "all", str(len(own)), *errors, f"{100 * bias:+.1f} %")
    console.print(table)
    console.print(f"mean absolute errors of a step; {len(paths)} presets written")


def _error(values: Sequence[float]) -> str:
    return f"{100 * sum(abs(expm1(value)) for value in values) / len(values):.1f} %"
