"""Saves as the launcher sees them: reported when they take long, never cut short while they go on.

A rank that saves writes into its breadcrumb how much it has written so far
(runtime/checkpointing/), alone while training waits for it, otherwise after what else it is doing.
While that text changes the save makes progress, and a stop waits for it however long it takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from mpctl.launch.cluster import Attempt

SAVING = "saving step"
LOOK_SECONDS, REPORT_AFTER, REPORT_EVERY = 0.5, 2.0, 15.0


@dataclass
class SaveMonitor:
    """The saves of one attempt. messages: what the ranks that save say of it, by rank;
    last_progress: when one of them last changed, by `clock`; is_awaited: whether training waits."""

    on_event: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    last_progress: float = float("-inf")
    next_look: float = float("-inf")
    next_report: float = float("inf")
    messages: dict[int, str] = field(default_factory=dict)
    is_awaited: bool = False

    def look(self, attempt: Attempt) -> None:
        """Look at what ranks say, at most every LOOK_SECONDS; report a save that training has to
        wait for and that takes long."""
        now = self.clock()
        if now < self.next_look:
            return
        self.next_look = now + LOOK_SECONDS
        doing = list(attempt.look().doing())
        messages = {rank: message for rank, text in doing if (message := _saving(text))}
        awaited = [text for _, text in doing if text.startswith(SAVING)]
        if not self.is_awaited:
            self.next_report = now + REPORT_AFTER
        if messages and messages != self.messages:
            self.last_progress = now
        self.messages, self.is_awaited = messages, bool(awaited)
        if awaited and now >= self.next_report:
            self.next_report = now + REPORT_EVERY
            self.on_event(max(awaited, key=len))


def _saving(doing: str) -> str:
    """What a breadcrumb says of a save: `saving step 3: 20 MiB of 1 GiB written`; empty without."""
    start = doing.rfind(SAVING)
    return "" if start < 0 else doing[start:]
