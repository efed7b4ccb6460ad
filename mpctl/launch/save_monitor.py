"""Saves as the launcher sees them: told when they take long, and never cut short while they go on.

A rank that saves writes into its trail what it has written so far (runtime/checkpointing/saver.py).
While these words change, a checkpoint is coming, and a stop waits for it however long it takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from mpctl.rundir.directory import RunDir

SAVING = "saving step"
LOOK_SECONDS, TELL_AFTER, TELL_EVERY = 0.5, 2.0, 15.0


@dataclass
class SaveMonitor:
    """The saves of one attempt. moved: when a rank last said that it got on with one, by clock."""

    run: RunDir
    world_size: int
    on_event: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    moved: float = float("-inf")
    next_look: float = float("-inf")
    next_told: float = float("inf")
    words: dict[int, str] = field(default_factory=dict)

    def look(self) -> None:
        """Read what the ranks say, twice a second at most."""
        now = self.clock()
        if now < self.next_look:
            return
        self.next_look = now + LOOK_SECONDS
        said = {rank: self.run.doing(rank) for rank in range(self.world_size)}
        words = {rank: text for rank, text in said.items() if text.startswith(SAVING)}
        if not self.words:
            self.next_told = now + TELL_AFTER
        if words and words != self.words:
            self.moved = now
        self.words = words
        if words and now >= self.next_told:
            self.next_told = now + TELL_EVERY
            self.on_event(max(words.values(), key=len))
