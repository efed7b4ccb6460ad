"""A fit of own runs: the figures that they may have moved, where they ended and how sure that is.

By hand, a figure of 2 with a slack of 0.5: a shift of 1 makes it 2 e^0.5 = 3.3; one of 0 with a
unit of 3e-4 s: a shift of 1 makes it 3e-4 s, one of -1 leaves it 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, inf, log, sqrt
from typing import NamedTuple

from mpctl.measure.calibrate.posterior import Posterior
from mpctl.measure.calibrate.runs import Constant, Run

STEP = 0.3  # of a derivative, in units of a prior


@dataclass(frozen=True, slots=True)
class FreeFigure:
    """A figure that own runs may move.

    start: its value before them; unit: as in FREE; least, most: its bounds. A shift z is one of z
    standard deviations of its prior.
    """

    constant: Constant
    start: float
    unit: float
    least: float
    most: float

    @property
    def path(self) -> str:
        return self.constant.path

    @property
    def key(self) -> str:
        """Its key in the preset."""
        return ".".join((self.path, *(self.constant.layers or ())))

    def value(self, shift: float) -> float:
        """Its value after a shift."""
        slack = self.constant.slack
        moved = self.start + self.unit * shift if self.unit else self.start * exp(slack * shift)
        return min(max(moved, self.least), self.most)

    def shift(self, value: float) -> float:
        """The shift that leads to a value."""
        if self.unit:
            return (value - self.start) / self.unit
        return log(value / self.start) / self.constant.slack if value else -inf

    def change(self, shift: float) -> float:
        """Return the change made by a shift of this size: a fraction of the value, or a difference in its unit."""
        return self.unit * shift if self.unit else self.constant.slack * shift


class Prediction(NamedTuple):
    """Seconds of a step and the standard deviation of the logarithm of what is measured of it, the
    noise of a single run included."""

    seconds: float
    spread: float


@dataclass(frozen=True)
class OwnFit:
    """A fit of own runs.

    figures: those that may have moved; posterior: of their shifts; slopes: of each residual by each
    shift; owners: the number of each residual's run, the first of its repeats. before, fitted,
    left_out: residuals log(estimated / measured) by a run's id, under the presets, after the fit,
    and by a fit without its job. spreads: of the band of each runtime profile, by its name. doubts:
    in words, runs that contradict one another or all others; learnt: what the runs told, how sure
    it is, and of what they tell nothing; telling: which further runs would tell most, the first
    first.
    """

    runs: Sequence[Run]
    figures: Sequence[FreeFigure]
    posterior: Posterior
    slopes: Sequence[Sequence[float]]
    owners: Sequence[int]
    before: Mapping[str, list[float]]
    fitted: Mapping[str, list[float]]
    left_out: Mapping[str, list[float]]
    spreads: Mapping[str, float]
    doubts: Sequence[str] = ()
    learnt: Sequence[str] = ()
    telling: Sequence[str] = ()

    @property
    def values(self) -> dict[Constant, float]:
        """The fitted values."""
        pairs = zip(self.figures, self.posterior.shifts, strict=True)
        return {figure.constant: figure.value(shift) for figure, shift in pairs}

    @property
    def spread(self) -> float:
        """The widest spread of a profile's band."""
        return max(self.spreads.values())

    def predict(self, run: Run) -> Prediction:
        """Predict a run with these presets, measured or not. Any `step_seconds` will do: it cancels.
        Estimates the run once for each figure that it depends on."""
        own = [i for i, figure in enumerate(self.figures) if run.has(figure.constant)]
        shifts = self.posterior.shifts
        here = residuals_at(run, self.figures, own, shifts)
        slopes = [0.0] * len(self.figures)
        for i, changes in slopes_at(run, self.figures, own, shifts, here).items():
            slopes[i] = changes[0]
        spread = sqrt(self.posterior.variance(slopes) + self.posterior.noise**2)
        return Prediction(run.measured["step_seconds"] * exp(here[0]), spread)


def residuals_at(run: Run, figures: Sequence[FreeFigure], own: Sequence[int], shifts: Sequence[float]) -> list[float]:
    """A run's residuals at these shifts. own: numbers of the figures that it depends on."""
    return run.residuals({figures[i].constant: figures[i].value(shifts[i]) for i in own})


def slopes_at(
    run: Run, figures: Sequence[FreeFigure], own: Sequence[int], shifts: Sequence[float], here: Sequence[float]
) -> dict[int, list[float]]:
    """The slopes of a run's residuals, by the figures' numbers. here: its residuals there."""
    values = {figures[i].constant: figures[i].value(shifts[i]) for i in own}
    found = {}
    for i in own:
        figure = figures[i]
        step = STEP if figure.value(shifts[i] + STEP) != figure.most else -STEP
        moved = run.residuals({**values, figure.constant: figure.value(shifts[i] + step)})
        found[i] = [(a - b) / step for a, b in zip(moved, here, strict=True)]
    return found
