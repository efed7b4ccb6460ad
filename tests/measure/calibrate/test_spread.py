"""The band is made of errors of runs that a fit did not see, and holds nine of ten of them."""

from __future__ import annotations

import random
from statistics import mean

import pytest

from mpctl.measure.calibrate.runs import Run, read_runs
from mpctl.measure.calibrate.spread import LEAST, quantile, seen_by
from tests.bands import find_spreads
from tests.cross_validation import find_inside
from tests.joint_fit import LeftOut, Residuals
from tests.published import earlier_rows


def errors(runs: list[Run], size: float, seed: int = 1) -> Residuals:
    """Errors of a normal distribution of this standard deviation."""
    draw = random.Random(seed)
    return {run.id: [draw.gauss(0, size)] for run in runs}


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    return [run for run in read_runs(earlier_rows()) if "step_seconds" in run.measured]


def test_nine_of_ten_new_errors_lie_within_the_quantile() -> None:
    """Conformal: nineteen errors, the eighteenth; of nine the largest is not large enough."""
    sizes = [n / 100 for n in range(1, 20)]
    assert quantile((size, 1.0) for size in sizes) == 0.18
    assert quantile((size, 1.0) for size in sizes[:3]) == 0.03
    draw = random.Random(0)
    inside = []
    for _ in range(2000):
        *known, new = (abs(draw.gauss(0, 1)) for _ in range(20))
        inside.append(new <= quantile((size, 1.0) for size in known))
    assert mean(inside) == pytest.approx(0.9, abs=0.02)


def test_the_spread_of_normal_errors_is_their_standard_deviation(runs: list[Run]) -> None:
    near, apart = errors(runs, 0.05), errors(runs, 0.15, seed=2)
    spreads = find_spreads(runs, LeftOut(near, near, apart))
    assert spreads["megatron-deepspeed"].spread == pytest.approx(0.05, rel=0.3)
    assert spreads["fsdp"].spread_apart == pytest.approx(0.15, rel=0.4)
    exact = {run.id: [0.0] for run in runs}
    assert find_spreads(runs, LeftOut(exact, exact, exact))["fsdp"].spread == LEAST


def test_few_runs_of_a_profile_borrow_from_the_others(runs: list[Run]) -> None:
    """Two runs without an error do not make a profile exact."""
    few = [run for run in runs if run.parts["runtimes"] == "megatron-2020"][:2]
    rest = [run for run in runs if run.parts["runtimes"] != "megatron-2020"]
    fifths = {**errors(rest, 0.1), **{run.id: [0.0] for run in few}}
    spreads = find_spreads([*few, *rest], LeftOut(fifths, {}, {}))
    assert spreads["megatron-2020"].spread == pytest.approx(0.1, rel=0.3)


def test_runs_outside_the_fit_widen_the_band_by_their_errors(runs: list[Run]) -> None:
    """Without MosaicML's H100 its profile has seen no H100, and no fp8."""
    others = [run for run in runs if run.parts["clusters"] != "mosaic-h100"]
    assert "fp8" not in seen_by(run for run in others if run.parts["runtimes"] == "fsdp").dtypes
    base = errors(runs, 0.05)
    far = {run.id: [0.05 if run in others else 0.3] for run in runs}
    same, wider = (find_spreads(runs, LeftOut(base, base, apart))["fsdp"].widening for apart in (base, far))
    assert same is not None and wider is not None and 1 <= same < wider


def test_nine_of_ten_of_another_tables_runs_lie_inside(runs: list[Run]) -> None:
    left_out = LeftOut(errors(runs, 0.05), errors(runs, 0.05, 2), errors(runs, 0.15, 3))
    inside = find_inside(runs, left_out)
    for kind in LeftOut._fields:
        assert 0.85 < mean(inside[kind]) < 0.99, kind
    odd = {**left_out.fifths, runs[0].id: [1.0]}
    assert not all(find_inside(runs[:1], LeftOut(odd, {}, {}))["fifths"])
