"""How far off a fit is on runs that it did not see: what a calibration is worth.

Twice: `folds` leaves out every k-th run of each table, so that others of its cluster and software
remain; `tables` leaves out whole tables, so that nothing of a place that only they know does. Both
start from priors: presets that were fitted to the same runs would know them already.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence

from mpctl.calibrate.fit import Fit
from mpctl.calibrate.runs import Constant, Priors, Run, constants_of

FOLDS = 5
NORMAL = 1.2533  # standard deviation to mean size of a normal
ROUNDS = 7
Residuals = dict[str, list[float]]  # by a run's id: log(estimated / measured)


def folds(runs: Sequence[Run], priors: Priors, *, count: int = FOLDS) -> Residuals:
    """Residuals of every run by constants fitted without its fold."""
    fold_of = assign_folds(runs, count)
    return _left_out(runs, fold_of, priors, dict.fromkeys(fold_of.values()))


def one_fold(runs: Sequence[Run], priors: Priors, fold: int, *, count: int = FOLDS) -> Residuals:
    """What `folds` returns of one fold's runs: one fit in place of `count`."""
    return _left_out(runs, assign_folds(runs, count), priors, [fold])


def assign_folds(runs: Sequence[Run], count: int = FOLDS) -> dict[str, int]:
    """A fold (0 to count - 1) for each run id: the runs of each table are dealt out in turn."""
    seen: dict[str, int] = {}
    fold_of: dict[str, int] = {}
    for run in runs:
        seen[run.group] = seen.get(run.group, -1) + 1
        fold_of[run.id] = seen[run.group] % count
    return fold_of


def tables(runs: Sequence[Run], priors: Priors) -> Residuals:
    """Residuals of every run by constants fitted without its table."""
    group_of = {run.id: run.group for run in runs}
    return _left_out(runs, group_of, priors, dict.fromkeys(group_of.values()))


def _left_out(
    runs: Sequence[Run], part_of: Mapping[str, Hashable], priors: Priors, parts: Iterable[Hashable]
) -> Residuals:
    """Residuals of each part by a fit to all others; a constant that no other run tells is its
    prior."""
    found: Residuals = {}
    untold = Fit(runs, constants_of(runs), priors).start
    for part in parts:
        others = [run for run in runs if part_of[run.id] != part]
        values = Fit(others, constants_of(others), priors).solve(rounds=ROUNDS)
        found |= residuals([run for run in runs if part_of[run.id] == part], untold | values)
    return found


def residuals(runs: Iterable[Run], values: Mapping[Constant, float]) -> Residuals:
    """log(estimated / measured) of every run, with these constants in place of the presets'."""
    return {run.id: run.residuals({c: v for c, v in values.items() if run.has(c)}) for run in runs}


def spread(found: Iterable[float]) -> float:
    """Standard deviation of a normal with this mean absolute value, which outliers pull less."""
    sizes = [abs(value) for value in found]
    return NORMAL * sum(sizes) / len(sizes) if sizes else 0.0
