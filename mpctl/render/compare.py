"""Plans side by side as one table; what differs from the first is marked by how much."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from mpctl.units import bytes_text, count_text, seconds_text

SAME = 0.0005  # of a figure: what rounding hides


def print_comparison(document: dict[str, Any]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True)
    for name in document["jobs"]:
        table.add_column(name, overflow="fold", justify="right")
    for name, values in document["settings"].items():
        table.add_row(name, *(_setting(value, values[0]) for value in values))
    table.add_section()
    figures = document["figures"]
    for name in dict.fromkeys(key for own in figures for key in own):
        values = [own.get(name) for own in figures]
        if any(values):
            table.add_row(name, *_figures(name, values))
    console = Console(highlight=False)
    console.print(table)
    console.print("settings that differ, then figures; ≠ and +x%: beside the first", style="dim")


def _setting(value: Any, first: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else "-" if value is None else str(value)
    return text if value == first else f"≠ {text}"


def _figures(name: str, values: Sequence[float | None]) -> list[str]:
    text, first = _text(name), values[0]
    cells = []
    for value in values:
        cell = "-" if value is None else text(value)
        if value is not None and first and abs(value / first - 1) > SAME:
            cell = f"({value / first - 1:+.1%}) {cell}"
        cells.append(cell)
    return cells


def _text(name: str) -> Callable[[float], str]:
    if name == "ranks":
        return "{:,}".format
    if "seconds" in name and not name.endswith("per_second"):
        return seconds_text
    if "bytes" in name:
        return bytes_text
    return (lambda value: f"{value:.1%}") if name == "mfu" else count_text
