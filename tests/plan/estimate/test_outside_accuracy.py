"""How far plans of systems that no preset knows are from what was published, and their bands.

What was fitted to these runs is the typical shift and the spread of a system (plan/estimate/system.py,
`shift_apart`) and the crowding of networks (plan/estimate/network.py). Each system is also left out of
the shift and the spread in turn.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from math import expm1, log, sqrt
from statistics import mean

import pytest

from mpctl.measure.calibrate.spread import quantile
from mpctl.plan.estimate.step import QUANTILE
from mpctl.plan.estimate.system import SPREAD, System, find_system
from mpctl.plan.planning.plan import load_plan
from mpctl.spec.runtime import RuntimeProfile
from tests.outside import OutsideRun, outside_runs, read_rows, settings_of

NEAR = 0.1  # a system further from the mean counts less, as in a fit (Huber)
OWN = {"torchtitan", "fsdp2"}  # runtimes whose shift stands in their profile, not the usual one


def unknown_runs() -> list[OutsideRun]:
    """The rows whose system was never measured."""
    return [run for run in outside_runs() if not system_of(run).is_measured]


def system_of(run: OutsideRun) -> System:
    assert run.plan.estimate is not None
    return find_system(run.plan.job.cluster, run.plan.estimate.layout.profile)


def residual(run: OutsideRun) -> float:
    """log(estimated / published) without the shift."""
    return log((1 + run.error) / run.factor)


def usual(runs: Collection[OutsideRun]) -> list[OutsideRun]:
    """Those with the usual shift."""
    return [run for run in runs if run.plan.job.training.runtime not in OWN]


def mean_of_systems(runs: Collection[OutsideRun]) -> float:
    """The mean residual of a system, of n runs with the weight of sqrt(n), robustly."""
    by_system = defaultdict(list)
    for run in runs:
        by_system[run.system].append(residual(run))
    means = [(mean(own), sqrt(len(own))) for own in by_system.values()]
    centre = sum(m * w for m, w in means) / sum(w for _, w in means)
    for _ in range(20):
        weighed = [(m, w * min(1.0, NEAR / max(abs(m - centre), 1e-9))) for m, w in means]
        centre = sum(m * w for m, w in weighed) / sum(w for _, w in weighed)
    return centre


def misses(runs: Collection[OutsideRun]) -> Iterator[tuple[OutsideRun, float, float]]:
    """Each run with its residual after the shift of the other systems, and how wide nine of ten of
    theirs lie, a system of n runs with the weight of sqrt(n)."""
    for system in {run.system for run in runs}:
        others = [run for run in runs if run.system != system]
        centre = mean_of_systems(others)
        counts = Counter(run.system for run in others)
        sizes = [(abs(residual(run) - centre), 1 / sqrt(counts[run.system])) for run in others]
        width = quantile(sizes)
        yield from ((r, residual(r) - centre, width) for r in runs if r.system == system)


def test_plans_of_unknown_systems_are_right_in_the_mean_and_inside_their_band() -> None:
    runs = unknown_runs()
    errors = [run.error for run in runs]
    assert len(runs) > 35 and len({run.system for run in runs}) > 12
    assert mean(map(abs, errors)) <= 0.10
    assert abs(mean(errors)) <= 0.04
    assert mean(run.in_band for run in runs) >= 0.85


def test_each_system_left_out_of_shift_and_spread() -> None:
    found = list(misses(usual(unknown_runs())))
    errors = [expm1(miss) for _, miss, _ in found]
    assert mean(map(abs, errors)) <= 0.10
    assert abs(mean(errors)) <= 0.04
    assert 0.85 <= mean(abs(miss) <= width for _, miss, width in found) <= 0.98


def test_shift_and_spread_are_those_of_the_rows() -> None:
    runs = usual(unknown_runs())
    assert log(RuntimeProfile.model_fields["shift_apart"].default) == pytest.approx(-mean_of_systems(runs), abs=0.02)
    found = list(misses(runs))
    of_rows = quantile((abs(miss), 1.0) for _, miss, _ in found)
    of_systems = mean(width for _, _, width in found)
    assert of_rows / QUANTILE <= SPREAD <= of_systems / QUANTILE  # rows count once, or systems


def test_all_rows_under_the_profile_of_no_software() -> None:
    """`training.runtime = other`: its figures are other profiles' middle, its shift these rows'."""
    names = {run.id for run in unknown_runs()}
    seconds = {run.id: run.seconds for run in outside_runs()}
    errors, inside = [], []
    for row in read_rows():
        if row["id"] in names:
            settings = settings_of(row["args"]) | {"training.runtime": "other"}
            settings.pop("runtime", None)
            estimate = load_plan(None, settings).estimate
            assert estimate is not None and not isinstance(estimate.time, str)
            time, measured = estimate.time, seconds[row["id"]]
            assert not find_system(estimate.layout.job.cluster, estimate.layout.profile).is_measured
            errors.append(time.total / measured - 1)
            inside.append(time.low <= measured <= time.high)
    assert mean(map(abs, errors)) <= 0.14 and abs(mean(errors)) <= 0.05
    assert mean(inside) >= 0.85
