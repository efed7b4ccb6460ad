"""Estimate many constants from a few noisy residuals: a linear model with priors.

Residuals r change with shifts z by the slopes J: r + J z. A shift is in units of its prior's
standard deviation, so that its prior is a normal distribution of 1. What is left, e = r + J z, is
noise of a Student distribution with NU degrees of freedom, so that an odd run counts for less, and
of a scale s that is found with the shifts; its prior is worth PRIOR_RUNS runs of PRIOR_NOISE.
Expectation and maximization take turns (Dempster, Laird and Rubin 1977; for Student noise Lange,
Little and Taylor 1989): given weights w_i and s, z has the covariance C = (I + J' W J / s^2)^-1 and
the mean -C J' W r / s^2; given those, w_i = (NU + 1) / (NU + (e_i^2 + v_i) / s^2) with v_i = J_i C
J_i', and s^2 is the mean of w_i (e_i^2 + v_i) over runs and the prior's.

The residual of a run under a fit that did not see it is e_i / (1 - h_i), h_i = w_i v_i / s^2 (Cook
and Weisberg 1982): the linear model does not have to be solved again.

By hand, one constant, one run, J = 1, r = 0.3, s = 1 and w = 1: C = 1/2, z = -0.15, e = 0.15; left
out it is 0.3 again, as h = 1/2.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import log1p, sqrt
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

NU = 4.0  # of the noise; its quantile of 95 % is STUDENT
STUDENT = 2.132
PRIOR_NOISE, PRIOR_RUNS = 0.065, 6.0  # of a run, in the logarithm; benchmarks/results/measurements.md
TURNS = 12  # of expectation and maximization: weights change by less than a percent after
MOST = 0.95  # leverage of a run, beyond which leaving it out would say nothing
Rows = Sequence[Sequence[float]]


class Posterior(NamedTuple):
    """Shifts and what is known of them.

    shifts: means, in units of their priors; covariance: theirs. left: residuals that remain; sure:
    of each its variance for the shifts' sake; weights: 1.25 of a typical run, near 0 of an odd one.
    noise: scale of a run's own.
    """

    shifts: list[float]
    covariance: list[list[float]]
    left: list[float]
    sure: list[float]
    weights: list[float]
    noise: float

    @property
    def leverages(self) -> list[float]:
        """The part of its own residual that each run explains."""
        pairs = zip(self.sure, self.weights, strict=True)
        return [min(v * w / self.noise**2, MOST) for v, w in pairs]

    @property
    def left_out(self) -> list[float]:
        """The residual of each run under a fit without it."""
        return [e / (1 - h) for e, h in zip(self.left, self.leverages, strict=True)]

    @property
    def unsure(self) -> list[float]:
        """The variance of each run's estimate under a fit without it, without its noise."""
        return [v / (1 - h) for v, h in zip(self.sure, self.leverages, strict=True)]

    def variance(self, slopes: Sequence[float]) -> float:
        """The variance of a new run's estimate, of these slopes, without its noise."""
        import numpy as np

        row = np.asarray(slopes)
        return float(row @ np.asarray(self.covariance) @ row)


def find_posterior(
    residuals: Sequence[float], slopes: Rows, lows: Sequence[float], highs: Sequence[float], far: Collection[int] = ()
) -> Posterior:
    """The posterior of shifts between `lows` and `highs`.

    slopes: for each residual, its change by each shift. far: numbers of shifts that may be large,
    whose priors are Student distributions too.

    >>> posterior = find_posterior([0.1] * 9, [[0.1]] * 9, [-9.0], [9.0])
    >>> round(posterior.shifts[0], 2)
    -0.98
    """
    import numpy as np

    off, matrix = np.asarray(residuals), np.asarray(slopes)
    weights, noise, priors = np.ones(len(off)), PRIOR_NOISE, np.ones(len(lows))
    for _ in range(TURNS):
        scaled = (weights / noise**2)[:, None] * matrix
        covariance = np.linalg.inv(np.diag(priors) + matrix.T @ scaled)
        shifts = _within(-covariance @ scaled.T @ off, covariance, np.asarray(lows), np.asarray(highs))
        left, sure = off + matrix @ shifts, ((matrix @ covariance) * matrix).sum(axis=1)
        squares = left**2 + sure
        weights = (NU + 1) / (NU + squares / noise**2)
        noise = sqrt((PRIOR_RUNS * PRIOR_NOISE**2 + weights @ squares) / (PRIOR_RUNS + len(off)))
        for i in far:
            priors[i] = (NU + 1) / (NU + shifts[i] ** 2 + covariance[i, i])
    return Posterior(shifts.tolist(), covariance.tolist(), left.tolist(), sure.tolist(), weights.tolist(), noise)


def _within(mean: Array, covariance: Array, lows: Array, highs: Array) -> Array:
    """The mean within its bounds: a shift that would leave them stays at one, and the others have their
    mean given that (a conditioned normal distribution)."""
    import numpy as np

    found, held = mean, np.zeros(len(mean), bool)
    stay = np.zeros(len(mean))
    while (out := ~held & ((found < lows - 1e-9) | (found > highs + 1e-9))).any():
        stay[out] = np.clip(found, lows, highs)[out]
        held |= out
        pulls = np.linalg.solve(covariance[np.ix_(held, held)], (stay - mean)[held])
        found = np.where(held, stay, mean + covariance[:, held] @ pulls)
    return found


def cost(residuals: Sequence[float], shifts: Sequence[float], noise: float, far: Collection[int] = ()) -> float:
    """Minus the logarithm of the density of shifts and of what they leave, but for a constant, at
    this scale of the noise."""
    off = sum(_surprise(r / noise) for r in residuals)
    return off + sum(_surprise(z) if i in far else z * z / 2 for i, z in enumerate(shifts))


def _surprise(size: float) -> float:
    """Negative log density of Student's t with NU degrees of freedom, up to a constant."""
    return (NU + 1) / 2 * log1p(size * size / NU)
