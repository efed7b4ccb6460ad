"""How long ranks wait in a collective, from one look at their logs to the next.

A rank that is in the same wait at every look for `launch.timeout_seconds` is hung: the launcher
judges then, RANK_MARGIN_SECONDS before the rank would give up by itself (spec/launch.py). A rank
that computes for long is never hung by itself, whatever it does (a compilation, a first batch, a
validation); only those that wait for it are.

Time is counted between looks, and of each pause at most LONGEST_PAUSE: while this process is
stopped or the machine sleeps, no patience is used up.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from mpctl.launch.attempt import AttemptState, RankState
from mpctl.launch.verdict import HangEvidence, ProcessView, Verdict, judge
from mpctl.rundir.collective_log import CollectiveProgress

LONGEST_PAUSE = 2.0


class CollectiveWatch:
    """The waits of all ranks of an attempt. limit: seconds that a rank may wait; queued:
    collectives run on GPUs, where the host does not wait in them."""

    def __init__(self, limit: float, *, queued: bool) -> None:
        self.limit, self.queued = limit, queued
        self.signs: dict[int, Hashable] = {}
        self.waited: dict[int, float] = {}
        self.before: Mapping[int, RankState] = {}
        self.processes: dict[int, ProcessView] = {}

    def look(self, state: AttemptState, elapsed: float) -> Verdict | None:
        """The verdict once a rank has waited too long. elapsed: seconds since the last look."""
        elapsed = min(elapsed, LONGEST_PAUSE)
        ranks = state.ranks
        for rank, seen in ranks.items():
            self._count(rank, seen.breadcrumb.collectives, elapsed)
        self.processes = {
            rank: _process_view(seen, self.before.get(rank, seen), elapsed)
            for rank, seen in ranks.items()
        }
        self.before = ranks
        if max(self.waited.values(), default=0.0) < self.limit:
            return None
        return self.judge(state, {})

    def judge(self, state: AttemptState, stacks: Mapping[int, str]) -> Verdict | None:
        """Who is at fault. stacks: where ranks are, by rank."""
        evidence = HangEvidence(state.collectives(), self.processes, stacks, self.queued)
        return judge(evidence, max(self.waited.values(), default=0.0))

    def _count(self, rank: int, progress: CollectiveProgress, elapsed: float) -> None:
        sign = self._sign(progress)
        is_same = sign is not None and sign == self.signs.get(rank)
        self.waited[rank] = self.waited.get(rank, 0.0) + elapsed if is_same else 0.0
        self.signs[rank] = sign

    def _sign(self, progress: CollectiveProgress) -> Hashable:
        """What stays the same while a rank waits; None while it does not."""
        if progress.waits_in is not None:
            return progress.waits_in.key, progress.number
        return progress.groups if self.queued and progress.groups else None


def _process_view(now: RankState, before: RankState, elapsed: float) -> ProcessView:
    seconds = max(elapsed, 1e-3)
    return ProcessView(
        now.process,
        (now.major_faults - before.major_faults) / seconds,
        now.swapped_bytes,
        (now.processor_seconds - before.processor_seconds) / seconds,
    )
