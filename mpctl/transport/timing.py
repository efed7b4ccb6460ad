"""Seconds that a rank spends in collectives, by axis: what communication costs it.

A rank spends them where it starts a collective (a blocking one lasts until its result is there;
through shared memory the rank copies its part) and where it waits for the result. What travels
while the rank computes costs nothing; a wait for a peer that is late counts.

On CUDA the host goes on while a stream waits. There the seconds are those of the current stream,
between an event recorded before the start or the wait and one recorded after it. Only events that
the stream has passed are read, so that the host waits for none: a step's seconds are read when its
figures have been, and what has not passed by then counts to the step after.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import torch

from mpctl.collectives import Kind


@dataclass(frozen=True)
class Collective:
    """One collective of a run.

    kind: as in mpctl/collectives.py, or receive, which timers see too. axis: name of
    the group. bytes: of the whole message, over all ranks; what one rank has for all others in an
    all_to_all. dtype: of the elements, in torch's words.
    """

    kind: Kind | Literal["receive"]
    axis: str
    bytes: int
    dtype: str


class Work(Protocol):
    """A handle on a collective under way: torch's, or that of shared memory."""

    def wait(self) -> object:
        """Return when the result is there."""


Listener = Callable[[Collective, Any, Any, Any], None]
MANY_PENDING = 4096  # pairs of CUDA events, from which on those that have passed are read at once


class SecondsByAxis:
    """Adds up the time that one rank spends in its collectives, by the clock of the host. What
    `now` gives is a moment of this timer.

    listener: is told of every time in a collective, as (collective, began, ended, started); None
    for nobody.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.listener: Listener | None = None

    def start_clock(self) -> None:
        """To be called before the moments that `seconds_at` is asked about."""

    def seconds_at(self, moment: Any) -> float:
        """A moment in seconds of the host's clock (time.perf_counter)."""
        return float(moment)

    def now(self) -> Any:
        """This moment, as `spent` takes it: seconds of time.perf_counter."""
        return time.perf_counter()

    def spent(self, collective: Collective, began: Any, started: Any = None) -> None:
        """The rank was in a collective from `began` until now: starting it where `started` is None,
        else waiting for one that it began to start at `started`."""
        ended = time.perf_counter()
        self.add(collective.axis, ended - began)
        if self.listener is not None:
            self.listener(collective, began, ended, started)

    def add(self, axis: str, seconds: float) -> None:
        """Add so many seconds to those of an axis."""
        self.seconds[axis] = self.seconds.get(axis, 0.0) + seconds

    def clear(self) -> None:
        """Count from 0 again."""
        self.seconds.clear()

    def snapshot(self) -> dict[str, float]:
        """Seconds by axis since the last `clear`, {"dp_cp": 0.003, "tp": 0.02}; without the axes
        along which nothing was sent."""
        return dict(sorted(self.seconds.items()))


class StreamSecondsByAxis(SecondsByAxis):
    """The same on CUDA, by events on the current stream. make_event: gives a new one."""

    def __init__(self, make_event: Callable[[], Any] | None = None) -> None:
        super().__init__()
        make_event = make_event or partial(torch.cuda.Event, enable_timing=True)
        self._make_event = make_event
        self._pending: deque[tuple[str, Any, Any]] = deque()
        self._free: list[Any] = []
        self._origin, self._origin_seconds = make_event(), 0.0

    def start_clock(self) -> None:
        """Note what the host's clock says when the stream has come to this place."""
        self._origin.record()
        self._origin.synchronize()
        self._origin_seconds = time.perf_counter()

    def seconds_at(self, moment: Any) -> float:
        """When the stream came to an event, by the host's clock; waits until it has."""
        moment.synchronize()
        return self._origin_seconds + float(self._origin.elapsed_time(moment)) / 1e3

    def now(self) -> Any:
        """An event, recorded on the current stream."""
        event = self._free.pop() if self._free else self._make_event()
        event.record()
        return event

    def spent(self, collective: Collective, began: Any, started: Any = None) -> None:
        ended = self.now()
        self._pending.append((collective.axis, began, ended))
        if self.listener is not None:
            self.listener(collective, began, ended, started)
        if len(self._pending) >= MANY_PENDING:
            self._read()

    def clear(self) -> None:
        """Count from 0 again; what the stream has not come to yet counts later."""
        self._read()
        super().clear()

    def snapshot(self) -> dict[str, float]:
        self._read()
        return super().snapshot()

    def _read(self) -> None:
        """Add up the oldest pairs whose events the stream has passed."""
        while self._pending and self._pending[0][2].query():
            axis, began, ended = self._pending.popleft()
            self.add(axis, began.elapsed_time(ended) / 1e3)
            if self.listener is None:  # else it keeps them
                self._free += (began, ended)


@dataclass(frozen=True, slots=True)
class TimedWork:
    """Work that tells a timer how long the rank waits for it. started: the timer's moment at which
    the collective began to be started."""

    work: Work
    timer: SecondsByAxis
    collective: Collective
    started: Any

    def wait(self) -> None:
        """Return when the result is there; a wait that fails is not timed."""
        began = self.timer.now()
        self.work.wait()
        self.timer.spent(self.collective, began, self.started)


def timed_start(
    start: Callable[[], Work | None], timer: SecondsByAxis | None, collective: Collective
) -> Work | None:
    """Start a collective, timed where there is a timer; what to wait for, None where `start` has
    waited."""
    if timer is None:
        return start()
    began = timer.now()
    work = start()
    timer.spent(collective, began)
    return None if work is None else TimedWork(work, timer, collective, began)
