"""Checks once a second whether torchrun and its ranks still run, and finds the cause of a hang; with many hosts, as
often as each of them reports.

Ranks notice a peer that has ended. The launcher notices one that keeps the others waiting in a
collective for `launch.timeout_seconds`, or for a time learnt from the run's own steps
(learnt_timeout.py), before they give up by themselves; it also sees what no rank can: that all
ranks or torchrun are stopped, or that the ranks never reach each other. Before a hang is reported
every rank is asked for its Python stack.

A rank that is in the same wait at every check for that long is hung: the launcher decides then, at
least RANK_MARGIN_SECONDS before the rank would give up by itself (spec/launch.py). A rank that
computes for long is never hung by itself, whatever it does (a compilation, a first batch, a
validation); only those that wait for it are.

Time limits are counted by checks, not by a clock: a pause between two checks counts as at most
LONGEST_PAUSE periods. While this process is stopped itself (Ctrl-Z) or the machine sleeps, no check
is made and no time counts. The node agents of other hosts do count: they end their ranks once they
have heard nothing for `launch.silence_seconds` (node/agent.py).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace

from mpctl.core.units import ranks_text
from mpctl.records.rundir.breadcrumb import JOINED, JOINING
from mpctl.records.rundir.collective_log import CollectiveProgress
from mpctl.run.launch.attempt import STOPPED, AttemptState, RankState
from mpctl.run.launch.cluster import Attempt
from mpctl.run.launch.learnt_timeout import LearntTimeout
from mpctl.run.launch.program_watch import ProgramWatch, with_places
from mpctl.run.launch.verdict import ProcessView, Verdict, WaitGraph, hang_verdict
from mpctl.spec.launch import LaunchSpec

LONGEST_PAUSE = 2.0
CHECK_SECONDS = 1.0
STOPPED_SECONDS = 5.0
Stacks = Callable[[], Mapping[int, str]]


class RunWatch:
    """Watches one attempt. address: the rendezvous of its ranks, `127.0.0.1:29500`; period: seconds
    between two checks, in which each host reports once (report_seconds in attempt.py); hang: what
    was found, None if nothing; timeout: how long a rank may wait. Counters have the consecutive
    checks at which a rank, a torchrun or the start was in that state; waited has the seconds that a
    rank has been in one wait."""

    def __init__(self, launch: LaunchSpec, world_size: int, *, address: str, period: float = CHECK_SECONDS) -> None:
        self.launch, self.world_size, self.address = launch, world_size, address
        self.period = period
        self.timeout = LearntTimeout(launch)
        self.is_queued = launch.device == "cuda"
        self.hang: Verdict | None = None
        self.next_check = self.last_check = 0.0
        self.has_started = False
        self.start: tuple[int, ...] = ()
        self.idle_checks = 0
        self.stopped: Counter[int] = Counter()
        self.stopped_torchruns: Counter[int] = Counter()
        self.silent: Counter[int] = Counter()
        self.waited: dict[int, float] = {}
        self.waits: dict[int, Hashable] = {}
        self.before: Mapping[int, RankState] = {}
        self.program = ProgramWatch(launch) if launch.program else None

    def is_healthy(self, attempt: Attempt) -> bool:
        """Whether no hang was found; checks at most once a period."""
        now = time.monotonic()
        if self.hang is None and now >= self.next_check:
            elapsed, self.last_check = now - self.last_check, now
            self.next_check = now + self.period
            self.hang = self.check(attempt.snapshot(), elapsed, attempt.stacks)
        return self.hang is None

    def check(self, state: AttemptState, elapsed: float = CHECK_SECONDS, stacks: Stacks = dict) -> Verdict | None:
        """Check the state of all hosts and ranks at this moment. elapsed: seconds since the last
        check; stacks: called for where ranks are, by rank, once something is found."""
        elapsed = min(elapsed, LONGEST_PAUSE * self.period)
        ranks = state.ranks
        before, self.before = self.before, ranks
        for rank, seen in ranks.items():
            self._count_wait(rank, seen.breadcrumb.collectives, elapsed)
        checks = (
            self._stopped(ranks),
            self._stopped_torchrun(state),
            self._start(ranks),
            self.program.check(ranks, elapsed) if self.program else self._silent(ranks, before),
        )
        found = next(filter(None, checks), None)
        longest = max(self.waited.values(), default=0.0)
        self.timeout.observe(ranks.values(), elapsed)
        if found is None and not self.timeout.is_over(longest):
            return None
        graph = WaitGraph(state.collectives(), queued=self.is_queued)
        if found is not None:
            places = stacks()  # for the logs too
            if self.program is not None:
                return with_places(found, places)
            missed = "" if found.rank is None else graph.missed_by(found.rank)
            return replace(found, error=f"{found.error}; it {missed}") if missed else found
        if not graph.waits:
            return None
        views = {rank: _process_view(seen, before.get(rank, seen), elapsed) for rank, seen in ranks.items()}
        verdict = hang_verdict(graph, views, stacks(), longest)
        learnt = self.timeout.words(longest)
        return verdict and replace(verdict, error=f"{verdict.error}{learnt}")

    def _count_wait(self, rank: int, progress: CollectiveProgress, elapsed: float) -> None:
        """Add to the time of a wait that continues: in the same collective, or, where the host only
        queues them, while no group of the rank makes progress."""
        wait: Hashable = None
        if progress.waits_in is not None:
            wait = progress.waits_in.key, progress.number
        elif self.is_queued and progress.groups:
            wait = progress.groups
        is_same = wait is not None and wait == self.waits.get(rank)
        self.waited[rank] = self.waited.get(rank, 0.0) + elapsed if is_same else 0.0
        self.waits[rank] = wait

    def _stopped(self, ranks: Mapping[int, RankState]) -> Verdict | None:
        """Return a verdict on ranks with a stopped process at several checks in a row."""
        for rank, seen in ranks.items():
            if seen.is_stopped:
                self.stopped[rank] += 1
            elif rank in self.stopped:
                del self.stopped[rank]
        found = sorted(rank for rank, checks in self.stopped.items() if self._is_long(checks))
        return Verdict(found[0], stopped_text(found)) if found else None

    def _is_long(self, checks: int) -> bool:
        """Whether a process that was stopped at so many checks in a row is not continued soon."""
        return checks * self.period >= STOPPED_SECONDS

    def _stopped_torchrun(self, state: AttemptState) -> Verdict | None:
        for node in state.nodes:
            checks = self.stopped_torchruns[node.node] + 1 if node.torchrun in STOPPED else 0
            self.stopped_torchruns[node.node] = checks
            if self._is_long(checks):
                where = f" of host {node.host}" if len(state.nodes) > 1 else ""
                text = f"torchrun{where}, which runs the ranks, is stopped (SIGSTOP)"
                return Verdict(None, text)
        return None

    def _start(self, ranks: Mapping[int, RankState]) -> Verdict | None:
        """Return a verdict once the start makes no more progress; None after all ranks have joined."""
        if self.has_started:
            return None
        starts = [ranks.get(rank, RankState()).breadcrumb.start for rank in range(self.world_size)]
        if min(starts) >= JOINED:
            self.has_started = True
            return None
        start = (sum(bool(rank.process) for rank in ranks.values()), *starts)
        self.idle_checks = self.idle_checks + 1 if start == self.start else 0
        self.start = start
        seconds = self.launch.start_seconds
        if self.idle_checks * self.period < seconds:
            return None
        message = f"the start made no progress for {seconds:g} s (launch.start_seconds)"
        return Verdict(None, f"{message}: {_missing(starts, self.address)}")

    def _silent(self, ranks: Mapping[int, RankState], before: Mapping[int, RankState]) -> Verdict | None:
        """A rank without a heartbeat that uses no processor time either; a rank that computes for
        long without running its heartbeat thread is not silent."""
        seconds = self.launch.longest_wait_seconds
        for rank, now in ranks.items():
            then = before.get(rank)
            is_silent = (
                now.process
                and now.breadcrumb.is_working
                and then is not None
                and now.breadcrumb.beats == then.breadcrumb.beats
                and now.processor_seconds == then.processor_seconds
            )
            if not is_silent:
                self.silent.pop(rank, None)
                continue
            self.silent[rank] += 1
            if self.silent[rank] * self.period >= seconds:
                message = f"no heartbeat and no processor time used for {seconds:g} s"
                end = f"its process is in state '{now.process}'"
                return Verdict(rank, f"{message} (launch.timeout_seconds); {end}")
        return None


def _process_view(now: RankState, before: RankState, elapsed: float) -> ProcessView:
    seconds = max(elapsed, 1e-3)
    return ProcessView(
        now.process,
        (now.major_faults - before.major_faults) / seconds,
        now.swapped_bytes,
        (now.processor_seconds - before.processor_seconds) / seconds,
    )


def stopped_text(ranks: Sequence[int]) -> str:
    """Describe the first of these ranks, whose processes are stopped, and list the others."""
    text = "its process is stopped (SIGSTOP, or a debugger)"
    others = ranks[1:]
    if not others:
        return text
    return f"{text}; so {'is' if len(others) == 1 else 'are'} {ranks_text(others)}"


def _missing(starts: list[int], address: str) -> str:
    if not any(starts):
        return f"torchrun, which listens at {address}, has not started any rank"
    late = [rank for rank, start in enumerate(starts) if start < JOINING]
    if late:
        return f"{ranks_text(late)} did not connect to the others at {address}"
    waiting = [rank for rank, start in enumerate(starts) if start < JOINED]
    return f"{ranks_text(waiting)} cannot reach the others at {address}"
