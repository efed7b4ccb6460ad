"""How often a bench repeats: in rounds of all its cases, A B C A B C, within a time budget.

Interleaved rounds spread what else happens on the machine over all cases alike. A round begins only
if one as long as the longest so far would end within the budget; the first always begins.

By hand, a budget of 10 s and rounds of 4 s: two rounds, since the third would end after 12 s.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field


@dataclass
class Budget:
    """seconds: that all rounds together may take, None for no limit; clock: seconds that go by;
    longest: seconds of the longest round so far."""

    seconds: float | None = None
    clock: Callable[[], float] = time.monotonic
    began: float = field(init=False)
    longest: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.began = self.clock()

    @property
    def left(self) -> float | None:
        """Seconds that are left, at least 0; None where there is no limit."""
        return None if self.seconds is None else max(self.began + self.seconds - self.clock(), 0.0)

    def rounds(self, most: int) -> Iterator[int]:
        """The numbers of the rounds from 0 on: at most so many, as long as time is left."""
        for number in range(most):
            left = self.left
            if number and left is not None and left < self.longest:
                return
            began = self.clock()
            yield number
            self.longest = max(self.longest, self.clock() - began)

    def likely(self, number: int, most: int) -> int:
        """How many rounds there will be, as far as round `number`, which begins now, can tell: all
        of `most` where there is no limit, or no round before it."""
        left = self.left
        if left is None or not self.longest:
            return most
        return min(most, number + max(1, int(left / self.longest)))
