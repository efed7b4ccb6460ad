"""Progress on stderr: a bar with the time left on a terminal, lines elsewhere. stdout is for the
result."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from typing import Self

from rich.console import OverflowMethod
from rich.progress import BarColumn, Progress, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from mpctl.render.console import Console, get_console

PATIENCE = 1.0  # seconds of work before a bar appears
LINE_SECONDS = 15.0
BAR, WIDE = 11, 80  # columns of a bar, and of a terminal that has one


class TimeLeftColumn(TimeRemainingColumn):
    """`0:00:20 left`; for a completed task the time that it took."""

    def render(self, task: Task) -> Text:
        text = super().render(task)
        return text if task.finished else Text.assemble(text, " left")


def progress_bar(console: Console) -> Progress:
    """A line for each task: its description, the time left (or taken), a bar where the terminal is
    wide, and of its field `note` as much as fits. Nothing where the console is no terminal."""
    # the sign of an ellipsis is written as three in ASCII, past the end of the line
    end: OverflowMethod = "crop" if console.options.ascii_only else "ellipsis"
    whole, cut = Column(no_wrap=True), Column(no_wrap=True, overflow=end, ratio=1)
    bar = [BarColumn(BAR, table_column=Column(width=BAR))] if console.width >= WIDE else []
    return Progress(
        TextColumn("{task.description}", markup=False, table_column=whole),
        TimeLeftColumn(elapsed_when_finished=True, table_column=Column(width=12)),
        *bar,
        TextColumn("{task.fields[note]}", markup=False, table_column=cut),
        console=console,
        disable=not console.is_terminal,
        expand=True,
        refresh_per_second=4,
    )


def clock(seconds: float) -> str:
    """Seconds as hours, minutes and seconds: `0:01:20`."""
    return str(timedelta(seconds=round(seconds)))


class TaskBar:
    """Progress of work in several stages that reports (stage, done, total); shown from the first
    report on that comes `after` so many seconds.

    On a terminal a bar for each stage; elsewhere, with `lines`, a line for each stage and one every
    15 seconds. A stage whose total is 0 has no known end.
    """

    def __init__(self, *, after: float = 0.0, lines: bool = False) -> None:
        self.begins = time.monotonic() + after
        console = get_console(stderr=True)
        self.lines = lines and not console.is_terminal
        self.bar = progress_bar(console)
        self.tasks: dict[str, TaskID] = {}
        self.line_time = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Remove the bar: the next output takes its place."""
        self.bar.stop()

    def print(self, line: str) -> None:
        """Print a line above the bar, however long."""
        self.bar.console.print(line, soft_wrap=True)

    def update(self, stage: str, done: int, total: int) -> None:
        """Report that `done` of `total` parts of a stage are done."""
        if time.monotonic() < self.begins:
            return
        is_new = stage not in self.tasks
        if is_new:
            for task in self.bar.tasks:
                if task.total is None:  # a stage of unknown length ends when the next begins
                    self.bar.update(task.id, completed=1, total=1)
            self.bar.start()
            self.tasks[stage] = self.bar.add_task(stage, total=total or None, note="")
        self.bar.update(self.tasks[stage], completed=done, total=total or None)
        if self.lines:
            self._print_line(self.bar.tasks[self.tasks[stage]], is_new=is_new)

    def note(self, text: str) -> None:
        """Show the current work within a stage: after its bar, or with `lines` as a line."""
        for task in self.bar.tasks:
            self.bar.update(task.id, note="" if task.finished else text)
        if self.lines:
            print(text, file=sys.stderr, flush=True)

    def _print_line(self, task: Task, *, is_new: bool) -> None:
        now = time.monotonic()
        if is_new or now > self.line_time + LINE_SECONDS:
            self.line_time = now
            share = "" if is_new else f": {_share(task)}"
            print(f"{task.description}{share}", file=sys.stderr, flush=True)


class ProgressView:
    """A bar that appears with the first stage of some work and is always stopped at its end."""

    def __init__(self, bar: TaskBar, stage: str, total: int) -> None:
        self.bar, self.stage, self.total = bar, stage, total

    def __enter__(self) -> Self:
        self.bar.update(self.stage, 0, self.total)
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()


def _share(task: Task) -> str:
    """`43 %, 0:00:20 left`; the time so far where the end is not known."""
    if task.finished:
        return f"done in {clock(task.finished_time or 0)}"
    if task.total is None or not task.completed:
        return f"{clock(task.elapsed or 0)} so far"
    left = "-:--:--" if task.time_remaining is None else clock(task.time_remaining)
    return f"{task.percentage:3.0f} %, {left} left"
