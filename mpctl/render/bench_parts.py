"""The parts of reports of benches: tables of columns (title, key, format), and lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

Row = Any  # a row of any bench: a mapping, or a pair of a name and a mapping
Style = Literal["head", "passed", "failed", "note", "warning", "refused", "plain"]
HEADS: tuple[Style, ...] = ("head", "passed", "failed")
REHEARSAL = "*"  # marks a layout with more ranks than cores, or GPUs
CHECK = {True: "✓", False: "✗"}


class Column(NamedTuple):
    """key: a row's key, or a function of the row; None is shown as an empty cell. left: words."""

    title: str
    key: str | Callable[[Row], object]
    form: Callable[[Any], str] = str
    left: bool = False

    def text(self, row: Row) -> str:
        """The cell of a row."""
        value = row.get(self.key) if isinstance(self.key, str) else self.key(row)
        return "" if value is None else self.form(value)


class BenchTable(NamedTuple):
    """group: the heading above the rows that share it. keeps_first: never break the first column
    into lines."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Row]
    group: Callable[[Row], str] | None = None
    keeps_first: bool = False

    def cells(self) -> Iterator[tuple[str, ...]]:
        """The cells of each row; a heading is a row of one cell."""
        before = None
        for row in self.rows:
            if self.group is not None and (heading := self.group(row)) != before:
                before = heading
                yield (heading,)
            yield tuple(column.text(row) for column in self.columns)


class BenchLine(NamedTuple):
    """A sentence or a paragraph."""

    text: str
    style: Style = "plain"


Part = BenchTable | BenchLine


def percent(value: float) -> str:
    return f"{value:.0%}"


def signed_error(value: float) -> str:
    return f"{value:+.1%}"


def gigabytes(rate: float) -> str:
    """GB/s: three decimals, or three digits where those would be zeros."""
    rate /= 1e9
    return f"{rate:.3f}" if rate >= 0.0995 else f"{rate:.3g}"


def bandwidth_text(rate: float) -> str:
    return f"{rate / 1e9:.2f} GB/s"
