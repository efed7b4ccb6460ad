"""The launches of a run, by the launchers' log, and the time between them, when nobody ran it.

Every launch writes its command as its first line, `2026-11-22T03:40:12Z $ mpctl launch ...`, a requeued job's too. A
launch has ended with its last line or record, whichever is later, since a killed one says nothing at its end.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from mpctl.records.rundir.metrics import is_number

LINE = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)Z (\$ )?")


class Away(NamedTuple):
    """A time without a launch, in seconds since 1970."""

    began: float
    ended: float


def read_times_away(log: Path, records: Iterable[Mapping[str, Any]]) -> list[Away]:
    """The times between the launches of a run, oldest first; none without a log. records: of its steps."""
    times = sorted(float(time) for record in records if is_number(time := record.get("time")))
    away: list[Away] = []
    last: float | None = None
    for moment, is_command in _lines(log):
        if is_command and last is not None:
            before = bisect_right(times, moment)
            began = max(last, times[before - 1] if before else last)
            away += [Away(began, moment)] if moment > began else []
        last = moment
    return away


def num_launches(log: Path) -> int:
    """How often a run was launched; 0 without a log."""
    return sum(is_command for _, is_command in _lines(log))


def seconds_away(away: Sequence[Away], began: float, ended: float) -> float:
    """The part of a time in which nobody ran the run, in seconds.

    >>> seconds_away([Away(2.0, 5.0), Away(8.0, 9.0)], 4.0, 10.0)
    2.0
    """
    return sum(max(0.0, min(ended, one.ended) - max(began, one.began)) for one in away)


def _lines(log: Path) -> Iterable[tuple[float, bool]]:
    """The time of each line, and whether it is a launch's command."""
    try:
        text = log.read_text("utf-8", errors="replace")
    except OSError:
        return
    for line in text.splitlines():
        if match := LINE.match(line):
            yield datetime.fromisoformat(f"{match[1]}+00:00").timestamp(), match[2] is not None
