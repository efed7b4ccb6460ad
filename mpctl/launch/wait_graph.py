"""Which rank the others wait for, from what every rank logs about its collectives.

A rank that waits for collective n of a group waits for the members that have not started n; where
all have started it, for those that have not finished it and do not wait in it themselves. These
edges form a graph. Whoever is at its end, waited for and waiting for nobody, holds up the rest: one
stopped rank of a tp group makes its peers wait in tp, the next stages wait for their messages and
the replicas wait in dp. A graph without an end is a circle of ranks that wait for each other.

On a GPU a collective is only put into a queue, and the host does not wait in it: there a rank
counts as waiting in the groups whose last collective other members have not started.

By hand, tp (0, 1) and (2, 3), dp (0, 2) and (1, 3): rank 3 is stopped. Rank 2 waits for 3 in tp,
rank 1 for 3 in dp, rank 0 for 1 in tp. The end is 3, waited for in tp by 2 and in dp by 1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mpctl.rundir.collective_log import CollectiveProgress, GroupProgress, Ranks

Progress = Mapping[int, CollectiveProgress]


@dataclass(frozen=True)
class Wait:
    """Rank `rank` waits for collective `number` of a group. group: as this rank logs it; blockers:
    the ranks that it waits for; have_started: they have started it and not come to its end."""

    rank: int
    group: GroupProgress
    number: int
    blockers: tuple[int, ...]
    have_started: bool = False

    @property
    def key(self) -> tuple[tuple[str, str], int]:
        """What identifies the collective on all ranks of the group."""
        return self.group.key, self.number


@dataclass(frozen=True)
class WaitGraph:
    """The waits of all ranks, by the rank that waits."""

    waits: Mapping[int, Sequence[Wait]]

    @property
    def ends(self) -> list[int]:
        """The ranks that others wait for and that do not wait themselves."""
        blockers = {rank for waits in self.waits.values() for w in waits for rank in w.blockers}
        return sorted(blockers - self.waits.keys())

    def waits_for(self, rank: int) -> list[Wait]:
        """The waits of which a rank is a blocker, in order of the ranks that wait."""
        everyone = (wait for _, waits in sorted(self.waits.items()) for wait in waits)
        return [wait for wait in everyone if rank in wait.blockers]

    def circle(self) -> list[Wait]:
        """Waits of which each is for the rank of the next one, and the last for the first; empty
        where following the first blockers from any rank comes to an end."""
        follow = {
            rank: wait
            for rank, waits in self.waits.items()
            if (wait := next((w for w in waits if w.blockers), None))
        }
        for start in sorted(follow):
            path, rank = [], start
            while rank in follow and rank not in path:
                path.append(rank)
                rank = follow[rank].blockers[0]
            if rank in path:
                return [follow[r] for r in path[path.index(rank) :]]
        return []


def wait_graph(progress: Progress, *, queued: bool = False) -> WaitGraph:
    """The graph of all ranks' waits. progress: by rank, empty for a rank that has left no log;
    queued: collectives run on GPUs."""
    groups = _Groups(progress)
    waits: dict[int, list[Wait]] = {}
    for rank, state in progress.items():
        own = list(groups.waits_of(rank, state, queued=queued))
        if own:
            waits[rank] = own
    return WaitGraph(waits)


class _Groups:
    """What all members of each group have logged about it, by the group's key and rank."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.logs: dict[tuple[str, str], dict[int, GroupProgress]] = defaultdict(dict)
        for rank, state in progress.items():
            for group in state.groups:
                self.logs[group.key][rank] = group
        self.late: dict[tuple[tuple[str, str], int], tuple[int, ...]] = {}
        self.behind: dict[tuple[tuple[str, str], int], tuple[int, ...]] = {}

    def waits_of(self, rank: int, state: CollectiveProgress, *, queued: bool) -> Iterator[Wait]:
        """What a rank waits for, with its blockers."""
        if state.waits_in is not None:
            group, number = state.waits_in, state.number
            if late := self.not_started(group, number):
                yield Wait(rank, group, number, late)
            else:
                yield Wait(rank, group, number, self.elsewhere(group, number), True)
        elif queued:
            for group in state.groups:
                if late := self.not_started(group, group.started):
                    yield Wait(rank, group, group.started, late)

    def not_started(self, group: GroupProgress, number: int) -> tuple[int, ...]:
        """The members that have not started collective `number`."""
        key, logs = (group.key, number), self.logs[group.key]
        if key not in self.late:
            self.late[key] = tuple(
                r for r in _ranks(group) if r not in logs or logs[r].started < number
            )
        return self.late[key]

    def elsewhere(self, group: GroupProgress, number: int) -> tuple[int, ...]:
        """The members that have started collective `number`, have not finished it and do something
        else: through shared memory only a rank that waits serves its peers."""
        key, logs = (group.key, number), self.logs[group.key]
        if key not in self.behind:
            self.behind[key] = tuple(
                r
                for r in _ranks(group)
                if logs[r].finished < number and not self._waits_in(r, group)
            )
        return self.behind[key]

    def _waits_in(self, rank: int, group: GroupProgress) -> bool:
        waits = self.progress[rank].waits_in
        return waits is not None and waits.key == group.key


def _ranks(group: GroupProgress) -> Ranks:
    try:
        return group.ranks
    except ValueError:  # no rank of mpctl wrote it
        return ()
