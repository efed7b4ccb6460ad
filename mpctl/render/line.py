"""A moving line on a terminal of any width: what matters comes first, what has no room is left out.

>>> line_text("step 12/80", "0:00:12 left", ["loss 5.310", "4,812 tokens/s"], 0.15, width=40)
'step 12/80  0:00:12 left  loss 5.310'
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.progress import ProgressColumn, Task
from rich.text import Text

from mpctl.render.console import Console

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
