"""The runs of a folder as a table; a narrow terminal loses its least important columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Literal

from rich.table import Table
from rich.text import Text

from mpctl.render.console import get_console
from mpctl.runs.listing import Listing, RunRow
from mpctl.units import bytes_text, count_text

STYLES = {
    "submitted": "cyan",
    "running": "bold cyan",
    "finished": "green",
    "stopped": "yellow",
    "failed": "bold red",
    "interrupted": "yellow",
    "unreadable": "red",
}
GAP = 2
WORDS = ("name", "status", "model", "layout")
Rows = tuple[RunRow, ...]


def print_runs(listing: Listing) -> None:
    """Print the runs of a folder on stdout; what is wrong with a run, and why one failed before its
    first step, stand below the table."""
    console = get_console()
    if listing.rows:
        width = console.width if console.is_terminal else None
        table = _table(listing.rows, width)
        if width is None:  # a file or a pipe is as wide as the table
            console.width = _measured(listing.rows)
        console.print(table)
    else:
        console.print(Text(f"no runs in {listing.folder}"))
    problems = [(r["name"], text) for r in listing.rows for text in r["problems"]]
    problems += [(r["name"], r["failure"]) for r in listing.rows if r["failure"] and not r["step"]]
    for name, text in problems:
        console.print(Text.assemble(("! ", "bold yellow"), f"{name}: {text}"), soft_wrap=True)
    if listing.others:
        console.print(
            Text(f"not runs of mpctl: {', '.join(listing.others)}", "dim"),
            soft_wrap=True,
        )


def _table(rows: Rows, width: int | None) -> Table:
    """At most `width` characters wide, if its first five columns are."""
    titles = list(COLUMNS)
    while width is not None and len(titles) > 5 and _measured(rows, titles) > width:
        titles.pop()
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0))
    for title in titles:
        table.add_column(title, justify="left" if title in WORDS else "right")
    for row in rows:
        style = STYLES[row["status"]]
        table.add_row(*(Text(COLUMNS[title](row), style if title == "status" else "")
                        for title in titles))  # fmt: skip
    return table


def _measured(rows: Rows, titles: Iterable[str] | None = None) -> int:
    """Characters that the columns take, gaps included."""
    return sum(GAP + max(len(title), *(len(COLUMNS[title](row)) for row in rows))
               for title in titles or COLUMNS)  # fmt: skip


def _number(key: Literal["loss", "validation_loss"], form: str) -> Callable[[RunRow], str]:
    return lambda row: "-" if row[key] is None else format(row[key], form)


def _word(key: Literal["name", "status", "model", "layout"]) -> Callable[[RunRow], str]:
    return lambda row: row[key] or "-"


def _step(row: RunRow) -> str:
    return f"{row['step']}/{row['steps'] or '?'}"


def _size(row: RunRow) -> str:
    return bytes_text(row["checkpoint_bytes"]) if row["checkpoints"] else "-"


def _moment(key: Literal["started", "ended"]) -> Callable[[RunRow], str]:
    return lambda row: moment_text(row[key])


def moment_text(iso: str | None) -> str:
    """`2026-11-21T20:13:05+00:00` as `2026-11-21 20:13` in the time zone of the machine."""
    if iso is None:
        return "-"
    return datetime.fromisoformat(iso).astimezone().strftime("%Y-%m-%d %H:%M")


def _tokens(row: RunRow) -> str:
    speed = row["tokens_per_second"]
    return "-" if speed is None else count_text(speed) if speed >= 1e6 else f"{speed:,.0f}"


# The most important first: from the right they are left out of a narrow terminal.
COLUMNS: dict[str, Callable[[RunRow], str]] = {
    "name": _word("name"),
    "status": _word("status"),
    "step": _step,
    "loss": _number("loss", ".4f"),
    "validation": _number("validation_loss", ".4f"),
    "tokens/s": _tokens,
    "model": _word("model"),
    "layout": _word("layout"),
    "started": _moment("started"),
    "ended": _moment("ended"),
    "checkpoints": _size,
}
