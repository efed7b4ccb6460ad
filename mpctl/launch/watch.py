"""Looks once a second whether torchrun and its ranks still run, and says what is wrong when not.

Ranks notice a peer that has ended, or one that keeps them waiting for `launch.timeout_seconds`.
None notices that all of them, or torchrun, are stopped, or that the start never comes to an end.

Patience is counted in looks, not in seconds of a clock: while this process is stopped itself
(Ctrl-Z) or the machine sleeps, no look is taken and no patience is used up.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from mpctl.launch.processes import ProcessTree
from mpctl.rundir.breadcrumb import JOINED, JOINING, BreadcrumbState
from mpctl.rundir.directory import RunDir
from mpctl.spec.job import LaunchSpec

LOOK_SECONDS = 1.0
STOPPED_LOOKS = 5


@dataclass(frozen=True)
class HangReport:
    """Why an attempt is ended from outside; rank None: not the fault of one rank."""

    rank: int | None
    error: str


class RunWatch:
    """One attempt. address: where its ranks meet, `127.0.0.1:29500`."""

    def __init__(
        self, run: RunDir, family: ProcessTree, launch: LaunchSpec, *, address: str
    ) -> None:
        self.run, self.family, self.launch, self.address = run, family, launch, address
        self.trouble: HangReport | None = None
        self.next_look = 0.0
        self.has_started = False
        self.progress: tuple[int, ...] = ()
        self.start_looks = 0
        self.stopped: Counter[int | None] = Counter()
        self.silent: Counter[int] = Counter()
        self.signs: dict[int, tuple[int, float]] = {}

    def finds_nothing(self) -> bool:
        """Whether all is well as far as can be seen; looks at most once a second."""
        if self.trouble is None and time.monotonic() >= self.next_look:
            self.next_look = time.monotonic() + LOOK_SECONDS
            self.trouble = self.look()
        return self.trouble is None

    def look(self) -> HangReport | None:
        self.family.find()
        trails = [self.run.breadcrumb(rank) for rank in range(self.family.world_size)]
        checks: tuple[Callable[[list[BreadcrumbState]], HangReport | None], ...] = (
            self._stopped, self._start, self._silent,
        )  # fmt: skip
        return next((found for check in checks if (found := check(trails))), None)

    def _stopped(self, trails: list[BreadcrumbState]) -> HangReport | None:
        for rank in (None, *sorted(self.family.ranks)):
            is_stopped = self.family.state(rank) == psutil.STATUS_STOPPED
            self.stopped[rank] = self.stopped[rank] + 1 if is_stopped else 0
        found = [rank for rank, looks in self.stopped.items() if looks >= STOPPED_LOOKS]
        if not found:
            return None
        ranks = sorted(rank for rank in found if rank is not None)
        return HangReport(ranks[0], stopped_text(ranks)) if ranks else HangReport(
            None, "torchrun, which runs the ranks, is stopped (SIGSTOP)")  # fmt: skip

    def _start(self, trails: list[BreadcrumbState]) -> HangReport | None:
        """Until all ranks have joined: whether the start still comes forward."""
        starts = [trail.start for trail in trails]
        if self.has_started or min(starts) >= JOINED:
            self.has_started = True
            return None
        progress = (len(self.family.ranks), *starts)
        self.start_looks = self.start_looks + 1 if progress == self.progress else 0
        self.progress = progress
        if self.start_looks * LOOK_SECONDS < self.launch.start_seconds:
            return None
        return HangReport(None, f"the start made no progress for {self.launch.start_seconds:g} s "
                       f"(launch.start_seconds): {_missing(starts)} {self.address}")  # fmt: skip

    def _silent(self, trails: list[BreadcrumbState]) -> HangReport | None:
        """A rank without a heartbeat that uses no processor either; one that computes for long
        without letting its heartbeat run is not silent."""
        for rank in self.family.ranks:
            sign = (trails[rank].beats, self.family.processor_seconds(rank))
            is_silent = trails[rank].start and self.signs.get(rank) == sign
            self.silent[rank] = self.silent[rank] + 1 if is_silent else 0
            self.signs[rank] = sign
            if self.silent[rank] * LOOK_SECONDS >= self.launch.timeout_seconds:
                return HangReport(
                    rank,
                    f"showed no sign of life for {self.launch.timeout_seconds:g} s"
                    f" (launch.timeout_seconds); its process is in state "
                    f"'{self.family.state(rank)}'",
                )
        return None


def stopped_text(ranks: list[int]) -> str:
    """What is wrong with the first of these ranks, whose processes are stopped."""
    others = ", ".join(map(str, ranks[1:]))
    besides = f"; so {'are' if len(ranks) > 2 else 'is'} rank{'s' * (len(ranks) > 2)} {others}"
    return f"its process is stopped (SIGSTOP, or a debugger){besides if others else ''}"


def _missing(starts: list[int]) -> str:
    """Who keeps the others waiting, up to the address where they meet."""
    begun = [start for start in starts if start]
    if not begun:
        return "torchrun has not started any rank; it listens at"
    late = [str(rank) for rank, start in enumerate(starts) if start < JOINING]
    if late:
        return f"rank{'s' * (len(late) > 1)} {', '.join(late)} did not come to meet the others at"
    waiting = [str(rank) for rank, start in enumerate(starts) if start < JOINED]
    return f"rank{'s' * (len(waiting) > 1)} {', '.join(waiting)} cannot reach the others at"
