"""Progress on stderr: a moving line on a terminal of any width, lines elsewhere.

In a narrow terminal what matters comes first, and what has no room is left out.

>>> line_text("step 12/80", "0:00:12 left", ["loss 5.310", "4,812 tokens/s"], 0.15, width=40)
'step 12/80  0:00:12 left  loss 5.310'
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.progress import Progress, ProgressColumn, Task, TaskID
from rich.text import Text

from mpctl.render.console import Console, get_console

BAR, SMALLEST_BAR = 24, 8  # columns


class Line(ProgressColumn):
    """The whole line of a task: description, its fields `left` and `parts`, a bar."""

    max_refresh = 0.5  # seconds that a text stands, so that it can be read

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console

    def render(self, task: Task) -> Text:
        """The line of a task, as wide as the terminal."""
        left, parts = task.fields["left"](task), task.fields["parts"]
        share = (task.percentage or 0) / 100
        width = self.console.width
        return Text(line_text(task.description, left, parts, share, width=width), no_wrap=True)


def line_text(head: str, left: str, parts: Sequence[str], share: float, *, width: int) -> str:
    """Head, time left, as many parts as fit, and a bar where all of that leaves room for one."""
    lead = fitted([head, left], width, joint="  ") or head[:width]
    shown = fitted(parts, width - len(lead) - 2)
    room = width - len(lead) - len(shown) - 4
    bar = ""
    if shown == " · ".join(parts) and room >= SMALLEST_BAR:
        columns = min(BAR, room)
        full = round(share * columns)
        bar = "━" * full + "─" * (columns - full)
    return "  ".join(filter(None, (lead, bar, shown)))


def fitted(parts: Sequence[str], room: int, *, joint: str = " · ") -> str:
    """The parts, up to the first that does not fit into `room` characters, joined."""
    text = ""
    for part in parts:
        longer = f"{text}{joint}{part}" if text else part
        if len(longer) > room:
            break
        text = longer
    return text


def clock(seconds: float) -> str:
    """Seconds as hours, minutes and seconds: `0:01:20`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def time_left(task: Task) -> str:
    """`0:01:20 left`, as far as that is known yet."""
    left = task.time_remaining
    return f"{'-:--:--' if left is None else clock(left)} left"


PATIENCE = 1.0  # seconds of work before a bar appears
LINE_SECONDS = 15.0


class TaskBar:
    """Progress on stderr; shown from the first report on that comes `after` so many seconds.

    On a terminal a bar for each stage, with the time left; elsewhere, with `lines`, a line for each
    stage and one every 15 seconds. A stage whose total is 0 has no known end.
    """

    def __init__(self, *, after: float = 0.0, lines: bool = False) -> None:
        self.begins = time.monotonic() + after
        console = get_console(stderr=True)
        self.lines = lines and not console.is_terminal
        self.bar = Progress(Line(console), console=console, disable=not console.is_terminal)
        self.tasks: dict[str, TaskID] = {}
        self.line_time = 0.0

    def __enter__(self) -> TaskBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.bar.stop()

    def stop(self) -> None:
        """Take the bar away: what is printed next stands in its place."""
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
            self._finish()
            self.bar.start()
            self.tasks[stage] = self.bar.add_task(stage, total=total or None, left=_share, parts=[])
        self.bar.update(self.tasks[stage], completed=done, total=total or None)
        if self.lines:
            self._line(self.bar.tasks[self.tasks[stage]], is_new=is_new)

    def note(self, text: str) -> None:
        """Say what is done now within a stage: beside the bars, or with `lines` as a line."""
        for task in self.bar.tasks:
            self.bar.update(task.id, parts=[] if task.finished else [text])
        if self.lines:
            print(text, file=sys.stderr, flush=True)

    def _finish(self) -> None:
        """Stages of unknown length are over when the next one begins."""
        for task in self.bar.tasks:
            if task.total is None:
                self.bar.update(task.id, completed=1, total=1)

    def _line(self, task: Task, *, is_new: bool) -> None:
        now = time.monotonic()
        if is_new or now > self.line_time + LINE_SECONDS:
            self.line_time = now
            share = "" if is_new else f": {_share(task)}"
            print(f"{task.description}{share}", file=sys.stderr, flush=True)


class ProgressView:
    """A bar that begins with the first stage of some work and is stopped however that ends."""

    def __init__(self, bar: TaskBar, stage: str, total: int) -> None:
        self.bar, self.stage, self.total = bar, stage, total

    def __enter__(self) -> Self:
        self.bar.update(self.stage, 0, self.total)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.bar.stop()


def _share(task: Task) -> str:
    """`43 %, 0:00:20 left`; the time so far where the end is not known."""
    if task.finished:
        return f"done in {clock(task.finished_time or 0)}"
    if task.total is None or not task.completed:
        return f"{clock(task.elapsed or 0)} so far"
    return f"{task.percentage:3.0f} %, {time_left(task)}"
