"""Seconds that a rank spends in collectives, by axis and by group.

A rank spends them when it starts a collective (a blocking one lasts until its result is available;
through shared memory the rank copies its part) and when it waits for the result. Transfers while
the rank computes cost nothing; waiting for a late peer counts.

On CUDA the host continues while a stream waits. There the seconds are those of the current stream,
between an event recorded before the start or the wait and one recorded after it. Only events that
the stream has passed are read, so that the host waits for none: a step's seconds are read after its
other figures, and events not passed by then count to the next step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol

import torch

from mpctl.core.collectives import Kind


@dataclass(frozen=True)
class Collective:
    """One collective of a run.

    kind: as in mpctl/core/collectives.py, or receive, which timers see too. axis: name of
    the group. bytes: size of the full message, over all ranks; in an all_to_all that of one rank's
    blocks. dtype: torch's name of the elements' type. group: the number of the group, or of the
    two ranks of a message, in the rank's collective log, -1 where it has none.
    """

    kind: Kind | Literal["receive"]
    axis: str
    bytes: int
    dtype: str
    group: int = field(default=-1, compare=False)


class Work(Protocol):
    """A handle on a pending collective: torch's, or that of shared memory."""

    def wait(self) -> object:
        """Return when the result is there."""


Listener = Callable[[Collective, Any, Any, Any], None]
MANY_PENDING = 4096  # pairs of CUDA events, from which on those that have passed are read at once


class SecondsByAxis:
    """Adds up the time that one rank spends in its collectives, by the clock of the host. `now`
    returns a moment of this timer.

    seconds: by axis; of_groups, bytes: the same, and the bytes of the collectives that were
    started, by `Collective.group`. listener: called for every time in a collective, as (collective,
    began, ended, started); may be None.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.of_groups: dict[int, float] = {}
        self.bytes: dict[int, int] = {}
        self.listener: Listener | None = None

    def start_clock(self) -> None:
        """Call it before the moments that are passed to `seconds_at`."""

    def seconds_at(self, moment: Any) -> float:
        """A moment in seconds of the host's clock (time.perf_counter)."""
        return float(moment)

    def now(self) -> Any:
        """The current moment, as `spent` takes it: seconds of time.perf_counter."""
        return time.perf_counter()

    def spent(self, collective: Collective, began: Any, started: Any = None) -> None:
        """The rank was in a collective from `began` until now: starting it if `started` is None,
        otherwise waiting for one whose start began at `started`."""
        ended = time.perf_counter()
        self.add(collective.axis, ended - began, collective.group)
        if started is None:
            self.count(collective)
        if self.listener is not None:
            self.listener(collective, began, ended, started)

    def add(self, axis: str, seconds: float, group: int = -1) -> None:
        """Add so many seconds to those of an axis and of a group."""
        self.seconds[axis] = self.seconds.get(axis, 0.0) + seconds
        self.of_groups[group] = self.of_groups.get(group, 0.0) + seconds

    def count(self, collective: Collective) -> None:
        """Add the bytes of a collective that was started."""
        group = collective.group
        self.bytes[group] = self.bytes.get(group, 0) + collective.bytes

    def clear(self) -> None:
        """Count from 0 again."""
        self.seconds.clear()
        self.of_groups.clear()
        self.bytes.clear()

    def snapshot(self) -> dict[str, float]:
        """Seconds by axis since the last `clear`, such as {"dp_cp": 0.003, "tp": 0.02}, without
        axes along which nothing was sent."""
        return dict(sorted(self.seconds.items()))


class StreamSecondsByAxis(SecondsByAxis):
    """The same on CUDA, by events on the current stream. make_event: creates an event."""

    def __init__(self, make_event: Callable[[], Any] | None = None) -> None:
        super().__init__()
        make_event = make_event or partial(torch.cuda.Event, enable_timing=True)
        self._make_event = make_event
        self._pending: deque[tuple[str, int, Any, Any]] = deque()
        self._free: list[Any] = []
        self._origin, self._origin_seconds = make_event(), 0.0

    def start_clock(self) -> None:
        """Note the host's time at which the stream reaches this point."""
        self._origin.record()
        self._origin.synchronize()
        self._origin_seconds = time.perf_counter()

    def seconds_at(self, moment: Any) -> float:
        """Wait until the stream has reached an event; return that time by the host's clock."""
        moment.synchronize()
        return self._origin_seconds + float(self._origin.elapsed_time(moment)) / 1e3

    def now(self) -> Any:
        """An event, recorded on the current stream."""
        event = self._free.pop() if self._free else self._make_event()
        event.record()
        return event

    def spent(self, collective: Collective, began: Any, started: Any = None) -> None:
        ended = self.now()
        self._pending.append((collective.axis, collective.group, began, ended))
        if started is None:
            self.count(collective)
        if self.listener is not None:
            self.listener(collective, began, ended, started)
        if len(self._pending) >= MANY_PENDING:
            self._read()

    def clear(self) -> None:
        """Count from 0 again; events that the stream has not reached yet count later."""
        self._read()
        super().clear()

    def snapshot(self) -> dict[str, float]:
        self._read()
        return super().snapshot()

    def _read(self) -> None:
        """Add up the oldest pairs whose events the stream has passed."""
        while self._pending and self._pending[0][3].query():
            axis, group, began, ended = self._pending.popleft()
            self.add(axis, began.elapsed_time(ended) / 1e3, group)
            if self.listener is None:  # otherwise the listener keeps them
                self._free += (began, ended)


@dataclass(frozen=True, slots=True)
class TimedWork:
    """Work that reports to a timer how long the rank waits for it. started: the timer's moment at
    which the start of the collective began."""

    work: Work
    timer: SecondsByAxis
    collective: Collective
    started: Any

    def wait(self) -> None:
        """Return when the result is available; a wait that fails is not timed."""
        began = self.timer.now()
        self.work.wait()
        self.timer.spent(self.collective, began, self.started)


def timed_start(start: Callable[[], Work | None], timer: SecondsByAxis | None, collective: Collective) -> Work | None:
    """Start a collective, timed if there is a timer; returns what to wait for, None if `start` has
    waited."""
    if timer is None:
        return start()
    began = timer.now()
    work = start()
    timer.spent(collective, began)
    return None if work is None else TimedWork(work, timer, collective, began)
