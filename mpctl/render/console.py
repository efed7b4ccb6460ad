"""Where output goes: a terminal of its own width, a pipe of WIDTH columns; both wrap, neither cuts.

What a stream cannot show of marks, render/marks.py writes in plain letters. Paths, job strings, log
lines and exceptions come from outside, and may hold characters that move a terminal's cursor, hide
text or retitle its window: every console here leaves them out.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from rich import console as rich_console
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

WIDTH = 100  # of what is not a terminal and has no COLUMNS

# C0 but tab and newline, DEL, C1: ESC and CSI begin what a terminal obeys.
CONTROLS = dict.fromkeys({*range(0x20), *range(0x7F, 0xA0)} - {9, 10})


def visible(text: str) -> str:
    """The text without control characters: `a\\x1b[31mb` -> `a[31mb`; newlines and tabs stay."""
    return text if text.isprintable() else text.translate(CONTROLS)


class Console(rich_console.Console):
    """rich's console, which writes no control characters that stand in what is printed."""

    def render(
        self, renderable: rich_console.RenderableType,
        options: rich_console.ConsoleOptions | None = None,
    ) -> Iterable[Segment]:  # fmt: skip
        """The text's segments without control characters but those of rich itself."""
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control or text.isprintable() else Segment(visible(text), style)


class NamedRows:
    """Names and values in two columns; a long value goes on below its beginning.

    Lines end with their last letter: rich's own tables fill each up with spaces.
    """

    def __init__(self, rows: Iterable[tuple[str | Text, str]]) -> None:
        self.grid = Table.grid(padding=(0, 2))
        self.grid.add_column(style="dim", no_wrap=True)
        self.grid.add_column(overflow="fold")
        for name, value in rows:
            self.grid.add_row(Text(name) if isinstance(name, str) else name, Text(value))

    def __rich_console__(
        self, console: rich_console.Console, options: rich_console.ConsoleOptions
    ) -> Iterator[Segment]:
        for line in console.render_lines(self.grid, options, pad=False):
            while line and not line[-1].text.strip():
                line.pop()
            if line:
                yield from line[:-1]
                yield Segment(line[-1].text.rstrip(), line[-1].style)
            yield Segment.line()


def say(text: str, *, stderr: bool = False) -> None:
    """Print a line as it is, neither wrapped nor coloured, without control characters."""
    print(visible(text), file=sys.stderr if stderr else sys.stdout, flush=stderr)


def get_console(*, stderr: bool = False, **settings: Any) -> Console:
    """A console of stdout or stderr that highlights nothing and takes no word for markup."""
    console = Console(stderr=stderr, highlight=False, markup=False, emoji=False, **settings)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = WIDTH
    return console


def plain_table(title: str, columns: Iterable[str], *, left: Iterable[str] = ()) -> Table:
    """A table without rules; a cell too wide for its column goes on in the next line.

    left: the columns of words, aligned to the left; the others hold numbers.
    """
    table = Table(title=title or None, title_justify="left", title_style="bold", box=None,
                  pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))  # fmt: skip
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", overflow="fold")
    return table
