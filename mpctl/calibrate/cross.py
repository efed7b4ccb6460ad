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
    places: dict[str, int] = {}
    at: dict[str, int] = {}
    for run in runs:  # of each table by turns
        places[run.group] = places.get(run.group, -1) + 1
        at[run.id] = places[run.group] % count
    return _left_out(runs, at, priors)


def tables(runs: Sequence[Run], priors: Priors) -> Residuals:
    return _left_out(runs, {run.id: run.group for run in runs}, priors)


def _left_out(runs: Sequence[Run], part_of: Mapping[str, Hashable], priors: Priors) -> Residuals:
    """Each part by a fit to all others; what they do not tell is its prior."""
    found: Residuals = {}
    untold = Fit(runs, constants_of(runs), priors).start
    for part in dict.fromkeys(part_of.values()):
        kept = [run for run in runs if part_of[run.id] != part]
        values = Fit(kept, constants_of(kept), priors).solve(rounds=ROUNDS)
        found |= residuals([run for run in runs if part_of[run.id] == part], untold | values)
    return found


def residuals(runs: Iterable[Run], values: Mapping[Constant, float]) -> Residuals:
    return {run.id: run.residuals({c: v for c, v in values.items() if run.has(c)}) for run in runs}


def spread(found: Iterable[float]) -> float:
    """A standard deviation by sizes, which an outlier pulls less."""
    sizes = [abs(value) for value in found]
    return NORMAL * sum(sizes) / len(sizes) if sizes else 0.0
