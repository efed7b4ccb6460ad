"""A bar with time left for work of several stages that reports (stage, done, total)."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


class TaskBar:
    """Appears with the first report that comes `after` so many seconds; on stderr; silent where
    nobody watches."""

    def __init__(self, *, after: float = 0.0) -> None:
        self.begins = time.monotonic() + after
        console = Console(stderr=True)
        self.bar = Progress(
            TextColumn("{task.description:<16}"), BarColumn(bar_width=32),
            TextColumn("{task.percentage:>3.0f} %"), TimeRemainingColumn(),
            console=console, disable=not console.is_terminal,
        )  # fmt: skip
        self.tasks: dict[str, TaskID] = {}

    def __enter__(self) -> TaskBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.bar.stop()

    def update(self, stage: str, done: int, total: int) -> None:
        if time.monotonic() < self.begins:
            return
        if stage not in self.tasks:
            self.bar.start()
            self.tasks[stage] = self.bar.add_task(stage, total=total)
        self.bar.update(self.tasks[stage], completed=done, total=total)
