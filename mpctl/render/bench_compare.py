"""A comparison of two reports as a table: what changed first, its verdict last."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from mpctl.bench.compare import ComparedRow, Comparison
from mpctl.render.console import get_console, plain_table
from mpctl.units import plural, seconds_text

MARKS = {"slower": ("✗ slower", "bold red"), "faster": ("✓ faster", "green"),
         "noise": ("noise: rounds overlap", "yellow"), "same": ("same", "dim")}  # fmt: skip
FEW = 20


def print_bench_comparison(comparison: Comparison) -> None:
    """The rows, those that became slower first; rows of one report only; warnings; the verdict."""
    console = get_console()
    rows = sorted(comparison["rows"], key=lambda row: -row["ratio"])
    shown = _shown(rows)
    if shown:
        console.print(_table(shown))
    if left_out := len(rows) - len(shown):
        within = f"within {comparison['threshold']:g} % of A"
        console.print(Text(f"{plural(left_out, 'more row')} {within}, see --json", style="dim"))
    for words, names in (("only in A", comparison["only_in_a"]),
                         ("only in B", comparison["only_in_b"])):  # fmt: skip
        if names:
            console.print(f"{words}: {_names(names)}")
    for warning in comparison["warnings"]:
        console.print(Text.assemble(("! ", "bold yellow"), warning))
    console.print(_verdict(comparison))


def _table(rows: list[ComparedRow]) -> Table:
    table = plain_table("", ("", "A", "B", "B / A", "verdict"), left=("", "verdict"))
    for row in rows:
        words, style = MARKS[row["verdict"]]
        table.add_row(
            Text(row["name"]), seconds_text(row["seconds_a"]), seconds_text(row["seconds_b"]),
            f"{row['ratio']:.3f}", Text(words, style=style),
        )  # fmt: skip
    return table


def _shown(rows: list[ComparedRow]) -> list[ComparedRow]:
    """All of a few rows; of many those beyond the threshold."""
    if len(rows) <= FEW:
        return rows
    return [row for row in rows if row["verdict"] != "same"]


def _names(names: list[str]) -> str:
    more = len(names) - 10
    return ", ".join(names[:10]) + (f" and {more} more" if more > 0 else "")


def _verdict(comparison: Comparison) -> Text:
    count, rows = comparison["regressions"], plural(len(comparison["rows"]), "row")
    mean = f"B takes {comparison['ratio']:.3f} of A's time in the geometric mean"
    bound = f"slower by more than {comparison['threshold']:g} % and beyond the spread of both"
    if count:
        return Text.assemble(("✗ ", "bold red"), f"{count} of {rows} {bound}; {mean}")
    return Text.assemble(("✓ ", "bold green"), f"none of {rows} is {bound}; {mean}")
