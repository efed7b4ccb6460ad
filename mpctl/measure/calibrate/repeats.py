"""Runs of one job: its repeats, which tell how far runs scatter and nothing of another layout.

They are fitted as one run of the median of their times. A single run to come scatters more than
such medians do, in the mean over jobs by the variance of the repeats about their mean: that of n
repeats of variance w^2 is w^2 (1 - 1/n) in expectation, and nothing for a job that ran once, whose
residual has all of w^2 already.

By hand, 1.0 s and 1.21 s: one run of 1.1 s, offsets log 1.1 = 0.095 and -0.095, a variance of
0.095^2 = 0.0091.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, log
from statistics import fmean, median, pvariance

from mpctl.core.units import seconds_text
from mpctl.measure.calibrate.runs import WAYS, Run

CONTRADICTS = 1.3  # slowest over fastest; published sweeps repeat within 5 to 25 %


@dataclass(frozen=True)
class Repeats:
    """The runs of one job, in their order, by their numbers; run: stands for all of them."""

    runs: Sequence[Run]
    numbers: Sequence[int]
    run: Run

    @property
    def offsets(self) -> list[list[float]]:
        """Residuals of each run minus those of `run`."""
        return [[log(time / own.measured[key]) for key, time in self.run.measured.items()] for own in self.runs]

    @property
    def variance(self) -> float:
        """The variance of the logarithms of the times of one layout's runs."""
        return fmean(map(pvariance, zip(*self.offsets, strict=True)))

    @property
    def contradiction(self) -> str | None:
        """Describe the slowest and the fastest run if they cannot both be right; else None."""
        if "step_seconds" not in self.run.measured:
            return None
        fast, *_, slow = sorted((self.runs[0], *self.runs), key=_seconds)
        if _seconds(slow) < CONTRADICTS * _seconds(fast):
            return None
        return (
            f"{fast.id} and {slow.id} are the same job and took {seconds_text(_seconds(fast))} and "
            f"{seconds_text(_seconds(slow))}: one of them ran another job, or was disturbed; "
            f"fitted is their median, {seconds_text(_seconds(self.run))}"
        )


def _seconds(run: Run) -> float:
    return run.measured["step_seconds"]


def find_repeats(runs: Sequence[Run]) -> list[Repeats]:
    """The runs by their jobs, in the order of the first of each. Runs repeat one another that have
    the same presets, model, layout and estimate: seeds and learning rates may differ. Raises
    InputError where a run cannot be estimated."""
    by_job: dict[tuple[object, ...], list[int]] = {}
    for number, run in enumerate(runs):
        pairs = zip(run.residuals({}), _times(run).values(), strict=True)
        estimated = tuple(f"{exp(residual) * time:.9g}" for residual, time in pairs)
        job = run.job
        key = (tuple(run.parts.items()), estimated, repr(job.model), repr(job.parallel))
        by_job.setdefault(key, []).append(number)
    found = []
    for numbers in by_job.values():
        own = [runs[n] for n in numbers]
        times = [_times(run) for run in own]
        typical = {key: exp(median(log(time[key]) for time in times)) for key in times[0]}
        found.append(Repeats(own, numbers, replace(own[0], measured=typical)))
    return found


def _times(run: Run) -> dict[str, float]:
    """Return the times to compare: that of the step, or of the layer's forward and backward."""
    keys = ["step_seconds"]
    if "step_seconds" not in run.measured:
        keys = [f"layer_{way}_ms" for way in WAYS]
    return {key: run.measured[key] for key in keys}
