"""Runs outside the band of their plans, to which no preset is fitted unless asked.

A fit makes a slow network card or a throttled GPU a property of the cluster. Nine of ten runs are expected in the
90 % band, so one outside in ten is no reason to stop; more are, and so is a single run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from shlex import quote

from typing_extensions import TypedDict  # pydantic needs it to validate them before Python 3.12

from mpctl.core.errors import InputError, Issue
from mpctl.core.units import seconds_text
from mpctl.measure.calibrate.runs import Run

EXPECTED = 0.1  # of runs outside the 90 % band
SLOW = "a slow host or network card, throttled clocks, other work on the nodes, data loading, a profiler or checkpoints"
FAST = "another job than this layout: model, sequence length, batch, ranks, data type; or a time that is not of a step"


class OutsideRun(TypedDict):
    """A run outside the band of its plan: its step as measured and planned, and the bounds of the band."""

    run: str
    measured_seconds: float
    planned_seconds: float
    low_seconds: float
    high_seconds: float


def outside_runs(runs: Iterable[Run]) -> list[OutsideRun]:
    """Return the runs whose step is outside the band of its plan, under the presets before a fit."""
    return [found for run in runs if (found := _outside(run))]


def _outside(run: Run) -> OutsideRun | None:
    seconds = run.measured.get("step_seconds")
    if seconds is None:  # a single layer
        return None
    planned = run.estimate()
    if planned.low <= seconds <= planned.high:
        return None
    return {
        "run": run.id,
        "measured_seconds": seconds,
        "planned_seconds": planned.total,
        "low_seconds": planned.low,
        "high_seconds": planned.high,
    }


def outside_issues(outside: Sequence[OutsideRun]) -> list[Issue]:
    """Return an issue for each run; the first of the slow and of the fast ones says what to look for."""
    first = {_is_slow(run): run for run in reversed(outside)}
    return [_issue(run, _hint(run) if first[_is_slow(run)] is run else "") for run in outside]


def _is_slow(run: OutsideRun) -> bool:
    return run["measured_seconds"] > run["planned_seconds"]


def _issue(run: OutsideRun, hint: str) -> Issue:
    band = f"{seconds_text(run['low_seconds'])} to {seconds_text(run['high_seconds'])}"
    measured, planned = seconds_text(run["measured_seconds"]), seconds_text(run["planned_seconds"])
    message = f"this run lies outside the band (measured {measured}, planned {planned}, band {band})"
    return Issue("outside-band", run["run"], message, hint)


def _hint(run: OutsideRun) -> str:
    name = quote(run["run"]) if Path(run["run"]).exists() else "LOG"
    return f"look for {SLOW if _is_slow(run) else FAST}; `mpctl why {name}` compares it part by part"


def require_inside(runs: Sequence[Run], outside: Sequence[OutsideRun]) -> None:
    """Raises InputError where more runs lie outside than a 90 % band expects."""
    if len(outside) <= EXPECTED * len(runs):
        return
    first, *others = outside_issues(outside)
    raise InputError([first._replace(hint=f"{first.hint}; --force fits to it anyway"), *others])
