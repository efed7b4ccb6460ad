"""Where output goes: a terminal of its own width, a pipe of WIDTH columns; both wrap, neither cuts.

What a stream cannot show of marks, render/marks.py writes in plain letters.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

WIDTH = 100  # of what is not a terminal and has no COLUMNS


def get_console(*, stderr: bool = False, **settings: Any) -> Console:
    """A console of stdout or stderr that highlights nothing and takes no word for markup."""
    console = Console(stderr=stderr, highlight=False, markup=False, emoji=False, **settings)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = WIDTH
    return console


def plain_table(title: str, columns: Iterable[str], *, left: Iterable[str] = ()) -> Table:
    """Columns without lines; what is too wide goes on in the next line, uncut."""
    table = Table(title=title or None, title_justify="left", title_style="bold", box=None,
                  pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))  # fmt: skip
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", overflow="fold")
    return table
