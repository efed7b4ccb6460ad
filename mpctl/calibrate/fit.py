"""Fitting constants to measured runs.

The residual of a run is r = log(estimated / measured). Its loss is about quadratic for small |r|
and linear for large |r|, so that one odd run pulls no harder than any other. A table of n runs has
the weight n^(3/4), so that long tables do not decide alone. Leaving a prior costs
(shift / slack)^2 / 2, the shift being in the logarithm. The minimum is found by damped Gauss-Newton
steps (Levenberg-Marquardt) on a quadratic with the loss's slope at the current residuals. A run is
differentiated only by the constants on which it depends.

By hand, with one constant c to which a step is proportional, and no prior: runs that are 1.1, 1.2
and 1.5 times as slow as estimated with c = 1 give c of about 1.2, the median.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import exp, log, sqrt

from mpctl.calibrate.runs import Constant, Priors, Run, get_prior

NOISE = 0.04  # of one run, in the logarithm: what replicates and unmodelled effects leave
SOFT = 0.02  # below it a residual counts by its square
STEP = 0.02  # of a derivative, in the logarithm
ENOUGH = 1e-3  # part of the cost that a round must gain for another to follow
Shift = Mapping[Constant, float]  # in the logarithm, from the priors


@dataclass(frozen=True)
class Fit:
    """A fit of constants to runs. priors: values by `Constant.key`; a preset's value otherwise."""

    runs: Sequence[Run]
    constants: Sequence[Constant]
    priors: Priors = field(default_factory=dict)

    @cached_property
    def start(self) -> dict[Constant, float]:
        """The value from which each constant starts: its prior."""
        found = {}
        for c in self.constants:
            run = next(run for run in self.runs if run.has(c))
            found[c] = get_prior(run.model(c.kind), c, self.priors)
        return found

    @cached_property
    def weight(self) -> list[float]:
        """Weight of each run, n^(-1/4) in a group of n runs: the group has the weight n^(3/4)."""
        sizes = Counter(run.group for run in self.runs)
        return [sizes[run.group] ** -0.25 for run in self.runs]

    @cached_property
    def own(self) -> list[list[Constant]]:
        """The constants that each run depends on."""
        return [[c for c in self.constants if run.has(c)] for run in self.runs]

    def solve(
        self, *, rounds: int = 10, say: Callable[[str], None] = lambda text: None
    ) -> dict[Constant, float]:
        """The values of all constants with the least cost that was found.

        rounds: Gauss-Newton steps at most. say: called with a line of text after each.
        """
        shift = dict.fromkeys(self.constants, 0.0)
        damping, residuals = 1.0, self._residuals(shift)
        cost = self._cost(residuals, shift)
        for turn in range(rounds):
            matrix, slope = self._normal(residuals, shift)
            while True:
                step = _solved(matrix, slope, damping)
                moved = {
                    c: min(shift[c] - d, log(c.most / self.start[c]))
                    for c, d in zip(self.constants, step, strict=True)
                }
                tried = self._residuals(moved)
                new = self._cost(tried, moved)
                if new < cost or damping > 1e6:
                    break
                damping *= 5
            gain = cost - new
            if gain > 0:
                shift, residuals, cost, damping = moved, tried, new, damping / 5
            say(f"round {turn}: cost {cost:.2f}")
            if gain < ENOUGH * cost:
                break
        return {c: self._value(c, shift) for c in self.constants}

    def _value(self, constant: Constant, shift: Shift) -> float:
        return self.start[constant] * exp(shift[constant])

    def _run(self, at: int, shift: Shift) -> list[float]:
        return self.runs[at].residuals({c: self._value(c, shift) for c in self.own[at]})

    def _residuals(self, shift: Shift) -> list[list[float]]:
        return [self._run(at, shift) for at in range(len(self.runs))]

    def _cost(self, residuals: Sequence[Sequence[float]], shift: Shift) -> float:
        off = sum(
            weight * _loss(r) / len(found)
            for weight, found in zip(self.weight, residuals, strict=True) for r in found
        )  # fmt: skip
        return off + sum((shift[c] / c.slack) ** 2 for c in self.constants) / 2

    def _normal(
        self, residuals: Sequence[Sequence[float]], shift: Shift
    ) -> tuple[list[list[float]], list[float]]:
        """Normal equations (matrix, right side) of the weighted least squares at this shift.

        Derivatives are finite differences of the residuals.
        """
        index = {c: i for i, c in enumerate(self.constants)}
        size = len(index)
        matrix = [[0.0] * size for _ in range(size)]
        slope = [0.0] * size
        for c, i in index.items():
            matrix[i][i] += 1 / c.slack**2
            slope[i] += shift[c] / c.slack**2
        for at, found in enumerate(residuals):
            columns = []
            for c in self.own[at]:
                moved = self._run(at, {**shift, c: shift[c] + STEP})
                slopes = [(a - b) / STEP for a, b in zip(moved, found, strict=True)]
                columns.append((index[c], slopes))
            for k, r in enumerate(found):
                pull = self.weight[at] * _pull(r) / len(found)
                for i, a in columns:
                    slope[i] += pull * r * a[k]
                    for j, b in columns:
                        matrix[i][j] += pull * a[k] * b[k]
        return matrix, slope


def _loss(r: float) -> float:
    """The loss of a residual in units of NOISE: quadratic up to about SOFT, then linear."""
    return (sqrt(r * r + SOFT * SOFT) - SOFT) / NOISE


def _pull(r: float) -> float:
    return 1 / (sqrt(r * r + SOFT * SOFT) * NOISE)


def _solved(
    matrix: Sequence[Sequence[float]], right: Sequence[float], damping: float
) -> list[float]:
    """x of (M + damping diag(M)) x = right, by Cholesky; M is symmetric and positive definite."""
    n = len(right)
    low = [[0.0] * n for _ in range(n)]
    for i in range(n):
        for j in range(i + 1):
            value = matrix[i][j] * (1 + damping if i == j else 1)
            value -= sum(a * b for a, b in zip(low[i][:j], low[j][:j], strict=True))
            low[i][j] = sqrt(max(value, 1e-12)) if i == j else value / low[j][j]
    y: list[float] = []
    for i in range(n):
        y.append((right[i] - sum(low[i][k] * y[k] for k in range(i))) / low[i][i])
    x = [0.0] * n
    for i in range(n - 1, -1, -1):
        x[i] = (y[i] - sum(low[k][i] * x[k] for k in range(i + 1, n))) / low[i][i]
    return x
