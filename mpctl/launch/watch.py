"""Looks once a second whether torchrun and its ranks still run, and says what is wrong when not.

Ranks notice a peer that has ended, or one that keeps them waiting for `launch.timeout_seconds`. No
rank can notice that all ranks or torchrun are stopped, or that the ranks never reach each other.

Patience is counted in looks, not in seconds of a clock: while this process is stopped itself
(Ctrl-Z) or the machine sleeps, no look is taken and no patience is used up.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from mpctl.launch.node.processes import ProcessTree
from mpctl.rundir.breadcrumb import JOINED, JOINING, BreadcrumbState
from mpctl.rundir.directory import RunDir
from mpctl.spec.launch import LaunchSpec

LOOK_SECONDS = 1.0
STOPPED_LOOKS = 5


@dataclass(frozen=True)
class HangReport:
    """Why an attempt must be ended from outside. rank: None when no single rank is at fault."""

    rank: int | None
    error: str


class RunWatch:
    """Watches one attempt. address: where its ranks meet, `127.0.0.1:29500`; hang: what was found,
    None while all is well."""

    def __init__(
        self, run: RunDir, processes: ProcessTree, launch: LaunchSpec, *, address: str
    ) -> None:
        self.run, self.processes, self.launch, self.address = run, processes, launch, address
        self.hang: HangReport | None = None
        self.next_look = 0.0
        self.has_started = False
        self.progress: tuple[int, ...] = ()
        self.start_looks = 0
        self.stopped: Counter[int | None] = Counter()
        self.silent: Counter[int] = Counter()
        self.signs: dict[int, tuple[int, float]] = {}

    def is_healthy(self) -> bool:
        """Whether no hang was found; looks at most once a second."""
        if self.hang is None and time.monotonic() >= self.next_look:
            self.next_look = time.monotonic() + LOOK_SECONDS
            self.hang = self.look()
        return self.hang is None

    def look(self) -> HangReport | None:
        """Look at all processes and breadcrumbs now."""
        self.processes.find()
        states = [self.run.breadcrumb(rank) for rank in range(self.processes.world_size)]
        checks: tuple[Callable[[list[BreadcrumbState]], HangReport | None], ...] = (
            self._stopped,
            self._start,
            self._silent,
        )
        return next((report for check in checks if (report := check(states))), None)

    def _stopped(self, states: list[BreadcrumbState]) -> HangReport | None:
        """Ranks, or torchrun (None), whose process was stopped at several looks in a row."""
        for rank in (None, *sorted(self.processes.ranks)):
            is_stopped = self.processes.state(rank) == psutil.STATUS_STOPPED
            self.stopped[rank] = self.stopped[rank] + 1 if is_stopped else 0
        stopped = [rank for rank, looks in self.stopped.items() if looks >= STOPPED_LOOKS]
        ranks = sorted(rank for rank in stopped if rank is not None)
        if ranks:
            return HangReport(ranks[0], stopped_text(ranks))
        if stopped:
            return HangReport(None, "torchrun, which runs the ranks, is stopped (SIGSTOP)")
        return None

    def _start(self, states: list[BreadcrumbState]) -> HangReport | None:
        """Until all ranks have joined: whether the start still makes progress."""
        starts = [state.start for state in states]
        if self.has_started or min(starts) >= JOINED:
            self.has_started = True
            return None
        progress = (len(self.processes.ranks), *starts)
        self.start_looks = self.start_looks + 1 if progress == self.progress else 0
        self.progress = progress
        seconds = self.launch.start_seconds
        if self.start_looks * LOOK_SECONDS < seconds:
            return None
        message = f"the start made no progress for {seconds:g} s (launch.start_seconds)"
        return HangReport(None, f"{message}: {_missing(starts, self.address)}")

    def _silent(self, states: list[BreadcrumbState]) -> HangReport | None:
        """A rank without a heartbeat that uses no processor time either; a rank that computes for
        long without running its heartbeat thread is not silent."""
        seconds = self.launch.timeout_seconds
        for rank in self.processes.ranks:
            sign = (states[rank].beats, self.processes.processor_seconds(rank))
            is_silent = states[rank].start and self.signs.get(rank) == sign
            self.silent[rank] = self.silent[rank] + 1 if is_silent else 0
            self.signs[rank] = sign
            if self.silent[rank] * LOOK_SECONDS >= seconds:
                message = f"no heartbeat and no processor time used for {seconds:g} s"
                state = f"its process is in state '{self.processes.state(rank)}'"
                return HangReport(rank, f"{message} (launch.timeout_seconds); {state}")
        return None


def stopped_text(ranks: list[int]) -> str:
    """What is wrong with the first of these ranks, whose processes are stopped."""
    text = "its process is stopped (SIGSTOP, or a debugger)"
    others = ranks[1:]
    if not others:
        return text
    return f"{text}; so {'is' if len(others) == 1 else 'are'} {ranks_text(others)}"


def ranks_text(ranks: list[int]) -> str:
    """`rank 3`, or `ranks 3, 5`."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _missing(starts: list[int], address: str) -> str:
    """Which ranks keep the others waiting."""
    if not any(starts):
        return f"torchrun, which listens at {address}, has not started any rank"
    late = [rank for rank, start in enumerate(starts) if start < JOINING]
    if late:
        return f"{ranks_text(late)} did not connect to the others at {address}"
    waiting = [rank for rank, start in enumerate(starts) if start < JOINED]
    return f"{ranks_text(waiting)} cannot reach the others at {address}"
