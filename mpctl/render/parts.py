"""Parts of a document, which its terminal output (terminal.py) and its page (page.py) draw.

A document becomes one list of parts by one function, in the file of its name. Both drawers show the
same titles and figures of it: a part that only one of them shows says so (`on`). A folded part is left
out of a terminal without `--full`, and opens in a page.

>>> rows = [{"axis": "tp", "bytes": 2048}]
>>> table = DataTable("Sent", (Column("axis", "axis", left=True), Column("bytes", "bytes", "{:,}".format)), rows)
>>> list(table.cells())
[('tp', '2,048')]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from rich.console import RenderableType

    from mpctl.render.charts import Chart
    from mpctl.render.markup import Raw

Row = Any  # of any document: a mapping, an object, or the cells themselves
Where = Literal["both", "terminal", "page"]
Fold = Literal["no", "terminal", "both"]
"""A table that is folded is left out of a terminal without `--full`; in both, a page has to open it."""
Style = Literal["title", "lead", "head", "passed", "failed", "note", "warning", "refused", "hint", "plain"]
FIRST: tuple[Style, ...] = ("title", "lead", "head", "passed", "failed")  # above everything else


class Column(NamedTuple):
    """key: a row's key or place, or a function of the row; None is shown as an empty cell. left: words.
    is_wide: left out of terminals without `--full`."""

    title: str
    key: str | int | Callable[[Row], object]
    form: Callable[[Any], str] = str
    left: bool = False
    is_wide: bool = False

    def text(self, row: Row) -> str:
        """The cell of a row."""
        value = self.key(row) if callable(self.key) else row[self.key]
        return "" if value is None else self.form(value)


class DataTable(NamedTuple):
    """group: the heading above the rows that share it. whole: how many of the first columns are never
    broken into lines. has_sum: the last row is the total of the others. is_stacked: on a narrow page the
    last column stands below the others."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Row]
    group: Callable[[Row], str] | None = None
    whole: int = 0
    has_sum: bool = False
    is_stacked: bool = False
    fold: Fold = "no"
    on: Where = "both"

    def cells(self) -> Iterator[tuple[str, ...]]:
        """The cells of each row; a heading is a row of one cell."""
        before = None
        for row in self.rows:
            if self.group is not None and (heading := self.group(row)) != before:
                before = heading
                if heading:
                    yield (heading,)
            yield tuple(column.text(row) for column in self.columns)


def table_of(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: Sequence[str] = (), **settings: Any
) -> DataTable:
    """A table of cells that are texts already. left: the columns of words."""
    named = [Column(name, at, left=name in left) for at, name in enumerate(columns)]
    return DataTable(title, named, list(rows), **settings)


class Sentence(NamedTuple):
    """A sentence or a paragraph."""

    text: str
    style: Style = "plain"
    on: Where = "both"


class Facts(NamedTuple):
    """Names and values, a line each."""

    rows: Sequence[tuple[str, str]]
    title: str = ""
    on: Where = "both"


class Figures(NamedTuple):
    """The figures that a reader of a page looks for first, with their names."""

    rows: Sequence[tuple[str, str]]
    on: Where = "page"


class Lines(NamedTuple):
    """Sentences below each other, or lines to be typed, which are never broken."""

    title: str
    lines: Sequence[str]
    are_commands: bool = False
    on: Where = "both"


class Bar(NamedTuple):
    """A bar of shares: its name, their sizes, and its total in words."""

    name: str
    sizes: Sequence[float]
    text: str = ""


class Bars(NamedTuple):
    """Bars of shares on one scale. names: of the shares; whole: the size that fills the width; limit: the
    size at which a line stands. A terminal has the table with the same figures."""

    title: str
    names: Sequence[str]
    bars: Sequence[Bar]
    form: Callable[[float], str]
    whole: float
    limit: float | None = None
    on: Where = "page"


class Picture(NamedTuple):
    """Picture in two forms. drawn: for a page; letters: for a terminal."""

    drawn: Callable[[], Iterable[Raw]] | None = None
    letters: Callable[[], Iterable[RenderableType]] | None = None
    on: Where = "both"


class Section(NamedTuple):
    """Begins a section of a page, and is an empty line of a terminal. key: what links lead to; folded: the
    words that open the section in a page, which shows its title alone; empty: it is open."""

    key: str
    title: str
    folded: str = ""
    on: Where = "both"


Part: TypeAlias = "DataTable | Sentence | Facts | Figures | Lines | Bars | Picture | Section | Chart"
