"""The share of a run's time that went into steps that count, by the records of its steps.

The seconds of all steps, each counted once, over the time from the begin of the first to the end of
the last, without the time between two launches (launches.py), when nobody ran it. What is missing are steps
that were done again after a restart, saves and validations that training waited for, and restarts.
`time_spent` says how much of it went into saves, and between which steps the longest pauses lie.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from mpctl.records.rundir.launches import Away, seconds_away
from mpctl.records.rundir.metrics import is_number


@dataclass
class Goodput:
    """The goodput of the records that were added, oldest first.

    steps, seconds: of the steps that count, and the sum of their seconds up to each; began, ended:
    seconds since 1970; away: times without a launch.

    >>> goodput = Goodput()
    >>> for step, ended in ((1, 11.0), (2, 12.0), (3, 13.0), (2, 20.0), (3, 21.0)):
    ...     goodput.add({"step": step, "time": ended, "step_seconds": 1.0})
    >>> goodput.share == 3 / (21 - 10)
    True
    """

    steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    began: float | None = None
    ended: float = 0.0
    away: Sequence[Away] = ()

    def add(self, record: Mapping[str, Any]) -> None:
        """Count a record; a step that was done again replaces it and all after it."""
        ended, spent = record.get("time"), record["step_seconds"]
        if not is_number(ended):
            return
        if self.began is None:
            self.began = ended - spent
        kept = bisect_left(self.steps, record["step"])
        del self.steps[kept:], self.seconds[kept:]
        self.steps.append(record["step"])
        self.seconds.append((self.seconds[-1] if self.seconds else 0.0) + spent)
        self.ended = max(self.ended, ended)

    @property
    def share(self) -> float | None:
        """None before the first record, and where clocks went backwards."""
        if self.began is None:
            return None
        wall = self.ended - self.began - seconds_away(self.away, self.began, self.ended)
        return min(1.0, self.seconds[-1] / wall) if wall > 0 else None


def recorded_goodput(records: Iterable[Mapping[str, Any]], away: Sequence[Away] = ()) -> float | None:
    """The goodput of a run by its records, oldest first. away: times without a launch."""
    goodput = Goodput(away=away)
    for record in records:
        goodput.add(record)
    return goodput.share


class Pause(NamedTuple):
    """Seconds between the end of a step and the begin of the next one, `step`, without saves."""

    step: int
    seconds: float


@dataclass(frozen=True)
class TimeSpent:
    """The time from the begin of the first step to the end of the last, in seconds. steps: in steps
    that count; saves: in which training waited for a save; pauses: the rest, in order; away: between two
    launches, which is not part of wall."""

    wall: float
    steps: float
    saves: float
    pauses: Sequence[Pause]
    away: float = 0.0

    @property
    def paused(self) -> float:
        """Seconds of all pauses: restarts with the steps that were done again, and validations."""
        return max(0.0, self.wall - self.steps - self.saves)


def time_spent(records: Sequence[Mapping[str, Any]], away: Sequence[Away] = ()) -> TimeSpent | None:
    """Split the time of a run into steps, saves and pauses. records: oldest first; away: times without a launch. None
    if the records have no times or clocks went backwards."""
    timed = [record for record in records if is_number(record.get("time"))]
    if not timed:
        return None
    steps = sum(record["step_seconds"] for record in timed)
    absent = seconds_away(away, timed[0]["time"], timed[-1]["time"])
    wall = timed[-1]["time"] - timed[0]["time"] + timed[0]["step_seconds"] - absent
    stalls = [_stall(record) for record in timed]
    saves = sum(stalls[1:])  # what the first step waited for lies before it
    pauses = [
        Pause(record["step"], _between(before, record, away) - record["step_seconds"] - stall)
        for (before, record), stall in zip(pairwise(timed), stalls[1:], strict=True)
    ]
    return TimeSpent(wall, steps, saves, pauses, absent) if wall >= steps + saves > 0 else None


def _between(before: Mapping[str, Any], record: Mapping[str, Any], away: Sequence[Away]) -> float:
    """Seconds with a launch between the ends of two steps."""
    began, ended = before["time"], record["time"]
    return float(ended - began - seconds_away(away, began, ended))


def _stall(record: Mapping[str, Any]) -> float:
    seconds = record.get("save_stall_seconds")
    return float(seconds) if is_number(seconds) else 0.0
