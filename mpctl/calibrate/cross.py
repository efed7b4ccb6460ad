"""Cross-validation: the errors of a fit on runs that it did not see.

There are three kinds. `fifths` leaves out every fifth run of each table, so that other runs of the
same cluster and software remain in the fit. `tables` leaves out whole tables, so that what only one
table says of a cluster or a software is lost; `clusters` all runs on a cluster. All start from
priors, because presets that were fitted to the same runs already contain them: the fit to all runs
is made first, and each of the others goes on from there without its runs, back to the prior where
only those told a constant.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

from mpctl.calibrate.fit import Fit, FitState, Say, say_nothing
from mpctl.calibrate.runs import Constant, Run
from mpctl.units import seconds_text

FOLDS = 5
ROUNDS = 8
Residuals = dict[str, list[float]]  # by a run's id: log(estimated / measured)


class LeftOut(NamedTuple):
    """Residuals of runs that a fit did not see, by what was left out with them."""

    fifths: Residuals
    tables: Residuals
    clusters: Residuals


def leave_out(fit: Fit, whole: FitState, *, say: Say = say_nothing) -> LeftOut:
    """All three kinds.

    whole: the state of the fit to all runs, in which the others begin.
    """
    table_of = {run.id: run.group for run in fit.runs}
    cluster_of = {run.id: run.parts["clusters"] for run in fit.runs}
    return LeftOut(
        folds(fit, whole, say=say),
        _left_out(fit, whole, table_of, dict.fromkeys(table_of.values()), say),
        _left_out(fit, whole, cluster_of, dict.fromkeys(cluster_of.values()), say),
    )


def folds(fit: Fit, whole: FitState, *, count: int = FOLDS, say: Say = say_nothing) -> Residuals:
    """Residuals of every run under constants fitted without its fold, of `count` folds.

    whole: the state of the fit to all runs, in which the others begin.
    """
    fold_of = assign_folds(fit.runs, count)
    return _left_out(fit, whole, fold_of, dict.fromkeys(fold_of.values()), say)


def one_fold(fit: Fit, whole: FitState, fold: int, *, count: int = FOLDS) -> Residuals:
    """The part of the result of `folds` for the runs of one fold: one fit instead of `count`."""
    return _left_out(fit, whole, assign_folds(fit.runs, count), [fold], say_nothing)


def assign_folds(runs: Sequence[Run], count: int = FOLDS) -> dict[str, int]:
    """A fold (0 to count - 1) for each run id: the runs of each table are dealt out in turn."""
    seen: dict[str, int] = {}
    fold_of: dict[str, int] = {}
    for run in runs:
        seen[run.group] = seen.get(run.group, -1) + 1
        fold_of[run.id] = seen[run.group] % count
    return fold_of


def _left_out(
    fit: Fit, whole: FitState, part_of: Mapping[str, Hashable], parts: Iterable[Hashable], say: Say
) -> Residuals:
    """Residuals of the runs of each part under a fit to all other runs.

    part_of: part by run id. A constant on which none of the other runs depends has its prior.
    """
    found: Residuals = {}
    started, wanted = time.monotonic(), list(parts)
    for done, part in enumerate(wanted, 1):
        out = [at for at, run in enumerate(fit.runs) if part_of[run.id] == part]
        others = fit.without(out)
        state = others.solve(rounds=ROUNDS, begin=whole)
        evaluated = fit.evaluate(others.values(state.shift), out, False)
        found |= {fit.runs[at].id: evaluated[at].residuals for at in out}
        left = (time.monotonic() - started) / done * (len(wanted) - done)
        say(f"left out {part} ({done} of {len(wanted)}), {seconds_text(left)} left")
    return found


def residuals(runs: Iterable[Run], values: Mapping[Constant, float]) -> Residuals:
    """log(estimated / measured) by run id, with these values instead of those of the presets."""
    return {run.id: run.residuals({c: v for c, v in values.items() if run.has(c)}) for run in runs}
