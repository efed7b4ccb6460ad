"""Fitting constants to measured runs, and the errors of a fit on runs that it did not see.

The residual of a run is r = log(estimated / measured). Its loss is about quadratic for small |r|
and linear for large |r|, so that one outlier has no more influence than any other run. A table of n
runs has the weight n^(3/4), so that long tables do not decide alone. Leaving a prior costs (shift /
slack)^2 / 2, the shift being in the logarithm. The minimum is found by damped Gauss-Newton steps
(Levenberg-Marquardt) on a quadratic with the loss's slope at the current residuals. A run is
differentiated only by the constants on which it depends. Slopes are measured where the fit starts
and where it no longer gains; between, each step corrects them by what it found (Broyden's rank-one
update).

Cross-validation leaves out runs in three ways. `fifths`: every fifth run of each table, so that
other runs of the same cluster and software remain in the fit. `tables`: full tables, so that
information about a cluster or software in one table only is lost. `clusters`: all runs on a
cluster. All start from priors, because presets that were fitted to the same runs already contain
them: the fit to all runs is made first, and each of the others continues from it without its runs,
with the prior for constants that only those runs have.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import exp, log, sqrt
from operator import mul
from typing import NamedTuple

from mpctl.core.units import seconds_text
from mpctl.measure.calibrate.evaluate import Evaluate, RunEvaluation, own_constants
from mpctl.measure.calibrate.runs import Constant, Priors, Run, get_prior, get_value

NOISE = 0.04  # of one run, in the logarithm: from replicates and unmodelled effects
SOFT = 0.02  # below it a residual counts by its square
ENOUGH = 2e-3  # part of the cost that a round must gain for another to follow
INNER = 3  # Gauss-Newton steps by the slopes alone, before runs are estimated again
HOPELESS = 1e6  # damping of steps that are too short to gain
Shift = Mapping[Constant, float]  # in the logarithm, from the priors
Say = Callable[[str], None]


def say_nothing(text: str) -> None:
    """Report progress to nobody."""


@dataclass(frozen=True)
class FitState:
    """The state of a fit.

    shift: of each constant from its prior; found: each run's evaluation there, by its number.
    """

    shift: Shift
    found: Mapping[int, RunEvaluation]


@dataclass(frozen=True)
class Fit:
    """A fit of constants to runs.

    evaluate: of these runs by these constants (`open_evaluator`). priors: values by `Constant.key`;
    a preset's value otherwise. left_out: numbers of runs that the fit must not see.
    """

    runs: Sequence[Run]
    constants: Sequence[Constant]
    evaluate: Evaluate
    priors: Priors = field(default_factory=dict)
    left_out: Collection[int] = frozenset()

    def without(self, left_out: Collection[int]) -> Fit:
        return replace(self, left_out=frozenset(left_out))

    @cached_property
    def start(self) -> dict[Constant, float]:
        """The value from which each constant starts: its prior."""
        found = {}
        for c in self.constants:
            run = next(run for run in self.runs if run.has(c))
            found[c] = get_prior(run.model(c.kind), c, self.priors)
        return found

    @cached_property
    def used(self) -> list[int]:
        """Numbers of the runs that the fit sees."""
        return [at for at in range(len(self.runs)) if at not in self.left_out]

    @cached_property
    def weight(self) -> dict[int, float]:
        """Weight of each run, n^(-1/4) in a group of n runs: the group has the weight n^(3/4)."""
        sizes = Counter(self.runs[at].group for at in self.used)
        return {at: sizes[self.runs[at].group] ** -0.25 for at in self.used}

    @cached_property
    def own(self) -> list[list[int]]:
        """Numbers of the constants that each run depends on."""
        number = {c: i for i, c in enumerate(self.constants)}
        return [[number[c] for c in own] for own in own_constants(self.runs, self.constants)]

    @cached_property
    def _presets(self) -> Shift:
        """The shift at which the constants have the values of their presets: near the end of a fit
        to runs that they were fitted to before."""
        found = {}
        for c in self.constants:
            run = next(run for run in self.runs if run.has(c))
            value = min(get_value(run.model(c.kind), c.path), c.most)
            found[c] = log(value / self.start[c])
        return found

    def values(self, shift: Shift) -> dict[Constant, float]:
        return {c: self.start[c] * exp(shift[c]) for c in self.constants}

    def solve(self, *, rounds: int = 10, begin: FitState | None = None, say: Say = say_nothing) -> FitState:
        """The state with the least cost that was found.

        rounds: Gauss-Newton steps at most. begin: a state of a fit to more runs, which is near and
        whose slopes count as measured; when None, the values in presets. say: called with a line of
        text after each round.
        """
        state = self._known(begin) if begin else self._measured(self._presets)
        damping, is_measured = 0.01 if begin else 1.0, True
        cost = self.cost(state)
        for turn in range(rounds):
            new, damping = self._step(state, cost, damping)
            gain = cost - self.cost(new)
            if gain > 0:
                state, cost = new, cost - gain
            say(f"round {turn + 1}: cost {cost:.2f}")
            is_stuck = gain < ENOUGH * cost
            if is_stuck and (is_measured or begin):
                break
            if is_stuck:
                state, damping = self._measured(state.shift), 0.01
            is_measured = is_stuck
        return state

    def _known(self, begin: FitState) -> FitState:
        """A state of a fit to more runs as a state of this fit: constants on which none of its runs
        depends get their priors."""
        seen = {i for at in self.used for i in self.own[at]}
        shift = {c: begin.shift[c] if i in seen else 0.0 for i, c in enumerate(self.constants)}
        return FitState(shift, {at: begin.found[at] for at in self.used})

    def _measured(self, shift: Shift) -> FitState:
        return FitState(shift, self.evaluate(self.values(shift), self.used, True))

    def _step(self, state: FitState, cost: float, damping: float) -> tuple[FitState, float]:
        """The state after a step that gains, and the damping for the next; where none gains, the
        last one tried."""
        while True:
            shift = state.shift
            for _ in range(INNER):
                shift = self._nearer(self._predicted(state, shift), damping)
            new = self._moved(state, shift)
            if self.cost(new) < cost:
                return new, damping / 5
            if damping > HOPELESS:
                return new, damping
            damping *= 5

    def _nearer(self, state: FitState, damping: float) -> Shift:
        step = solve_definite(*self._normal(state), damping)
        return {
            c: min(state.shift[c] - d, log(c.most / self.start[c])) for c, d in zip(self.constants, step, strict=True)
        }

    def _predicted(self, state: FitState, shift: Shift) -> FitState:
        """The state at another shift, extrapolated by its slopes."""
        moves = [shift[c] - state.shift[c] for c in self.constants]
        found = {}
        for at, (residuals, slopes) in state.found.items():
            way = [moves[i] for i in self.own[at]]
            there = [
                r + sum(row[k] * move for row, move in zip(slopes, way, strict=True)) for k, r in enumerate(residuals)
            ]
            found[at] = RunEvaluation(there, slopes)
        return FitState(shift, found)

    def _moved(self, state: FitState, shift: Shift) -> FitState:
        """The state at another shift, with slopes corrected by the residuals there (Broyden)."""
        there = self.evaluate(self.values(shift), self.used, False)
        moves = [shift[c] - state.shift[c] for c in self.constants]
        found = {}
        for at in self.used:
            way = [moves[i] for i in self.own[at]]
            found[at] = _corrected(state.found[at], there[at].residuals, way)
        return FitState(shift, found)

    def cost(self, state: FitState) -> float:
        """The cost that the fit minimizes: weighted losses of the residuals, and the penalty of
        shifts."""
        off = 0.0
        for at in self.used:
            residuals = state.found[at].residuals
            off += self.weight[at] * sum(map(_loss, residuals)) / len(residuals)
        return off + sum((state.shift[c] / c.slack) ** 2 for c in self.constants) / 2

    def _normal(self, state: FitState) -> tuple[list[list[float]], list[float]]:
        """Normal equations (matrix, right side) of the weighted least squares at this state."""
        size = len(self.constants)
        matrix = [[0.0] * size for _ in range(size)]
        slope = [state.shift[c] / c.slack**2 for c in self.constants]
        for i, c in enumerate(self.constants):
            matrix[i][i] = 1 / c.slack**2
        for at in self.used:
            residuals, slopes = state.found[at]
            columns = [(i, row) for i, row in zip(self.own[at], slopes, strict=True) if any(row)]
            for k, r in enumerate(residuals):
                pull = self.weight[at] * _pull(r) / len(residuals)
                for i, a in columns:
                    slope[i] += pull * r * a[k]
                    row = matrix[i]
                    for j, b in columns:
                        row[j] += pull * a[k] * b[k]
        return matrix, slope


def _corrected(found: RunEvaluation, residuals: list[float], way: Sequence[float]) -> RunEvaluation:
    """The evaluation after a move: slopes change along it by the least that explains the new
    residuals.

    A constant without any slope keeps none.
    """
    moved = [i for i, row in enumerate(found.slopes) if any(row) and way[i]]
    length = sum(way[i] ** 2 for i in moved)
    if length < 1e-8:
        return RunEvaluation(residuals, found.slopes)
    slopes = [list(row) for row in found.slopes]
    for k, (old, new) in enumerate(zip(found.residuals, residuals, strict=True)):
        missing = new - old - sum(found.slopes[i][k] * way[i] for i in moved)
        for i in moved:
            slopes[i][k] += missing * way[i] / length
    return RunEvaluation(residuals, slopes)


def _loss(r: float) -> float:
    """The loss of a residual in units of NOISE: quadratic up to about SOFT, then linear."""
    return (sqrt(r * r + SOFT * SOFT) - SOFT) / NOISE


def _pull(r: float) -> float:
    return 1 / (sqrt(r * r + SOFT * SOFT) * NOISE)


def solve_definite(matrix: Sequence[Sequence[float]], right: Sequence[float], damping: float) -> list[float]:
    """x of (M + damping diag(M)) x = right, by Cholesky; M is symmetric and positive definite."""
    n = len(right)
    low = [[0.0] * n for _ in range(n)]
    first = [next(j for j, value in enumerate(row) if value) for row in matrix]  # left of it: 0
    for i in range(n):
        for j in range(first[i], i + 1):
            k = max(first[i], first[j])
            value = matrix[i][j] * (1 + damping if i == j else 1)
            value -= sum(map(mul, low[i][k:j], low[j][k:j]))
            low[i][j] = sqrt(max(value, 1e-12)) if i == j else value / low[j][j]
    y: list[float] = []
    for i in range(n):
        y.append((right[i] - sum(map(mul, low[i][:i], y))) / low[i][i])
    x = [0.0] * n
    for i in range(n - 1, -1, -1):
        x[i] = (y[i] - sum(low[k][i] * x[k] for k in range(i + 1, n))) / low[i][i]
    return x


FOLDS = 5
ROUNDS = 8
Residuals = dict[str, list[float]]  # by a run's id: log(estimated / measured)


class LeftOut(NamedTuple):
    """Residuals of runs that a fit did not see, by kind of cross-validation."""

    fifths: Residuals
    tables: Residuals
    clusters: Residuals


def leave_out(fit: Fit, full: FitState, *, say: Say = say_nothing) -> LeftOut:
    """All three kinds: residuals of every run under constants fitted without its part.

    full: the state of the fit to all runs, in which the others begin.
    """
    fold_of = assign_folds(fit.runs)
    table_of = {run.id: run.group for run in fit.runs}
    cluster_of = {run.id: run.parts["clusters"] for run in fit.runs}
    return LeftOut(*(_left_out(fit, full, part_of, say) for part_of in (fold_of, table_of, cluster_of)))


def assign_folds(runs: Sequence[Run]) -> dict[str, int]:
    """A fold (0 to FOLDS - 1) for each run id: the runs of each table are dealt out in turn."""
    seen: dict[str, int] = {}
    fold_of: dict[str, int] = {}
    for run in runs:
        seen[run.group] = seen.get(run.group, -1) + 1
        fold_of[run.id] = seen[run.group] % FOLDS
    return fold_of


def _left_out(fit: Fit, full: FitState, part_of: Mapping[str, Hashable], say: Say) -> Residuals:
    """Residuals of the runs of each part under a fit to all other runs.

    part_of: part by run id. A constant on which none of the other runs depends has its prior.
    """
    found: Residuals = {}
    started, wanted = time.monotonic(), list(dict.fromkeys(part_of.values()))
    for done, part in enumerate(wanted, 1):
        out = [at for at, run in enumerate(fit.runs) if part_of[run.id] == part]
        others = fit.without(out)
        state = others.solve(rounds=ROUNDS, begin=full)
        evaluated = fit.evaluate(others.values(state.shift), out, False)
        found |= {fit.runs[at].id: evaluated[at].residuals for at in out}
        left = (time.monotonic() - started) / done * (len(wanted) - done)
        say(f"left out {part} ({done} of {len(wanted)}), {seconds_text(left)} left")
    return found


def residuals(runs: Iterable[Run], values: Mapping[Constant, float]) -> Residuals:
    """log(estimated / measured) by run id, with these values instead of those of the presets."""
    return {run.id: run.residuals({c: v for c, v in values.items() if run.has(c)}) for run in runs}
