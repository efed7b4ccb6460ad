"""Assignment of hosts to the plan's nodes as hosts are lost, come back, or should not be used.

Hosts are numbered in the backend's order: at first host i runs node i, and hosts beyond the plan's nodes are spare. A
host that runs a node keeps it: a rank moves only if its host is replaced.

A host may come back unfit (a reboot without its mounts, another torch, fewer GPUs) or only for a
moment: after its n-th loss it is used again RETURN_SECONDS 2^(n-1) later, after the first at once;
an unfit host is asked again after as long, with n its refusals; at most LONGEST_SECONDS. A host
lost a second time at t may return at t + 40 s, after a third time at t + 80 s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

RETURN_SECONDS, LONGEST_SECONDS = 20.0, 1800.0


@dataclass
class ReturnPolicy:
    """The lost hosts of a launch, by number. losses, refusals: how often each was lost and found
    unfit; not_before: when it may be used again, by time.monotonic()."""

    losses: Counter[int] = field(default_factory=Counter)
    refusals: Counter[int] = field(default_factory=Counter)
    not_before: dict[int, float] = field(default_factory=dict)

    def note_loss(self, host: int, now: float) -> float:
        """Count a loss; the seconds for which the host is not used from now on."""
        self.losses[host] += 1
        seconds = _pause(self.losses[host]) if self.losses[host] > 1 else 0.0
        self.not_before[host] = now + seconds
        return seconds

    def note_refusal(self, host: int, now: float) -> float:
        """Count a return as unfit; the seconds after which the host is asked again."""
        self.refusals[host] += 1
        seconds = _pause(self.refusals[host])
        self.not_before[host] = now + seconds
        return seconds

    def may_return(self, host: int, now: float) -> bool:
        return now >= self.not_before.get(host, now)


def _pause(times: int) -> float:
    return min(RETURN_SECONDS * 2.0 ** (times - 1), LONGEST_SECONDS)


@dataclass(frozen=True)
class Placement:
    """The host of each node. assigned: the hosts of the plan's nodes, in their order; absent:
    those of them that an elastic run does without; unwanted: those that are used although they
    should not be, since the run needs them."""

    assigned: tuple[int, ...]
    absent: frozenset[int] = frozenset()
    unwanted: tuple[int, ...] = ()

    @property
    def used(self) -> list[int]:
        """The hosts of the next attempt, in the order of its nodes."""
        return [host for host in self.assigned if host not in self.absent]

    def renewed(self, fit: Collection[int], unwanted: Sequence[int], least: int) -> Placement:
        """The placement for the next attempt. Hosts keep their nodes if they are fit; a fit host
        without a node takes that of one that is not. fit: the hosts to be used; unwanted: further
        ones that could be used, the least unwanted first, of which as many are taken as `least`
        hosts need.

        By hand: 3 nodes and a spare host 3, host 1 is lost: hosts 0, 3, 2. Host 2 is lost, too, and
        1 is back: hosts 0, 3, 1.
        """
        usable, taken = set(fit), list[int]()
        for host in [None, *unwanted]:
            if host is not None:
                usable.add(host)
                taken.append(host)
            free = iter(sorted(usable.difference(self.assigned)))
            assigned = tuple(host if host in usable else next(free, host) for host in self.assigned)
            absent = frozenset(assigned) - usable
            if len(assigned) - len(absent) >= least:
                break
        return Placement(assigned, absent, tuple(host for host in taken if host in assigned))
