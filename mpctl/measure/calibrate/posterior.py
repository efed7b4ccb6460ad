"""What a few noisy residuals say about many constants: a linear model with priors.

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
from operator import mul
from typing import NamedTuple

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
        return float(sum(map(mul, slopes, _times(self.covariance, slopes))))


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
    weights, noise = [1.0] * len(residuals), PRIOR_NOISE
    priors = [1.0] * len(lows)
    for _ in range(TURNS):
        scaled = [w / noise**2 for w in weights]
        covariance = _covariance(slopes, scaled, priors)
        shifts = _mean(residuals, slopes, scaled, covariance, lows, highs)
        left = [r + sum(map(mul, row, shifts)) for r, row in zip(residuals, slopes, strict=True)]
        sure = [sum(map(mul, row, _times(covariance, row))) for row in slopes]
        squares = [e * e + v for e, v in zip(left, sure, strict=True)]
        weights = [(NU + 1) / (NU + s / noise**2) for s in squares]
        total = PRIOR_RUNS * PRIOR_NOISE**2 + sum(map(mul, weights, squares))
        noise = sqrt(total / (PRIOR_RUNS + len(residuals)))
        for i in far:
            priors[i] = (NU + 1) / (NU + shifts[i] ** 2 + covariance[i][i])
    return Posterior(shifts, covariance, left, sure, weights, noise)


def cost(residuals: Sequence[float], shifts: Sequence[float], noise: float, far: Collection[int] = ()) -> float:
    """Minus the logarithm of the density of shifts and of what they leave, but for a constant, at
    this scale of the noise."""
    off = sum(_surprise(r / noise) for r in residuals)
    return off + sum(_surprise(z) if i in far else z * z / 2 for i, z in enumerate(shifts))


def _surprise(size: float) -> float:
    """Negative log density of Student's t with NU degrees of freedom, up to a constant."""
    return (NU + 1) / 2 * log1p(size * size / NU)


def _covariance(slopes: Rows, scaled: Sequence[float], priors: Sequence[float]) -> list[list[float]]:
    """priors: the inverse of each shift's variance under its prior."""
    size = len(priors)
    matrix = [[0.0] * size for _ in range(size)]
    for row, weight in zip(slopes, scaled, strict=True):
        told = [(i, a) for i, a in enumerate(row) if a]
        for at, (i, a) in enumerate(told):
            line, pull = matrix[i], weight * a
            for j, b in told[: at + 1]:
                line[j] += pull * b
    for i in range(size):
        matrix[i][i] += priors[i]
    return inverse(matrix)


def _mean(
    residuals: Sequence[float],
    slopes: Rows,
    scaled: Sequence[float],
    covariance: Rows,
    lows: Sequence[float],
    highs: Sequence[float],
) -> list[float]:
    """The mean; a shift that would leave its bounds stays at one, and the others make up for it."""
    size = len(lows)
    right = [0.0] * size
    for r, row, weight in zip(residuals, slopes, scaled, strict=True):
        for i, a in enumerate(row):
            if a:
                right[i] -= weight * a * r
    free = _times(covariance, right)
    held: dict[int, float] = {}
    found = free
    for _ in range(size):
        out = [i for i in range(size) if i not in held and not lows[i] - 1e-9 <= found[i] <= highs[i] + 1e-9]
        if not out:
            break
        held |= {i: min(max(found[i], lows[i]), highs[i]) for i in out}
        found = _conditioned(free, covariance, held)
    return found


def _conditioned(mean: Sequence[float], covariance: Rows, held: dict[int, float]) -> list[float]:
    """The mean of a normal distribution where some components have these values."""
    at = list(held)
    off = [held[i] - mean[i] for i in at]
    own = inverse([[covariance[i][j] for j in at[: n + 1]] for n, i in enumerate(at)])
    pulls = _times(own, off)
    moved = [m + sum(covariance[i][j] * p for j, p in zip(at, pulls, strict=True)) for i, m in enumerate(mean)]
    return [held.get(i, value) for i, value in enumerate(moved)]


def _times(matrix: Rows, vector: Sequence[float]) -> list[float]:
    return [sum(map(mul, row, vector)) for row in matrix]


def inverse(matrix: Rows) -> list[list[float]]:
    """The inverse of a symmetric, positive definite matrix, of which only the lower half is read.

    >>> inverse([[4.0], [0.0, 16.0]])
    [[0.25, 0.0], [0.0, 0.0625]]
    """
    n = len(matrix)
    low: list[list[float]] = []  # Cholesky's factor, and below its inverse by rows
    for i in range(n):
        row: list[float] = []
        for j in range(i):
            row.append((matrix[i][j] - sum(map(mul, row, low[j]))) / low[j][j])
        row.append(sqrt(max(matrix[i][i] - sum(map(mul, row, row)), 1e-12)))
        low.append(row)
    turned = [[0.0] * n for _ in range(n)]  # [column][row] of the factor's inverse
    for j in range(n):
        column = turned[j]
        column[j] = 1 / low[j][j]
        for i in range(j + 1, n):
            column[i] = -sum(map(mul, low[i][j:i], column[j:i])) / low[i][i]
    return [
        [sum(map(mul, turned[max(i, j)][max(i, j) :], turned[min(i, j)][max(i, j) :])) for j in range(n)]
        for i in range(n)
    ]
