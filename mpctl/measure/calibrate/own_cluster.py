"""Fitting a measured cluster to runs on it, and the remaining spread.

The figures of the device's kernels and of the link were measured one by one and are priors. Runs
correct a few of them: kernels measured alone do not show the host between them, caches that other
kernels have filled, and ranks that do not arrive together. The runtime's profile stays unchanged,
so that the fit only describes the machine and not the software.

The errors that count are those on layouts that the fit did not see: each is left out once. Nine of
ten new layouts are within the k-th smallest of their n errors, k = ceil(0.9 (n + 1))
(measure/calibrate/spread.py), which is the largest of fewer than nineteen.

Of 9 layouts whose errors when left out are 1 to 9 %: k = 9, so 9 %, a spread of 0.055.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mpctl.measure.calibrate.evaluate import open_evaluator
from mpctl.measure.calibrate.fit import ROUNDS, Fit
from mpctl.measure.calibrate.runs import Constant, Kind, Run, get_value
from mpctl.measure.calibrate.spread import LEAST, quantile
from mpctl.plan.estimate.step import QUANTILE

# How far runs may move a measured figure, in the logarithm: products and attention hardly, memory
# as far as caches go, the host and the link as far as the profile may be wrong about them. The
# start of a collective most: ranks that call it again and again arrive together, ranks that compute
# in between wait for the later one, on a shared machine a fraction of a millisecond each time.
SLACK: Mapping[Kind, Mapping[str, float]] = {
    "devices": {
        "kernels.products": 0.05,
        "kernels.memory": 0.2,
        "kernels.flash": 0.1,
        "kernels.flash_backward": 0.1,
        "kernels.host": 0.5,
    },
    "clusters": {
        "intra_node.efficiency": 0.3,
        "intra_node.latency": 0.5,
        "intra_node.start": 2.0,
        "inter_node.efficiency": 0.3,
    },
}
UNIT = 10.0  # times its prior that no figure leaves; fractions are bounded by 1
PARTS = (
    "kernels.products",
    "kernels.memory",
    "kernels.flash",
    "kernels.flash_backward",
    "intra_node.efficiency",
    "inter_node.efficiency",
)
LEAST_RUNS = 3  # with fewer, leaving a layout out means nothing


@dataclass(frozen=True)
class ClusterFit:
    """The result of fitting a cluster to runs on it.

    values: its constants after the fit; measured, fitted, left_out: log(estimated / measured) of
    each run by its id, before the fit, after it, and by a fit that did not see its layout; spread:
    None where there are fewer than three layouts.
    """

    values: Mapping[Constant, float]
    measured: Mapping[str, float]
    fitted: Mapping[str, float]
    left_out: Mapping[str, float]
    spread: float | None


def fit_cluster(runs: Sequence[Run]) -> ClusterFit:
    """Fit the constants of the one cluster and device of these runs, of which each layout has one.
    Raises InputError where a run cannot be estimated."""
    constants = cluster_constants(runs[0])
    with open_evaluator(runs, constants, 1) as evaluate:
        fit = Fit(runs, constants, evaluate)
        full = fit.solve()
        left_out = {}
        for at, run in enumerate(runs if len(runs) >= LEAST_RUNS else ()):
            others = fit.without([at])
            state = others.solve(rounds=ROUNDS, begin=full)
            left_out[run.id] = run.residuals(others.values(state.shift))[0]
    values = fit.values(full.shift)
    return ClusterFit(
        values,
        {run.id: run.residuals({})[0] for run in runs},
        {run.id: run.residuals(values)[0] for run in runs},
        left_out,
        own_spread(list(left_out.values())),
    )


def cluster_constants(run: Run) -> list[Constant]:
    """The constants of the run's device and cluster that may move: those above 0."""
    found = []
    for kind, slacks in SLACK.items():
        model = run.model(kind)
        for path, slack in slacks.items():
            if (value := get_value(model, path)) > 0:
                most = max(value, 1.0) if path in PARTS else UNIT * value
                found.append(Constant(kind, run.parts[kind], path, slack, most=most))
    return found


def own_spread(residuals: Sequence[float]) -> float | None:
    """The spread of a band that covers nine of ten new layouts; None without residuals.

    >>> round(own_spread([0.01 * n for n in range(1, 10)]), 3)
    0.055
    """
    if not residuals:
        return None
    return max(quantile((abs(r), 1.0) for r in residuals) / QUANTILE, LEAST)
