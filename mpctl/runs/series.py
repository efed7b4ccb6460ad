"""Curves of runs: one metric over steps, tokens or time of training.

A metric is any number that a run's records have, by its key; `ALIASES` are shorter. Time is the sum
of the steps' seconds, so that hours in which a run lay still do not count.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

from mpctl.errors import InputError
from mpctl.rundir.scalars import ScalarPoint, ordered, points
from mpctl.runs.saved import SavedRun

X = Literal["step", "tokens", "time"]
ALIASES = {"val": "validation_loss", "lr": "learning_rate", "tokens/s": "tokens_per_second"}


@dataclass(frozen=True)
class Series:
    """One metric of one run; x and y are equally long, x in steps, tokens or seconds."""

    run: str
    metric: str
    x: tuple[float, ...]
    y: tuple[float, ...]

    def as_dict(self) -> dict[str, Any]:
        return {"run": self.run, "metric": self.metric, "x": list(self.x), "y": list(self.y)}


def metrics_of(run: SavedRun) -> list[str]:
    """Every metric that the run has a number of."""
    return ordered(name for record in run.records for p in points(record) for name in p.values)


def find_series(runs: Sequence[SavedRun], asked: Iterable[str], x: X) -> list[Series]:
    """Every metric asked for, of every run that has it.

    Raises InputError for a metric that none of the runs has; it lists those that there are.
    """
    names = [ALIASES.get(name, name) for name in asked]
    told = [(run, [p for r in run.records for p in points(r)], _places(run, x)) for run in runs]
    found = [_series(run.name, name, p, places) for name in names for run, p, places in told]
    missing = [name for name in names if not any(s.y for s in found if s.metric == name)]
    if missing:
        present = ordered(name for run in runs for name in metrics_of(run))
        raise InputError.of("unknown-metric", "--plot", _complaint(missing[0], runs),
                            _ways_out(missing[0], present))  # fmt: skip
    return [series for series in found if series.y]


def _complaint(name: str, runs: Sequence[SavedRun]) -> str:
    who = runs[0].name if len(runs) == 1 else f"none of the {len(runs)} runs"
    return f"{who} has no metric {name!r}"


def _ways_out(name: str, present: list[str]) -> str:
    if not present:
        return "there is no record of a step yet"
    near = difflib.get_close_matches(name, [*present, *ALIASES], n=1)
    guess = f"did you mean {near[0]}? " if near else ""
    short = ", ".join(f"{alias} for {name}" for alias, name in ALIASES.items() if name in present)
    return f"{guess}there are {', '.join(present)}" + (f" ({short})" if short else "")


def _series(run: str, metric: str, told: list[ScalarPoint], places: dict[int, float]) -> Series:
    found = [p for p in told if metric in p.values and p.step in places]
    return Series(run, metric, tuple(places[p.step] for p in found),
                  tuple(p.values[metric] for p in found))  # fmt: skip


def _places(run: SavedRun, x: X) -> dict[int, float]:
    """Where every step stands on the x axis; before the first step is 0."""
    steps = [record["step"] for record in run.records]
    before = [point.step for record in run.records[:1] for point in points(record)][:1]
    if x == "step":
        along: Iterable[float] = steps
    elif x == "tokens":
        along = (record["tokens"] for record in run.records)
    else:
        along = accumulate(record["step_seconds"] for record in run.records)
    return dict.fromkeys(before, 0.0) | dict(zip(steps, along, strict=True))
