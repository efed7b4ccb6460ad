"""Logs on stdout: each entry after the ranks that printed it, or files unchanged."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rich.text import Text

from mpctl.core.units import ranks_text
from mpctl.records.rundir.logs import MergedEntry
from mpctl.render.console import get_console, say

NARROWEST, WIDEST = len("rank 0:"), 24  # columns of the ranks' names


class MergedView:
    """Shows merged entries as they come; the column of the ranks' names widens when needed."""

    def __init__(self) -> None:
        self.console = get_console(soft_wrap=True)
        self.width = NARROWEST
        self.is_empty = True

    def show(self, entry: MergedEntry) -> None:
        """Print an entry: `ranks 0-3: step 1: loss 5.1`, its further lines below its first."""
        name = ranks_text(entry.ranks, most=3) + ":"
        self.width = max(self.width, min(WIDEST, len(name)))
        lead = Text(name.ljust(self.width) + " ", "cyan")
        first, *others = entry.lines
        times = f" ({entry.repeats:,} times)" if entry.repeats > 1 else ""
        self.console.print(Text.assemble(lead, first, (times, "dim")))
        for line in others:
            self.console.print(Text(" " * (self.width + 1) + line))
        self.is_empty = False

    def end(self) -> None:
        """Say so when there was nothing to show."""
        if self.is_empty:
            say("no rank has printed anything", stderr=True)


class FileView:
    """Shows lines of files as they are; with_headings: under the file's path in the run, where it
    is not the file of the lines before."""

    def __init__(self, run: Path, *, with_headings: bool) -> None:
        self.run, self.with_headings = run, with_headings
        self.path: Path | None = None
        self.is_empty = True

    def show(self, path: Path, lines: Iterable[str]) -> None:
        """Print lines of a file."""
        for line in lines:
            if self.with_headings and path != self.path:
                gap = "" if self.path is None else "\n"
                say(f"{gap}==> {path.relative_to(self.run)} <==")
            self.path, self.is_empty = path, False
            say(line)

    def end(self) -> None:
        """Say so when there was nothing to show."""
        if self.is_empty:
            say("nothing has been logged", stderr=True)
