"""Why ranks wait, in a sentence: who did not join which collective, and what it does instead.

A pure function of what every rank has logged (rundir/collective_log.py), of what its host sees of
its process and of its Python stack. wait_graph.py finds the rank at fault; here it is put in words:

    did not join all_reduce #1234 (16.0 MiB) of group tp (ranks 2-3), in which rank 2 has waited
    for 12 s: its process is stopped (SIGSTOP, or a debugger)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mpctl.launch.attempt import STOPPED
from mpctl.launch.wait_graph import Progress, Wait, WaitGraph, wait_graph
from mpctl.rundir.collective_log import CollectiveProgress
from mpctl.units import bytes_text, ranks_text

ENDED_STATES = ("zombie", "dead", "")
ENDED, HALTED, RUNNING = range(3)
SHOWN_RANKS = 8
COMPUTING = 0.2
"""The share of a processor above which a process counts as computing, asleep as it may be at the
moment of a look."""

SWAPPING_FAULTS = 50.0
"""Major page faults a second above which a process counts as being swapped in: each is a read of
some 4 KiB to 128 KiB from a disk."""


@dataclass(frozen=True)
class ProcessView:
    """What a host sees of the process of a rank.

    state: by psutil's name, empty when there is no process; faults_a_second: major page faults,
    each of which waits for a disk; swapped_bytes: of its memory that lie in swap space; processor:
    the share of one processor that it used lately, 1.0 for one that computes all the time.
    """

    state: str = "running"
    faults_a_second: float = 0.0
    swapped_bytes: int = 0
    processor: float = 0.0


@dataclass(frozen=True)
class HangEvidence:
    """What is known of all ranks. processes, stacks: by rank; a stack is one line, empty where the
    rank did not answer. queued: collectives run on GPUs."""

    progress: Progress
    processes: Mapping[int, ProcessView] = field(default_factory=dict)
    stacks: Mapping[int, str] = field(default_factory=dict)
    queued: bool = False


@dataclass(frozen=True)
class Verdict:
    """Who is at fault. rank: None where no single rank is; error: the sentence, without the
    rank."""

    rank: int | None
    error: str


def judge(evidence: HangEvidence, seconds: float) -> Verdict | None:
    """Why ranks have waited for so many seconds; None where no rank waits for another."""
    graph = wait_graph(evidence.progress, queued=evidence.queued)
    if not graph.waits:
        return None
    ends = graph.ends
    if ends:
        rank = min(ends, key=lambda r: (_likelihood(evidence, r), r))
        return Verdict(rank, _blocks(evidence, graph, rank, seconds))
    if circle := graph.circle():
        return Verdict(None, _circle(circle))
    return _without_blockers(graph, evidence)


def judge_ended(progress: Progress, *, queued: bool = False) -> Verdict | None:
    """Who held up the others when their time-outs ended an attempt, from what the ranks had logged;
    None where that names no single rank."""
    graph = wait_graph(progress, queued=queued)
    if len(graph.ends) != 1:
        return None
    rank = graph.ends[0]
    return Verdict(rank, f"{_missed(rank, graph.waits_for(rank))}; the others timed out")


def blocked_in(progress: Progress, rank: int, *, queued: bool = False) -> str:
    """In which collective the other ranks wait for a rank, in words; empty where they do not."""
    waits = wait_graph(progress, queued=queued).waits_for(rank)
    return _missed(rank, waits) if waits else ""


def _likelihood(evidence: HangEvidence, rank: int) -> int:
    """Which of several ranks at the end is named: one that ended, then one that is stopped."""
    state = evidence.processes.get(rank, ProcessView()).state
    if state in ENDED_STATES:
        return ENDED
    return HALTED if state in STOPPED else RUNNING


def _blocks(evidence: HangEvidence, graph: WaitGraph, rank: int, seconds: float) -> str:
    waits = graph.waits_for(rank)
    what = _missed(rank, waits, seconds)
    return f"{what}: {_condition(evidence, rank)}"


def _missed(rank: int, waits: Sequence[Wait], seconds: float | None = None) -> str:
    """`did not join all_reduce #12 (4.0 KiB) of group tp (ranks 2-3), in which rank 2 waits`."""
    first = waits[0]
    waiting = [wait.rank for wait in waits if wait.key == first.key]
    several = len(waiting) > 1
    verb = "wait" if several else "waits"
    if seconds is not None:
        verb = f"{'have' if several else 'has'} waited for {seconds:.0f} s"
    joined = "did not join"
    if first.have_started:
        joined = "joined and did not finish"
    elif first.group.kind == "send":
        joined = "did not send" if first.group.ranks[0] == rank else "did not receive"
    where = "for which" if first.group.kind == "send" else "in which"
    return f"{joined} {describe(first)}, {where} {ranks_text(waiting)} {verb}"


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


def _condition(evidence: HangEvidence, rank: int) -> str:
    """What a rank does that others wait for."""
    process = evidence.processes.get(rank, ProcessView())
    if process.state in STOPPED:
        return "its process is stopped (SIGSTOP, or a debugger)"
    if process.state in ENDED_STATES:
        return "its process has ended"
    stack = evidence.stacks.get(rank, "")
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


def _circle(circle: Sequence[Wait]) -> str:
    """Ranks that wait for each other, each with its collective."""
    ranks = [wait.rank for wait in circle]
    parts = [f"rank {wait.rank} in {describe(wait)}" for wait in circle[:SHOWN_RANKS]]
    return (
        f"{ranks_text(ranks)} wait for each other: {', '.join(parts)}; ranks must start their "
        "collectives in one order"
    )


def _without_blockers(graph: WaitGraph, evidence: HangEvidence) -> Verdict:
    """All ranks of a group wait in the same collective and none gets through."""
    (first, *_) = next(iter(waits for _, waits in sorted(graph.waits.items())))
    kinds = _kinds(first, evidence.progress)
    if len(kinds) > 1:
        parts = [f"{ranks_text(ranks)} {what}" for what, ranks in sorted(kinds.items())]
        return Verdict(
            None,
            f"ranks of group {first.group.name} started different collectives as number "
            f"{first.number}: {', '.join(parts)}",
        )
    where = describe(first)
    for rank in first.group.ranks:  # one that was stopped or died while it waited itself
        if _likelihood(evidence, rank) < RUNNING:
            what = f"joined and did not finish {where}, in which its peers wait"
            return Verdict(rank, f"{what}: {_condition(evidence, rank)}")
    return Verdict(
        None,
        f"all ranks have joined {where}, and none gets to its end: the network between their "
        "hosts may be cut",
    )


def _kinds(wait: Wait, progress: Progress) -> dict[str, list[int]]:
    """What the members have started as this collective, where it is the last that they started."""
    kinds: dict[str, list[int]] = {}
    for rank in wait.group.ranks:
        state = progress.get(rank, CollectiveProgress())
        for group in state.groups:
            if group.key == wait.group.key and group.started == wait.number:
                kinds.setdefault(f"{group.kind} of {bytes_text(group.bytes)}", []).append(rank)
    return kinds
