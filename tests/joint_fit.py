"""The presets that mpctl brings along, fitted together to all published runs, and how far off such a
fit is on runs that it did not see. For benchmarks/accuracy.py, benchmarks/own_runs.py and tests.

The residual of a run is r = log(estimated / measured). Its loss is about quadratic for |r| below
SOFT and linear beyond, so that one outlier has no more influence than any other run:
w (sqrt(r^2 + SOFT^2) - SOFT) / NOISE. A table of n runs has the weight n^(3/4), so that long tables
do not decide alone. Leaving a prior costs (shift / slack)^2 / 2, the shift being in the logarithm.
The minimum is found by damped Gauss-Newton steps (Levenberg-Marquardt) on a quadratic with the
loss's slope at the current residuals. A run is differentiated only by the constants on which it
depends, where the fit starts and where it no longer gains: nine tenths of the time are estimates.
Between, each step corrects the slopes by what it found (Broyden's rank-one update), which
scipy.optimize.least_squares has not: it measures slopes in each round, and takes three times as long.

Cross-validation leaves out runs in three ways. `fifths`: every fifth run of each table, so that
other runs of the same cluster and software remain in the fit. `tables`: full tables, so that
information about a cluster or software in one table only is lost. `clusters`: all runs on a
cluster. All start from priors, because presets that were fitted to the same runs already contain
them: the fit to all runs is made first, and each of the others continues from it without its runs
with the prior for constants that only those runs have.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import exp
from multiprocessing import get_context
from multiprocessing.pool import Pool
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve

from mpctl.core.units import seconds_text
from mpctl.measure.calibrate.runs import LARGEST_PART, SHARES, UNBOUNDED, Constant, Kind, Run, get_value

NOISE = 0.04  # of one run, in the logarithm: from replicates and unmodelled effects
SOFT = 0.02  # below it a residual counts by its square
ENOUGH = 2e-3  # part of the cost that a round must gain for another to follow
INNER = 3  # Gauss-Newton steps by the slopes alone, before runs are estimated again
HOPELESS = 1e6  # damping of steps that are too short to gain
ROUNDS = 8  # of a fit without some runs
STEP = 0.02  # of a derivative, in the logarithm
FOLDS = 5
# Constants that runs may change, and the slack of their priors in the logarithm.
SLACK: dict[Kind, dict[str, float]] = {
    "devices": {
        "kernels.products": 0.1,
        "kernels.memory": 0.08,
        "kernels.flash": 0.1,
        "kernels.flash_backward": 0.1,
        "kernels.misaligned": 0.08,
        "kernels.unaligned": 0.4,
        "kernels.narrow.fp8": 0.1,
        "kernels.narrow.mxfp8": 0.1,
        "kernels.narrow.nvfp4": 0.1,
    },
    "clusters": {
        "slowdown": 0.05,
        "intra_node.efficiency": 0.1,
        "inter_node.efficiency": 0.15,
        "inter_node.decay": 0.2,
    },
    "runtimes": {
        "operators.passes": 0.15,
        "operators.gradient_bytes": 0.3,
        "operators.optimizer_bytes": 0.25,
        "operators.cast_bytes": 0.4,
        "operators.flash": 0.2,
        "operators.flash_backward": 0.2,
        "overlap.tp": 0.2,
        "overlap.pp": 0.3,
        "overlap.dp": 0.3,
        "overlap.zero": 0.1,
        "overlap.products": 0.3,
        "overlap.cp": 0.3,
        "overlap.drag": 0.5,
        "host.layer": 0.4,
        "host.split": 0.5,
        "host.rank_in_pipeline": 0.3,
        "host.micro_batch": 0.5,
        "host.message": 0.5,
        "host.sync": 0.5,
        "host.step": 0.5,
    },
}
TIED = {"a100-80gb": ("a100-40gb",), "h100-sxm": ("h200",)}  # one chip: its efficiencies are shared
SCALED = "operators.hidden.forward"  # represents all of operators.passes
Priors = Mapping[str, float]  # by a constant's key; of operators.passes, hidden's forward
Values = Mapping[Constant, float]
Residuals = dict[str, list[float]]  # by a run's id: log(estimated / measured)
Array = NDArray[np.float64]


class LeftOut(NamedTuple):
    """Residuals of runs that a fit did not see, by kind of cross-validation."""

    fifths: Residuals
    tables: Residuals
    clusters: Residuals


def constants_of(runs: Sequence[Run]) -> list[Constant]:
    """The constants that can be fitted to these runs: those above 0 in a preset that a run uses.

    The slowdown of the first cluster with a device that has none in its preset is not among them:
    the device's constants describe that cluster, and others may be slower.
    """
    found: dict[Constant, None] = {}
    first: dict[str, str] = {}
    for run in runs:
        device, cluster = _family(run.parts["devices"])[0], run.parts["clusters"]
        if run.job.cluster.slowdown == 1:
            first.setdefault(device, cluster)
        for kind, slacks in SLACK.items():
            name, tied = _family(run.parts[kind])
            for path, slack in slacks.items():
                is_reference = path == "slowdown" and first.get(device) == cluster
                if get_value(run.model(kind), path) > 0 and not is_reference:
                    found[Constant(kind, name, path, slack, tied, _most(path))] = None
    return list(found)


def _most(path: str) -> float:
    """Upper bound of the constant at a path: a device reaches at most a share of its peak."""
    if path in ("kernels.products", "kernels.memory") or path.startswith("kernels.narrow"):
        return LARGEST_PART
    return 1.0 if path in SHARES else UNBOUNDED


def _family(name: str) -> tuple[str, tuple[str, ...]]:
    for first, others in TIED.items():
        if name in others:
            return first, others
    return name, TIED.get(name, ())


def get_prior(model: Any, constant: Constant, priors: Priors) -> float:
    """The prior of a constant: its value in `priors`, otherwise that in the preset."""
    if constant.key not in priors:
        return get_value(model, constant.path)
    value = priors[constant.key]
    return value / get_value(model, SCALED) if constant.path == "operators.passes" else value


def residuals(runs: Iterable[Run], values: Values) -> Residuals:
    """log(estimated / measured) by run id, with these values instead of those of the presets."""
    return {run.id: run.residuals({c: v for c, v in values.items() if run.has(c)}) for run in runs}


class State(NamedTuple):
    """Where a fit is. shift: of each constant from its prior, in the logarithm; residuals: of the runs
    that it sees, in a row; slopes: of each by each shift, [residuals, constants]."""

    shift: Array
    residuals: Array
    slopes: Array


@dataclass(frozen=True)
class JointFit:
    """A fit of constants to runs, by the processes of a pool (`open_fit`).

    priors: values by `Constant.key`; a preset's value otherwise. left_out: numbers of runs that the fit
    must not see.
    """

    runs: Sequence[Run]
    constants: Sequence[Constant]
    pool: Pool
    priors: Priors
    left_out: frozenset[int] = frozenset()

    def without(self, left_out: Collection[int]) -> JointFit:
        return replace(self, left_out=frozenset(left_out))

    @cached_property
    def used(self) -> list[int]:
        """Numbers of the runs that the fit sees."""
        return [at for at in range(len(self.runs)) if at not in self.left_out]

    @cached_property
    def owner(self) -> Array:
        """The number of each residual's run: one of a step, two of a single layer."""
        counts = [1 if "step_seconds" in self.runs[at].measured else 2 for at in self.used]
        return np.repeat(self.used, counts)

    @cached_property
    def weight(self) -> Array:
        """Weight of each residual: n^(-1/4) of a run in a group of n, which so has the weight n^(3/4)."""
        sizes, counts = Counter(self.runs[at].group for at in self.used), Counter(self.owner.tolist())
        return np.array([sizes[self.runs[at].group] ** -0.25 / counts[at] for at in self.owner.tolist()])

    @cached_property
    def start(self) -> Array:
        """The value from which each constant starts: its prior."""
        return np.array([get_prior(self._model(c), c, self.priors) for c in self.constants])

    @cached_property
    def slack(self) -> Array:
        return np.array([c.slack for c in self.constants])

    @cached_property
    def highest(self) -> Array:
        """The largest shift of each constant."""
        return np.log([c.most for c in self.constants]) - np.log(self.start)

    def _model(self, constant: Constant) -> Any:
        return next(run for run in self.runs if run.has(constant)).model(constant.kind)

    def values(self, shift: Array) -> dict[Constant, float]:
        return dict(zip(self.constants, (self.start * np.exp(shift)).tolist(), strict=True))

    def solve(self, *, rounds: int = 10, begin: State | None = None) -> State:
        """The state with the least cost that was found.

        rounds: Gauss-Newton steps at most. begin: that of a fit to all runs, which is near and whose
        slopes count as measured; when None, the values in presets.
        """
        state = self._seen(begin) if begin else self._measured(self._presets())
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

    def _presets(self) -> Array:
        """The shift at which the constants have the values of their presets: near the end of a fit
        to runs that they were fitted to before."""
        values = [get_value(self._model(c), c.path) for c in self.constants]
        return np.minimum(np.log(values) - np.log(self.start), self.highest)

    def _seen(self, full: State) -> State:
        """A state of the fit to all runs without those left out: constants on which no other run
        depends get their priors."""
        kept = np.isin(replace(self, left_out=frozenset()).owner, self.used)
        does_depend = [any(self.runs[at].has(c) for at in self.used) for c in self.constants]
        return State(np.where(does_depend, full.shift, 0.0), full.residuals[kept], full.slopes[kept])

    def _residuals(self, shift: Array) -> Array:
        return np.concatenate(self.pool.map(partial(_estimate, self.values(shift)), self.used, 8))

    def _measured(self, shift: Array) -> State:
        found = self.pool.map(partial(_differentiate, self.values(shift)), self.used, 4)
        rows = np.concatenate(found)
        return State(shift, rows[:, 0], rows[:, 1:])

    def _step(self, state: State, cost: float, damping: float) -> tuple[State, float]:
        """The state after a step that gains, and the damping for the next; where none gains, the
        last one tried."""
        while True:
            shift = state.shift
            for _ in range(INNER):
                shift = self._nearer(state, shift, damping)
            new = self._moved(state, shift)
            if self.cost(new) < cost:
                return new, damping / 5
            if damping > HOPELESS:
                return new, damping
            damping *= 5

    def _nearer(self, state: State, shift: Array, damping: float) -> Array:
        """A damped Gauss-Newton step from a shift, with the residuals that the state's slopes predict
        there."""
        there = state.residuals + state.slopes @ (shift - state.shift)
        pull = self.weight / np.sqrt(there**2 + SOFT**2) / NOISE
        slope = shift / self.slack**2 + state.slopes.T @ (pull * there)
        matrix = np.diag(self.slack**-2) + state.slopes.T @ (pull[:, None] * state.slopes)
        matrix += damping * np.diag(np.diag(matrix))
        return np.minimum(shift - cho_solve(cho_factor(matrix), slope), self.highest)

    def _moved(self, state: State, shift: Array) -> State:
        """The state at another shift. Slopes change along the way by the least that explains the
        residuals there (Broyden); a constant without any slope keeps none."""
        there, slopes = self._residuals(shift), state.slopes
        own = np.zeros((len(self.runs), len(shift)), bool)
        np.logical_or.at(own, self.owner, slopes != 0)
        way = np.where(own[self.owner], shift - state.shift, 0.0)
        length = (way**2).sum(axis=1)
        missing = there - state.residuals - (slopes * way).sum(axis=1)
        share = np.divide(missing, length, out=np.zeros_like(length), where=length >= 1e-8)
        return State(shift, there, slopes + share[:, None] * way)

    def cost(self, state: State) -> float:
        """The cost that the fit minimizes: weighted losses of the residuals, and the penalty of
        shifts."""
        loss = (np.sqrt(state.residuals**2 + SOFT**2) - SOFT) / NOISE
        return float(self.weight @ loss + ((state.shift / self.slack) ** 2).sum() / 2)


@contextmanager
def open_fit(
    runs: Sequence[Run], constants: Sequence[Constant], priors: Priors, processes: int | None = None
) -> Iterator[JointFit]:
    """A fit of these constants to these runs, with a process for each core."""
    with get_context("fork").Pool(processes, initializer=_begin, initargs=(runs, constants)) as pool:
        yield JointFit(runs, constants, pool, priors)


_HERE: dict[str, Any] = {}  # of a process of the pool: its runs, and the constants


def _begin(runs: Sequence[Run], constants: Sequence[Constant]) -> None:
    _HERE.update(runs=runs, constants=constants)


def _estimate(values: Values, at: int) -> Array:
    """A run's residuals."""
    run = _HERE["runs"][at]
    return np.array(run.residuals({c: v for c, v in values.items() if run.has(c)}))


def _differentiate(values: Values, at: int) -> Array:
    """A run's residuals, and of each its change by each shift to the right of it."""
    run, constants = _HERE["runs"][at], _HERE["constants"]
    here = {c: v for c, v in values.items() if run.has(c)}
    found = np.array(run.residuals(here))
    rows = np.zeros((len(found), 1 + len(constants)))
    rows[:, 0] = found
    for i, c in enumerate(constants, 1):
        if c in here:
            step = STEP if here[c] * exp(STEP) <= c.most else -STEP
            rows[:, i] = (np.array(run.residuals({**here, c: here[c] * exp(step)})) - found) / step
    return rows


def leave_out(fit: JointFit, full: State) -> LeftOut:
    """All three kinds: residuals of every run under constants fitted without its part.

    full: the fit to all runs, from which the others go on.
    """
    fold_of = assign_folds(fit.runs)
    table_of = {run.id: run.group for run in fit.runs}
    cluster_of = {run.id: run.parts["clusters"] for run in fit.runs}
    return LeftOut(*(_left_out(fit, full, part_of) for part_of in (fold_of, table_of, cluster_of)))


def assign_folds(runs: Sequence[Run]) -> dict[str, int]:
    """A fold (0 to FOLDS - 1) for each run id: the runs of each table are dealt out in turn."""
    seen: Counter[str] = Counter()
    fold_of: dict[str, int] = {}
    for run in runs:
        fold_of[run.id] = seen[run.group] % FOLDS
        seen[run.group] += 1
    return fold_of


def _left_out(fit: JointFit, full: State, part_of: Mapping[str, Hashable]) -> Residuals:
    """Residuals of the runs of each part under a fit to all other runs. part_of: part by run id."""
    found: Residuals = {}
    started, wanted = time.monotonic(), list(dict.fromkeys(part_of.values()))
    for done, part in enumerate(wanted, 1):
        out = [at for at, run in enumerate(fit.runs) if part_of[run.id] == part]
        shift = fit.without(out).solve(rounds=ROUNDS, begin=full).shift
        found |= residuals([fit.runs[at] for at in out], fit.values(shift))
        left = (time.monotonic() - started) / done * (len(wanted) - done)
        say(f"left out {part} ({done} of {len(wanted)}), {seconds_text(left)} left")
    return found


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
