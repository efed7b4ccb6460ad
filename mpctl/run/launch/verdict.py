"""Find why ranks wait: which rank did not join a collective, and what it does instead.

A pure function of what every rank has logged (records/rundir/collective_log.py), of what its host sees of
its process and of its Python stack:

    did not join all_reduce #1234 (16.0 MiB) of group tp (ranks 2-3), in which rank 2 has waited
    for 12 s: its process is stopped (SIGSTOP, or a debugger)

The rank at fault is found by a graph of waits. A rank that waits for collective n of a group waits
for the members that have not started n; where all have started it, for those that have not finished
it and do not wait in it themselves. Whoever is at the end of these edges, waited for and waiting
for nobody, holds up the rest: one stopped rank of a tp group makes its peers wait in tp, the next
stages wait for their messages and the replicas wait in dp_cp. A graph without an end is a circle of
ranks that wait for each other. On a GPU a collective is only put into a queue, and the host does
not wait in it: there a rank counts as waiting in the groups whose last collective other members
have not started.

Example: tp (0, 1) and (2, 3), dp_cp (0, 2) and (1, 3), and rank 3 is stopped. Rank 2 waits for 3
in tp, rank 1 for 3 in dp_cp, rank 0 for 1 in tp. The end is 3, waited for in tp by 2 and in dp_cp
by 1.

Where a collective timed out on NCCL, torch's watchdog writes to the log of a rank which collective
of which process group did not end and how far the rank was, and aborts the process, so that no
exception is recorded. Lines of torch 2.5 and of 2.7 on (the file ProcessGroupNCCL.cpp of torch
writes them; the group's description is what `new_group` got):

    [rank2]:[E321 ... ProcessGroupNCCL.cpp:607] [Rank 2] Watchdog caught collective operation
        timeout: WorkNCCL(SeqNum=78, OpType=ALLREDUCE, ...) ran for 600027 milliseconds ...
    [rank2]:[E321 ... ProcessGroupNCCL.cpp:1664] [PG 1 Rank 0] Exception (either an error or
        timeout) detected by watchdog at work: 78, last enqueued NCCL work: 79, ...
    [rank2]:[E810 ... ProcessGroupNCCL.cpp:2241] [PG ID 1 PG GUID 5(tp 2-3) Rank 0]  failure
        detected by watchdog at work sequence id: 78 PG status: last enqueued work: 79, ...

mpctl describes its groups as `tp 2-3` (records/rundir/collective_log.py), so that the members are known.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mpctl.core.units import bytes_text, ranks_text
from mpctl.records.rundir.collective_log import RANGES, CollectiveProgress, GroupProgress, Ranks, parse_rank_ranges
from mpctl.run.launch.attempt import STOPPED

Progress = Mapping[int, CollectiveProgress]
ENDED_STATES = ("zombie", "dead", "")
ENDED, HALTED, RUNNING = range(3)
SHOWN_RANKS = 8
COMPUTING = 0.2
"""The share of a processor above which a process counts as computing, even if it sleeps when it is
sampled."""
SWAPPING_FAULTS = 50.0
"""Major page faults a second above which a process counts as being swapped in: each is a read of
some 4 KiB to 128 KiB from a disk."""
WATCHDOG = "Watchdog caught collective operation timeout"
DEFAULT = "default_pg"
"""torch's description of the group of all ranks."""
OPERATION = re.compile(rf"{WATCHDOG}: WorkNCCL\(SeqNum=(\d+), OpType=(\w+)")
STATUS = re.compile(
    r"\[PG (?:ID )?(?P<id>\w+)(?: PG GUID \w+(?:\((?P<description>[^)]*)\))?)? Rank \d+\]"
    r".{0,80}? by watchdog at work(?: sequence id)?: (?P<work>\d+)(?:,| PG status:)"
    r" last enqueued (?:NCCL )?work: (?P<enqueued>-?\d+)"
)


@dataclass(frozen=True)
class Wait:
    """Rank `rank` waits for collective `number` of a group. group: as this rank logs it; blockers:
    the ranks that it waits for; have_started: whether they have started it without finishing."""

    rank: int
    group: GroupProgress
    number: int
    blockers: tuple[int, ...]
    have_started: bool = False

    @property
    def key(self) -> tuple[tuple[str, str], int]:
        """Key of the collective, equal on all ranks of the group."""
        return self.group.key, self.number


class WaitGraph:
    """The waits of all ranks, by the rank that waits. progress: by rank, empty for a rank that has
    left no log; queued: collectives run on GPUs."""

    def __init__(self, progress: Progress, *, queued: bool = False) -> None:
        self.progress = progress
        # What all members of each group have logged about it, by the group's key and rank.
        self.logs: dict[tuple[str, str], dict[int, GroupProgress]] = defaultdict(dict)
        for rank, state in progress.items():
            for group in state.groups:
                self.logs[group.key][rank] = group
        self.late: dict[tuple[tuple[str, str], int], tuple[int, ...]] = {}
        self.behind: dict[tuple[tuple[str, str], int], tuple[int, ...]] = {}
        found = {rank: [*self._waits_of(rank, s, queued)] for rank, s in progress.items()}
        self.waits = {rank: waits for rank, waits in found.items() if waits}

    @property
    def ends(self) -> list[int]:
        """The ranks that others wait for and that do not wait themselves."""
        blockers = {rank for waits in self.waits.values() for w in waits for rank in w.blockers}
        return sorted(blockers - self.waits.keys())

    def waits_for(self, rank: int) -> list[Wait]:
        """The waits in which a rank is a blocker, in order of the ranks that wait."""
        everyone = (wait for _, waits in sorted(self.waits.items()) for wait in waits)
        return [wait for wait in everyone if rank in wait.blockers]

    def circle(self) -> list[Wait]:
        """A cycle of waits: each is for the rank of the next one, the last for the first. Empty
        where following the first blockers from any rank ends."""
        follow = {
            rank: wait for rank, waits in self.waits.items() if (wait := next((w for w in waits if w.blockers), None))
        }
        for start in sorted(follow):
            path, rank = [], start
            while rank in follow and rank not in path:
                path.append(rank)
                rank = follow[rank].blockers[0]
            if rank in path:
                return [follow[r] for r in path[path.index(rank) :]]
        return []

    def missed_by(self, rank: int, seconds: float | None = None) -> str:
        """Return `did not join all_reduce #12 (4.0 KiB) of group tp (ranks 2-3), in which rank 2 waits`; empty if
        nobody waits for the rank. seconds: for which the others have waited."""
        waits = self.waits_for(rank)
        if not waits:
            return ""
        first = waits[0]
        waiting = [wait.rank for wait in waits if wait.key == first.key]
        several = len(waiting) > 1
        verb = "wait" if several else "waits"
        if seconds is not None:
            verb = f"{'have' if several else 'has'} waited for {seconds:.0f} s"
        joined, where = "did not join", "in which"
        if first.group.kind == "send":
            joined = "did not send" if first.group.ranks[0] == rank else "did not receive"
            where = "for which"
        if first.have_started:
            joined = "joined and did not finish"
        return f"{joined} {describe(first)}, {where} {ranks_text(waiting)} {verb}"

    def _waits_of(self, rank: int, state: CollectiveProgress, queued: bool) -> Iterator[Wait]:
        if state.waits_in is not None:
            group, number = state.waits_in, state.number
            if late := self._not_started(group, number):
                yield Wait(rank, group, number, late)
            else:
                yield Wait(rank, group, number, self._elsewhere(group, number), True)
        elif queued:
            for group in state.groups:
                if late := self._not_started(group, group.started):
                    yield Wait(rank, group, group.started, late)

    def _not_started(self, group: GroupProgress, number: int) -> tuple[int, ...]:
        """The members that have not started collective `number`."""
        key, logs = (group.key, number), self.logs[group.key]
        if key not in self.late:
            self.late[key] = tuple(r for r in _ranks(group) if r not in logs or logs[r].started < number)
        return self.late[key]

    def _elsewhere(self, group: GroupProgress, number: int) -> tuple[int, ...]:
        """The members that have started collective `number`, have not finished it and do something
        else: through shared memory only a rank that waits serves its peers."""
        key, logs = (group.key, number), self.logs[group.key]
        if key not in self.behind:
            self.behind[key] = tuple(
                rank
                for rank in _ranks(group)
                if logs[rank].finished < number
                and ((waits := self.progress[rank].waits_in) is None or waits.key != group.key)
            )
        return self.behind[key]


def _ranks(group: GroupProgress) -> Ranks:
    try:
        return group.ranks
    except ValueError:  # no rank of mpctl wrote it
        return ()


@dataclass(frozen=True)
class ProcessView:
    """State of a rank's process as its host sees it.

    state: by psutil's name, empty when there is no process; faults_a_second: major page faults, each of which waits for
    a disk; swapped_bytes: of its memory in swap space; processor: share of one processor used lately, 1.0 for a process
    that computes all the time.
    """

    state: str = "running"
    faults_a_second: float = 0.0
    swapped_bytes: int = 0
    processor: float = 0.0


@dataclass(frozen=True)
class Verdict:
    """Rank at fault. rank: None if no single rank is; error: the sentence, without the rank."""

    rank: int | None
    error: str


def hang_verdict(
    graph: WaitGraph, processes: Mapping[int, ProcessView], stacks: Mapping[int, str], seconds: float
) -> Verdict | None:
    """Find why ranks have waited for so many seconds; None if no rank waits for another. processes, stacks: by rank; a
    stack is one line."""
    if not graph.waits:
        return None
    if ends := graph.ends:
        rank = min(ends, key=lambda r: (_likelihood(processes.get(r)), r))
        condition = _condition(processes.get(rank, ProcessView()), stacks.get(rank, ""))
        return Verdict(rank, f"{graph.missed_by(rank, seconds)}: {condition}")
    if circle := graph.circle():
        parts = [f"rank {wait.rank} in {describe(wait)}" for wait in circle[:SHOWN_RANKS]]
        return Verdict(
            None,
            f"{ranks_text([wait.rank for wait in circle])} wait for each other: "
            f"{', '.join(parts)}; ranks must start their collectives in one order",
        )
    return _without_blockers(graph, processes, stacks)


def ended_verdict(graph: WaitGraph) -> Verdict | None:
    """Find the rank that held up the others when their time-outs ended an attempt, by the logs of the ranks; None if
    they name no single rank."""
    if len(graph.ends) != 1:
        return None
    rank = graph.ends[0]
    return Verdict(rank, f"{graph.missed_by(rank)}; the others timed out")


def _likelihood(process: ProcessView | None) -> int:
    """Return the sort key of a suspect: ended first, then stopped, then running."""
    if process is None:
        return RUNNING
    if process.state in ENDED_STATES:
        return ENDED
    return HALTED if process.state in STOPPED else RUNNING


def describe(wait: Wait) -> str:
    """`all_reduce #12 (4.0 KiB) of group tp (ranks 2-3)`, `message #7 from rank 0 to rank 2`."""
    group = wait.group
    size = f" ({bytes_text(group.bytes)})" if wait.number == group.started else ""
    ranks = list(group.ranks)
    if group.kind == "send":
        message = f"message #{wait.number}{size} of group {group.name}"
        return f"{message} from rank {ranks[0]} to rank {ranks[-1]}"
    kind = group.kind if wait.number == group.started else "collective"
    return f"{kind} #{wait.number}{size} of group {group.name} ({ranks_text(ranks)})"


def _condition(process: ProcessView, stack: str) -> str:
    """Describe the activity of a rank while others wait for it."""
    if process.state in STOPPED:
        return "its process is stopped (SIGSTOP, or a debugger)"
    if process.state in ENDED_STATES:
        return "its process has ended"
    where = f"; it is at {stack}" if stack else ""
    if process.faults_a_second > SWAPPING_FAULTS:
        swapped = f", {bytes_text(process.swapped_bytes)} of it in swap space"
        return (
            "its memory is being read back from disk "
            f"({process.faults_a_second:.0f} major page faults a second"
            f"{swapped if process.swapped_bytes else ''}): the host is short of memory{where}"
        )
    if process.state == "disk-sleep":
        return (
            "its process is in an uninterruptible system call (state D: a disk, a network file "
            f"system or a driver that does not answer){where}"
        )
    if process.state == "running" or process.processor > COMPUTING:  # or waits for a processor
        return f"it computes{where}"
    idle = "it neither computes nor waits in a collective"
    return f"{idle}{where}" if stack else f"{idle} (state '{process.state}')"


def _without_blockers(graph: WaitGraph, processes: Mapping[int, ProcessView], stacks: Mapping[int, str]) -> Verdict:
    """All ranks of a group wait in the same collective and none gets through."""
    first = graph.waits[min(graph.waits)][0]
    kinds: dict[str, list[int]] = {}
    for rank in first.group.ranks:
        log = graph.logs[first.group.key].get(rank)
        if log is not None and log.started == first.number:  # the last that it started
            kinds.setdefault(f"{log.kind} of {bytes_text(log.bytes)}", []).append(rank)
    if len(kinds) > 1:
        parts = [f"{ranks_text(ranks)} {what}" for what, ranks in sorted(kinds.items())]
        return Verdict(
            None,
            f"ranks of group {first.group.name} started different collectives as number "
            f"{first.number}: {', '.join(parts)}",
        )
    where = describe(first)
    for rank in first.group.ranks:  # one that was stopped or died while it waited itself
        if _likelihood(processes.get(rank)) < RUNNING:
            what = f"joined and did not finish {where}, in which its peers wait"
            return Verdict(rank, f"{what}: {_condition(processes[rank], stacks.get(rank, ''))}")
    return Verdict(
        None, f"all ranks have joined {where}, and none gets to its end: the network between their hosts may be cut"
    )


@dataclass(frozen=True)
class NcclTimeout:
    """A collective of a group that did not end. group: description of the process group, empty if the line has none;
    number: of the collective in its group, as NCCL counts; operation: ALLREDUCE, empty if unknown; enqueued: number of
    the last collective that this rank has started there."""

    group: str
    number: int
    operation: str
    enqueued: int


def watchdog_timeouts(log: str) -> Iterator[NcclTimeout]:
    """The time-outs in a rank's log."""
    operations = {int(number): operation for number, operation in OPERATION.findall(log)}
    for match in STATUS.finditer(log):
        number = int(match["work"])
        group = match["description"] or ""
        yield NcclTimeout(group, number, operations.get(number, ""), int(match["enqueued"]))


def nccl_verdict(logs: Mapping[int, str]) -> Verdict | None:
    """Find the rank that did not join a collective, from the logs of all ranks; None if no log names one, or if all
    members of the group have started it."""
    by_group: dict[str, dict[int, NcclTimeout]] = {}
    for rank, log in logs.items():
        for timeout in watchdog_timeouts(log):
            by_group.setdefault(timeout.group, {}).setdefault(rank, timeout)
    verdicts = (_group_verdict(group, seen, len(logs)) for group, seen in sorted(by_group.items()))
    blamed = [verdict for verdict in verdicts if verdict is not None]
    waiting = {rank for seen in by_group.values() for rank in seen}
    return next((v for v in blamed if v.rank not in waiting), blamed[0] if blamed else None)


def _group_verdict(group: str, seen: Mapping[int, NcclTimeout], world_size: int) -> Verdict | None:
    """The first member that has not started the earliest collective that timed out."""
    everyone = f"world 0-{world_size - 1}"
    name, _, members = (everyone if group == DEFAULT else group).rpartition(" ")
    if not RANGES.fullmatch(members):
        return None
    first = min(seen.values(), key=lambda timeout: timeout.number)
    ranks = list(parse_rank_ranges(members))
    late = [r for r in ranks if r not in seen or seen[r].enqueued < first.number]
    if not late:
        return None
    waiting = [rank for rank in seen if rank not in late]
    return Verdict(
        late[0],
        f"did not join {first.operation or 'collective'} #{first.number} of group {name} "
        f"({ranks_text(ranks)}), in which {ranks_text(waiting)} waited until NCCL's watchdog "
        "ended the wait",
    )
