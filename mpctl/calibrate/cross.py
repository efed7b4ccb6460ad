"""Cross-validation: the errors of a fit on runs that it did not see.

There are two kinds. `folds` leaves out every k-th run of each table, so that other runs of the same
cluster and software remain in the fit. `tables` leaves out whole tables, so that what only one
table says of a cluster or a software is lost. Both start from priors, because presets that were
fitted to the same runs already contain them.
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
    """Residuals of every run under constants fitted without its fold, of `count` folds."""
    fold_of = assign_folds(runs, count)
    return _left_out(runs, fold_of, priors, dict.fromkeys(fold_of.values()))


def one_fold(runs: Sequence[Run], priors: Priors, fold: int, *, count: int = FOLDS) -> Residuals:
    """The part of the result of `folds` for the runs of one fold: one fit instead of `count`."""
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
    """Residuals of every run under constants that were fitted without its table."""
    group_of = {run.id: run.group for run in runs}
    return _left_out(runs, group_of, priors, dict.fromkeys(group_of.values()))


def _left_out(
    runs: Sequence[Run], part_of: Mapping[str, Hashable], priors: Priors, parts: Iterable[Hashable]
) -> Residuals:
    """Residuals of the runs of each part under a fit to all other runs.

    part_of: part by run id. A constant on which none of the other runs depends has its prior.
    """
    found: Residuals = {}
    untold = Fit(runs, constants_of(runs), priors).start
    for part in parts:
        others = [run for run in runs if part_of[run.id] != part]
        values = Fit(others, constants_of(others), priors).solve(rounds=ROUNDS)
        found |= residuals([run for run in runs if part_of[run.id] == part], untold | values)
    return found


def residuals(runs: Iterable[Run], values: Mapping[Constant, float]) -> Residuals:
    """log(estimated / measured) by run id, with these values instead of those of the presets."""
    return {run.id: run.residuals({c: v for c, v in values.items() if run.has(c)}) for run in runs}


def spread(found: Iterable[float]) -> float:
    """Standard deviation of the normal distribution with the mean absolute value of these numbers.

    Outliers change it less than the usual standard deviation; 0 of no numbers.
    """
    sizes = [abs(value) for value in found]
    return NORMAL * sum(sizes) / len(sizes) if sizes else 0.0
