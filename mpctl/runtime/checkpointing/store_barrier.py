"""Ranks that save wait for each other at the run's key-value store, for as long as one of them
makes progress.

A collective is no barrier for this. NCCL only enqueues an all-reduce, so the host goes on before
its peers have come; and a collective may last `launch.timeout_seconds`, while writing a large
checkpoint takes longer. At the store the host itself waits, and only a save in which no rank has
written anything for `patience` seconds is given up.

The keys of save number n are "n/NAME": whatever is announced, "n/failed" with the reason, and the
counter "n/progress".
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from torch._C._distributed_c10d import Store

from mpctl.errors import RunFailed

PATIENCE = 300.0
SHORTEST, GROWTH, LONGEST = 0.002, 1.2, 0.5  # seconds between two looks at the store
PROGRESS_SECONDS = 0.2
FAILED, PROGRESS = "failed", "progress"


class SaveFailed(RunFailed):
    """A checkpoint could not be written."""


class PeersFailed(SaveFailed):
    """A checkpoint could not be written because of another rank."""

    is_echo = True


@dataclass
class StoreBarrier:
    """A barrier as one rank uses it; every rank calls `begin` once a save.

    store: torch.distributed's, shared by all ranks. patience: seconds without progress after which
    waiting ends. clock and sleep are arguments so that tests need not wait.
    """

    store: Store
    patience: float = PATIENCE
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    number: int = 0
    reported: float = float("-inf")
    announced: dict[int, list[str]] = field(default_factory=dict)

    def begin(self) -> None:
        """Begin the next save. What this rank announced in the one before the last, which no rank
        reads any more, is removed from the store."""
        self.number += 1
        for key in self.announced.pop(self.number - 2, ()):
            self.store.delete_key(key)

    def announce(self, name: str, words: str = "") -> None:
        """Let every rank know that `name` has happened; words: the reason of a failure."""
        self.store.set(self._key(name), words)
        self.announced.setdefault(self.number, []).append(self._key(name))

    def progress(self) -> None:
        """Restart the timeout of all that wait; asks the store a few times a second at most."""
        if self.clock() - self.reported >= PROGRESS_SECONDS:
            self.reported = self.clock()
            self.store.add(self._key(PROGRESS), 1)

    def wait(self, name: str, *, whom: str) -> None:
        """Return once `name` was announced. whom: what is waited for, for the message of an error.

        Raises PeersFailed when a rank announced that it failed, or when patience ran out.
        """
        progress, pause = -1, SHORTEST
        deadline = self.clock() + self.patience
        while not self.store.check([self._key(name)]):
            if self.store.check([self._key(FAILED)]):
                why = self.store.get(self._key(FAILED)).decode(errors="replace")
                raise PeersFailed(f"gave up saving with its peers: {why}")
            now = self.store.add(self._key(PROGRESS), 0)
            if now != progress:
                progress, deadline = now, self.clock() + self.patience
            elif self.clock() > deadline:
                raise PeersFailed(f"saving timed out: no rank wrote anything for {self.patience:g} "
                                  f"s while waiting for {whom}")  # fmt: skip
            self.sleep(pause)
            pause = min(GROWTH * pause, LONGEST)  # at most a fifth longer than was waited so far

    def _key(self, name: str) -> str:
        return f"{self.number}/{name}"
