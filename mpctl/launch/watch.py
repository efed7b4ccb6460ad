"""Checks once a second whether torchrun and its ranks still run, and says what is wrong when not.

Ranks notice a peer that has ended. The launcher notices one that keeps the others waiting in a
collective for `launch.timeout_seconds`, before they give up by themselves; it also sees what no
rank can: that all ranks or torchrun are stopped, or that the ranks never reach each other. Before a
hang is reported every rank is asked for its Python stack.

A rank that is in the same wait at every check for `launch.timeout_seconds` is hung: the launcher
decides then, RANK_MARGIN_SECONDS before the rank would give up by itself (spec/launch.py). A rank
that computes for long is never hung by itself, whatever it does (a compilation, a first batch, a
validation); only those that wait for it are.

Patience is counted in checks, not in seconds of a clock, and of each pause between two at most
LONGEST_PAUSE: while this process is stopped itself (Ctrl-Z) or the machine sleeps, no check is made
and no patience is used up.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace

from mpctl.launch.attempt import STOPPED, AttemptState, RankState
from mpctl.launch.cluster import Attempt
from mpctl.launch.verdict import HangEvidence, ProcessView, Verdict, blocked_in, hang_verdict
from mpctl.rundir.breadcrumb import JOINED, JOINING
from mpctl.rundir.collective_log import CollectiveProgress
from mpctl.spec.launch import LaunchSpec
from mpctl.units import ranks_text

LONGEST_PAUSE = 2.0
CHECK_SECONDS = 1.0
STOPPED_CHECKS = 5


class CollectiveWatch:
    """The waits of all ranks of an attempt. limit: seconds that a rank may wait; queued:
    collectives run on GPUs, where the host does not wait in them."""

    def __init__(self, limit: float, *, queued: bool) -> None:
        self.limit, self.queued = limit, queued
        self.signs: dict[int, Hashable] = {}
        self.waited: dict[int, float] = {}
        self.before: Mapping[int, RankState] = {}
        self.processes: dict[int, ProcessView] = {}

    def check(self, state: AttemptState, elapsed: float) -> Verdict | None:
        """The verdict once a rank has waited too long. elapsed: seconds since the last check."""
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
        return self.verdict(state, {})

    def verdict(self, state: AttemptState, stacks: Mapping[int, str]) -> Verdict | None:
        """Who is at fault. stacks: where ranks are, by rank."""
        evidence = HangEvidence(state.collectives(), self.processes, stacks, self.queued)
        return hang_verdict(evidence, max(self.waited.values(), default=0.0))

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


@dataclass(frozen=True)
class HangReport:
    """Why an attempt must be ended from outside. rank: None when no single rank is at fault;
    is_wait: ranks have waited too long in a collective."""

    rank: int | None
    error: str
    is_wait: bool = False


class RunWatch:
    """Watches one attempt. address: where its ranks meet, `127.0.0.1:29500`; hang: what was found,
    None while all is well."""

    def __init__(self, launch: LaunchSpec, world_size: int, *, address: str) -> None:
        self.launch, self.world_size, self.address = launch, world_size, address
        self.hang: HangReport | None = None
        self.next_check = self.last_check = 0.0
        queued = launch.device == "cuda"
        self.waits = CollectiveWatch(launch.timeout_seconds, queued=queued)
        self.has_started = False
        self.progress: tuple[int, ...] = ()
        self.idle_checks = 0
        self.stopped: Counter[int] = Counter()
        self.stopped_torchruns: Counter[int] = Counter()
        self.silent: Counter[int] = Counter()
        self.signs: dict[int, tuple[int, float]] = {}

    def is_healthy(self, attempt: Attempt) -> bool:
        """Whether no hang was found; checks at most once a second."""
        now = time.monotonic()
        if self.hang is None and now >= self.next_check:
            elapsed, self.last_check = now - self.last_check, now
            self.next_check = now + CHECK_SECONDS
            state = attempt.snapshot()
            report = self.check(state, elapsed)
            if report is not None:
                self.hang = self._explain(report, state, attempt.stacks())
        return self.hang is None

    def check(self, state: AttemptState, elapsed: float = CHECK_SECONDS) -> HangReport | None:
        """Judge the state of all hosts and ranks at this moment. elapsed: seconds since the last
        check."""
        verdict = self.waits.check(state, elapsed)
        checks = (self._stopped, self._stopped_torchrun, self._start, self._silent)
        report = next((report for check in checks if (report := check(state))), None)
        if report is None and verdict is not None:
            return HangReport(verdict.rank, verdict.error, is_wait=True)
        return report

    def _explain(
        self, report: HangReport, state: AttemptState, stacks: Mapping[int, str]
    ) -> HangReport:
        """The report with what the stacks tell, and with the collective in which the others
        wait."""
        if report.is_wait:
            verdict = self.waits.verdict(state, stacks)
            return report if verdict is None else replace(report, error=verdict.error)
        if report.rank is None:
            return report
        progress = state.collectives()
        missed = blocked_in(progress, report.rank, queued=self.waits.queued)
        return replace(report, error=f"{report.error}; it {missed}") if missed else report

    def _stopped(self, state: AttemptState) -> HangReport | None:
        """Ranks whose process was stopped at several checks in a row."""
        for rank, seen in state.ranks.items():
            self.stopped[rank] = self.stopped[rank] + 1 if seen.is_stopped else 0
        ranks = sorted(rank for rank, checks in self.stopped.items() if checks >= STOPPED_CHECKS)
        return HangReport(ranks[0], stopped_text(ranks)) if ranks else None

    def _stopped_torchrun(self, state: AttemptState) -> HangReport | None:
        for node in state.nodes:
            is_stopped = node.torchrun in STOPPED
            self.stopped_torchruns[node.node] += 1
            self.stopped_torchruns[node.node] *= is_stopped
            if self.stopped_torchruns[node.node] >= STOPPED_CHECKS:
                where = f" of host {node.host}" if len(state.nodes) > 1 else ""
                text = f"torchrun{where}, which runs the ranks, is stopped (SIGSTOP)"
                return HangReport(None, text)
        return None

    def _start(self, state: AttemptState) -> HangReport | None:
        """Until all ranks have joined: whether the start still makes progress."""
        ranks = state.ranks
        starts = [ranks.get(rank, RankState()).breadcrumb.start for rank in range(self.world_size)]
        if self.has_started or min(starts) >= JOINED:
            self.has_started = True
            return None
        progress = (sum(bool(rank.process) for rank in ranks.values()), *starts)
        self.idle_checks = self.idle_checks + 1 if progress == self.progress else 0
        self.progress = progress
        seconds = self.launch.start_seconds
        if self.idle_checks * CHECK_SECONDS < seconds:
            return None
        message = f"the start made no progress for {seconds:g} s (launch.start_seconds)"
        return HangReport(None, f"{message}: {_missing(starts, self.address)}")

    def _silent(self, state: AttemptState) -> HangReport | None:
        """A rank without a heartbeat that uses no processor time either; a rank that computes for
        long without running its heartbeat thread is not silent."""
        seconds = self.launch.timeout_seconds
        for rank, seen in state.ranks.items():
            sign = (seen.breadcrumb.beats, seen.processor_seconds)
            is_silent = seen.process and seen.breadcrumb.is_working and self.signs.get(rank) == sign
            self.silent[rank] = self.silent[rank] + 1 if is_silent else 0
            self.signs[rank] = sign
            if self.silent[rank] * CHECK_SECONDS >= seconds:
                message = f"no heartbeat and no processor time used for {seconds:g} s"
                end = f"its process is in state '{seen.process}'"
                return HangReport(rank, f"{message} (launch.timeout_seconds); {end}")
        return None


def stopped_text(ranks: list[int]) -> str:
    """What is wrong with the first of these ranks, whose processes are stopped."""
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
