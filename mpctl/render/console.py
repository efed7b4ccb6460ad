"""Consoles for output: as wide as the terminal, or WIDTH columns in a pipe; lines are wrapped.

Marks that a stream cannot encode are written as plain letters (render/output.py). Paths, job
strings, log lines and exceptions come from outside, and may hold characters that move a terminal's
cursor, hide text or retitle its window: every console here leaves them out.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from rich import console as rich_console
from rich.cells import cell_len
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

GUTTER, LEAST_WORDS = 2, 12  # columns between those of a table; least width of a column of words
WIDTH = 100  # columns where stdout is not a terminal and COLUMNS is not set

# C0 but tab and newline, DEL, C1: ESC and CSI begin what a terminal obeys.
CONTROLS = dict.fromkeys({*range(0x20), *range(0x7F, 0xA0)} - {9, 10})


# A number and its unit stay on one line: while lines are broken, this stands for the space.
GLUE = "\ue000"
UNIT = re.compile(r"(?<=[0-9]) (?=(?:[KMGTP]i?B(?:/s)?|B|[µm]?s|min|h|%|[MGTP]?FLOP/s)(?![\w/]))", re.ASCII)


def glued(renderable: Any) -> Any:
    """A text in which a number and its unit are one word; anything else is unchanged."""
    if isinstance(renderable, str):
        return UNIT.sub(GLUE, renderable)
    if isinstance(renderable, Text) and UNIT.search(renderable.plain):
        renderable = renderable.copy()
        renderable.plain = UNIT.sub(GLUE, renderable.plain)
    return renderable


def visible(text: str) -> str:
    """The text without control characters: `a\\x1b[31mb` -> `a[31mb`; newlines and tabs stay."""
    return text if text.isprintable() else text.translate(CONTROLS)


class Console(rich_console.Console):
    """rich's console, without control characters from the printed text."""

    def render(
        self, renderable: rich_console.RenderableType, options: rich_console.ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """The text's segments without control characters but those of rich itself; a number and
        its unit are never parted."""
        for segment in super().render(glued(renderable), options):
            text, style, control = segment
            if control or text.isprintable():
                yield segment
            else:
                yield Segment(visible(text.replace(GLUE, " ")), style)


class NamedRows:
    """Names and values in two columns; a long value continues below its beginning."""

    def __init__(self, rows: Iterable[tuple[str | Text, str]]) -> None:
        self.grid = Table.grid(padding=(0, 2))
        self.grid.add_column(style="dim", no_wrap=True)
        self.grid.add_column(overflow="fold")
        for name, value in rows:
            self.grid.add_row(Text(name) if isinstance(name, str) else name, Text(value))

    def __rich_console__(
        self, console: rich_console.Console, options: rich_console.ConsoleOptions
    ) -> Iterator[Segment]:
        yield from trimmed(console.render_lines(self.grid, options, pad=False))


def trimmed(lines: Iterable[list[Segment]]) -> Iterator[Segment]:
    """The lines up to their last letters: rich's own tables fill each up with spaces."""
    for line in lines:
        while line and not line[-1].text.strip():
            line.pop()
        if line:
            yield from line[:-1]
            yield Segment(line[-1].text.rstrip(), line[-1].style)
        yield Segment.line()


def say(text: str, *, stderr: bool = False) -> None:
    """Print a line, neither wrapped nor coloured, without control characters."""
    print(visible(text), file=sys.stderr if stderr else sys.stdout, flush=stderr)


def get_console(*, stderr: bool = False, **settings: Any) -> Console:
    """A console on stdout or stderr without highlighting and markup."""
    console = Console(stderr=stderr, highlight=False, markup=False, emoji=False, **settings)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = WIDTH
    return console


class FoldingTable(Table):
    """A table that never breaks numbers: if its columns are too wide, headings are wrapped, then words,
    then columns move together; if that is not enough, each row is written as a list."""

    def __rich_console__(
        self, console: rich_console.Console, options: rich_console.ConsoleOptions
    ) -> rich_console.RenderResult:
        cells = [[_plain(cell) for cell in column._cells] for column in self.columns]
        heads = [_plain(column.header) for column in self.columns]
        of_cells = [max(map(cell_len, column), default=0) for column in cells]
        gaps = GUTTER * (len(cells) - 1)
        if sum(map(max, of_cells, map(cell_len, heads))) + gaps > options.max_width:
            least = 0
            for column, head, size in zip(self.columns, heads, of_cells, strict=True):
                word = max(map(cell_len, head.split()), default=0)
                if column.justify == "right":
                    column.width = max(size, word)
                needed = max(size, word)
                least += needed if column.no_wrap or column.width else min(needed, LEAST_WORDS)
            if least + gaps > options.max_width:
                self.padding, gaps = (0, 1, 0, 0), len(cells) - 1
            if least + gaps > options.max_width:
                yield from self._as_lists(heads, cells, options.max_width)
                return
        drawn = super().__rich_console__(console, options)
        yield from trimmed(Segment.split_lines(part for part in drawn if isinstance(part, Segment)))

    def _as_lists(self, heads: list[str], cells: list[list[str]], width: int) -> Iterator[rich_console.RenderableType]:
        for row in zip(*cells, strict=True):
            lines = [""]
            for head, cell in zip(heads, row, strict=True):
                item = f"{head} {cell}".strip() if cell else ""
                if lines[-1] and cell_len(lines[-1]) + cell_len(item) + GUTTER > width:
                    lines.append("")
                lines[-1] += f"{'  ' if lines[-1] and item else ''}{item}"
            yield Text("\n  ".join(lines))


def _plain(renderable: Any) -> str:
    return renderable.plain if isinstance(renderable, Text) else str(renderable)


MARKS = {"✓": "bold green", "✗": "bold red", "!": "bold yellow", "→": "cyan"}


def marked(mark: str, *words: str | tuple[str, str]) -> Text:
    """A line after a mark in its colour: `✗ it failed`. words: texts, or texts and styles."""
    return Text.assemble((f"{mark} ", MARKS[mark]), *words)


def plain_table(columns: Iterable[str], *, left: Iterable[str] = (), whole: int = 0) -> Table:
    """A table without rules and rows; words too wide for their column are wrapped.

    left: the columns of words, aligned to the left; the others hold numbers. whole: how many of the
    first columns are never broken into lines.
    """
    table = FoldingTable(box=None, pad_edge=False, header_style="dim", padding=(0, GUTTER, 0, 0))
    for at, column in enumerate(columns):
        table.add_column(column, justify="left" if column in left else "right", overflow="fold", no_wrap=at < whole)
    return table
