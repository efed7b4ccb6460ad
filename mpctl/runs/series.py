"""Curves of runs: one metric over steps, tokens or training time; schema mpctl.series/1.

A metric is any number in a run's records, by its key; `ALIASES` are shorter names. Training time is
the sum of the steps' seconds, so that the time between an interruption and the resumption does not
count.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, TypedDict

from mpctl.errors import InputError
from mpctl.rundir.scalars import ordered, points
from mpctl.runs.saved import SavedRun

X = Literal["step", "tokens", "time"]
ALIASES = {"val": "validation_loss", "lr": "learning_rate", "tokens/s": "tokens_per_second"}


class Curve(TypedDict):
    """One metric of one run as JSON; x and y are equally long."""

    run: str
    metric: str
    x: list[float]
    y: list[float]


class SeriesDocument(TypedDict):
    """What `mpctl show --plot --json` prints. x: the unit of the curves' x."""

    schema: Literal["mpctl.series/1"]
    x: X
    series: list[Curve]


@dataclass(frozen=True)
class Series:
    """One metric of one run; x and y are equally long, x in steps, tokens or seconds."""

    run: str
    metric: str
    x: tuple[float, ...]
    y: tuple[float, ...]

    def as_dict(self) -> Curve:
        """The curve as JSON."""
        return {"run": self.run, "metric": self.metric, "x": list(self.x), "y": list(self.y)}


def series_document(series: Sequence[Series], x: X) -> SeriesDocument:
    """The curves as JSON."""
    return {"schema": "mpctl.series/1", "x": x, "series": [one.as_dict() for one in series]}


def metrics_of(run: SavedRun) -> list[str]:
    """The names of all metrics for which the run has a number."""
    return ordered(name for record in run.records for p in points(record) for name in p.values)


def find_series(runs: Sequence[SavedRun], metrics: Iterable[str], x: X) -> list[Series]:
    """A curve for each metric and each run that has it; runs must have been read by `open_runs`.

    Raises InputError, with the metrics that there are, for one that none of the runs has.
    """
    names = [ALIASES.get(name, name) for name in metrics]
    series = [_series(run, name, x) for name in names for run in runs]
    missing = [name for name in names if not any(s.y for s in series if s.metric == name)]
    if missing:
        present = ordered(name for run in runs for name in metrics_of(run))
        message, hint = _complaint(missing[0], runs), _ways_out(missing[0], present)
        raise InputError.of("unknown-metric", "--plot", message, hint)
    return [one for one in series if one.y]


def _complaint(name: str, runs: Sequence[SavedRun]) -> str:
    who = runs[0].name if len(runs) == 1 else f"none of the {len(runs)} runs"
    return f"{who} has no metric {name!r}"


def _ways_out(name: str, present: list[str]) -> str:
    if not present:
        return "no step has been recorded yet"
    near = difflib.get_close_matches(name, [*present, *ALIASES], n=1)
    guess = f"did you mean {near[0]}? " if near else ""
    short = ", ".join(f"{alias} for {name}" for alias, name in ALIASES.items() if name in present)
    return f"{guess}there are {', '.join(present)}" + (f" ({short})" if short else "")


def _series(run: SavedRun, metric: str, x: X) -> Series:
    x_of_step = _x_of_step(run, x)
    pairs = [
        (x_of_step[point.step], point.values[metric])
        for record in run.records
        for point in points(record)
        if metric in point.values and point.step in x_of_step
    ]
    return Series(run.name, metric, tuple(x for x, _ in pairs), tuple(y for _, y in pairs))


def _x_of_step(run: SavedRun, x: X) -> dict[int, float]:
    """The x coordinate of every step; 0 before the first one."""
    steps = [record["step"] for record in run.records]
    before = [point.step for record in run.records[:1] for point in points(record)][:1]
    if x == "step":
        along: Iterable[float] = steps
    elif x == "tokens":
        along = (record["tokens"] for record in run.records)
    else:
        along = accumulate(record["step_seconds"] for record in run.records)
    return dict.fromkeys(before, 0.0) | dict(zip(steps, along, strict=True))
