"""When a host that was lost may be used again.

A host may come back unfit (a reboot without its mounts, another torch, fewer GPUs) or only for a
moment. It is judged before the ranks of the others are stopped for it. One that was lost for the
n-th time is used again RETURN_SECONDS 2^(n-1) after that, at once after its first loss; one that is
unfit is asked again after as long, counted in refusals. LONGEST_SECONDS is the most.

By hand: lost a second time at t, a host may return at t + 40 s, after a third time at t + 80 s.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

RETURN_SECONDS, LONGEST_SECONDS = 20.0, 1800.0


@dataclass
class ReturnPolicy:
    """The lost hosts of a launch, by node. losses, refusals: how often each was lost and found
    unfit; not_before: when it may be used again, by time.monotonic()."""

    losses: Counter[int] = field(default_factory=Counter)
    refusals: Counter[int] = field(default_factory=Counter)
    not_before: dict[int, float] = field(default_factory=dict)

    def note_loss(self, node: int, now: float) -> float:
        """Count a loss; the seconds for which the host is not used from now on."""
        self.losses[node] += 1
        seconds = _pause(self.losses[node]) if self.losses[node] > 1 else 0.0
        self.not_before[node] = now + seconds
        return seconds

    def note_refusal(self, node: int, now: float) -> float:
        """Count a return as unfit; the seconds after which the host is asked again."""
        self.refusals[node] += 1
        seconds = _pause(self.refusals[node])
        self.not_before[node] = now + seconds
        return seconds

    def may_return(self, node: int, now: float) -> bool:
        """Whether the host may be used now."""
        return now >= self.not_before.get(node, now)


def _pause(times: int) -> float:
    return min(RETURN_SECONDS * 2.0 ** (times - 1), LONGEST_SECONDS)
