"""Sweeps of published runs as those of systems that nobody knows: how well few of their runs tell
the rest. For benchmarks/own_runs.py and a slow test.

The presets are fitted without a sweep's tables, from the priors of tests/recorded/priors.json, and
its systems count as never measured. In some sweeps the runs also name another software and cluster
than their own.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import expm1
from statistics import fmean
from typing import Any, NamedTuple

from mpctl.core.errors import InputError
from mpctl.measure.calibrate.own import fit_own
from mpctl.measure.calibrate.own_fit import OwnFit
from mpctl.measure.calibrate.runs import Constant, Run, read_runs
from mpctl.plan.estimate.step import QUANTILE
from mpctl.plan.estimate.system import find_system
from tests.cross_validation import find_sweeps, regret, samples_per_second
from tests.joint_fit import constants_of, open_fit
from tests.published import published_rows, published_runs, read_priors

SIZES = (5, 20, 40)
FACTOR = Constant("clusters", "", "step_factor", 1.0)
Row = Mapping[str, Any]


class Sweep(NamedTuple):
    """Runs of the tables `groups` that `has` chooses. runtime, cluster: named instead of theirs."""

    groups: tuple[str, ...]
    has: Callable[[Row], bool] = lambda row: True
    runtime: str | None = None
    cluster: str | None = None


def _nodes(row: Row) -> int:
    return int(row["job"]["cluster"]["nodes"])


def _on(row: Row, device: str) -> bool:
    return device in row["job"]["cluster"]["preset"]


VTRAIN = ("vtrain_single", "vtrain_multi")
SWEEPS = {
    "vtrain": Sweep(VTRAIN),
    "vtrain as megatron-core": Sweep(VTRAIN, runtime="megatron-core", cluster="dgx-a100"),
    "vtrain as nanotron": Sweep(VTRAIN, runtime="nanotron", cluster="dgx-a100"),
    "nanotron, 1 to 4 nodes": Sweep(("nanotron",), lambda row: _nodes(row) <= 4),
    "nanotron, 1B": Sweep(("nanotron",), lambda row: row["id"].split("_")[1] == "1B"),
    "nanotron, 8B": Sweep(("nanotron",), lambda row: row["id"].split("_")[1] == "8B"),
    "dgxc, H100": Sweep(("dgxc",), lambda row: _on(row, "h100")),
    "mosaic, A100": Sweep(("mosaic",), lambda row: _on(row, "a100")),
    "bloom": Sweep(("bloom",)),
}


def read_sweep(sweep: Sweep, values: Mapping[Constant, float]) -> list[Run]:
    """The runs under presets of these values, on systems that count as never measured."""
    found = []
    for row in published_rows():
        if row["group"] in sweep.groups and "step_seconds" in row["measured"] and sweep.has(row):
            job = dict(row["job"])
            job["cluster"] = {**job["cluster"]}
            job["training"] = {**job["training"]}
            if sweep.cluster:
                job["cluster"]["preset"] = sweep.cluster
            if sweep.runtime:
                job["training"]["runtime"] = sweep.runtime
            try:
                (run,) = read_runs([{**row, "job": job}])
            except InputError:  # a layout that the other software does not run
                continue
            run = run.under({c: value for c, value in values.items() if run.has(c)})
            seen = run.profile.seen.model_copy(update={"clusters": []})
            found.append(replace(run, profile=run.profile.model_copy(update={"seen": seen})))
    return found


def held_out_values(names: Sequence[str]) -> Iterator[tuple[str, dict[Constant, float]]]:
    """For each of these sweeps the values of a fit to all runs of other tables."""
    runs, priors = published_runs(), read_priors()
    constants = constants_of(runs)
    known: dict[tuple[str, ...], dict[Constant, float]] = {}
    with open_fit(runs, constants, priors) as fit:
        whole = fit.solve(rounds=2)
        for name in names:
            groups = SWEEPS[name].groups
            if groups not in known:
                out = [at for at, run in enumerate(runs) if run.group in groups]
                others = fit.without(out)
                known[groups] = others.values(others.solve(rounds=4, begin=whole).shift)
            yield name, known[groups]


class Score(NamedTuple):
    """Of one draw: mean absolute error of the others, the share inside the band, regret in each
    sweep of three layouts and more, seconds of the fit."""

    error: float
    inside: float
    regrets: list[float]
    seconds: float


def draw(runs: Sequence[Run], size: int, seed: int) -> Score:
    """Fit `size` of the runs, and estimate the others."""
    numbers = list(range(len(runs)))
    random.Random(seed).shuffle(numbers)
    started = time.process_time()
    fit = fit_own([runs[at] for at in numbers[:size]])
    seconds = time.process_time() - started
    return score(fit, [runs[at] for at in numbers[size:]], seconds)


def score(fit: OwnFit, others: Sequence[Run], seconds: float = 0.0) -> Score:
    """How far the others are from what the fit says of them."""
    values = fit.values
    off = {run.id: run.residuals({c: v for c, v in values.items() if run.has(c)}) for run in others}
    sizes = [abs(residual) for (residual,) in off.values()]
    pairs = [samples_per_second(own, off) for own in find_sweeps(others).values()]
    return Score(
        fmean(abs(expm1(residual)) for (residual,) in off.values()),
        fmean(size <= QUANTILE * fit.spread for size in sizes),
        [regret(pair) for pair in pairs],
        seconds,
    )


def error_before(runs: Sequence[Run]) -> float:
    """Mean absolute error of the estimates that a plan states before the fit."""
    factors = [find_system(run.job.cluster, run.profile).factor for run in runs]
    found = (
        run.residuals({replace(FACTOR, name=run.parts["clusters"]): factor})[0]
        for run, factor in zip(runs, factors, strict=True)
    )
    return fmean(abs(expm1(residual)) for residual in found)
