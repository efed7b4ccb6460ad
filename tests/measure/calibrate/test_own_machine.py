"""A cluster fitted to its own runs: the fit recovers its figures, and the band covers new runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import exp, log
from statistics import mean
from typing import Any

import pytest

from mpctl.measure.calibrate.own import MACHINE, fit_own, free_figures
from mpctl.measure.calibrate.own_fit import OwnFit
from mpctl.measure.calibrate.runs import Run, get_value, read_runs


def mean_error(residuals: Mapping[str, list[float]]) -> float:
    """The mean of |estimated / measured - 1|."""
    return mean(abs(exp(r) - 1) for (r,) in residuals.values())


LAYOUTS: tuple[dict[str, Any], ...] = ({}, {"tp": 2}, {"dp": 2}, {"pp": 2}, {"cp": 2})


def runs_on_this_machine() -> list[Run]:
    """The demo in several layouts, each of which took its estimated time."""
    rows = [
        {
            "id": str(parallel),
            "job": {
                "preset": "demo",
                "cluster": {"preset": "this-machine", "gpus_per_node": 2},
                "parallel": {"tp": 1, **parallel},
                "training": {"global_batch_size": 8},
            },
            "measured": {"step_seconds": 1.0},
        }
        for parallel in LAYOUTS
    ]
    return [took(run, {}) for run in read_runs(rows)]


def took(run: Run, values: dict[str, float], factor: float = 1.0) -> Run:
    """The run with the step time that these values of constants, by path, estimate."""
    free = [figure.constant for figure in free_figures([run], MACHINE)]
    constants = {c: values[c.path] for c in free if c.path in values}
    seconds = exp(run.residuals(constants)[0]) * run.measured["step_seconds"]
    return replace(run, measured={"step_seconds": factor * seconds})


@pytest.fixture(scope="module")
def exact() -> OwnFit:
    slow = {"kernels.host": 1.6, "kernels.memory": 0.7}
    return fit_own([took(run, slow) for run in runs_on_this_machine()], MACHINE)


def test_a_slower_host_and_memory_are_found(exact: OwnFit) -> None:
    values = {c.path: value for c, value in exact.values.items()}
    assert mean_error(exact.before) > 0.05
    assert mean_error(exact.fitted) < 0.01
    assert 1.2 < values["kernels.host"] < 2 and 0.6 < values["kernels.memory"] < 0.85
    assert values["kernels.products"] == pytest.approx(1.0, rel=0.05)


def test_a_layout_that_was_left_out_is_estimated_nearly_as_well(exact: OwnFit) -> None:
    assert exact.left_out.keys() == exact.fitted.keys()
    assert mean_error(exact.fitted) <= mean_error(exact.left_out) < 0.03


def test_the_band_holds_single_runs_and_not_only_medians_of_layouts() -> None:
    still = runs_on_this_machine()
    rounds = [took(run, {}, factor) for run in still for factor in (0.8, 1.0, 1.25)]
    assert fit_own(rounds, MACHINE).spread > 1.5 * fit_own(still, MACHINE).spread


def test_a_layout_that_is_odd_is_outside_when_left_out_and_widens_the_band() -> None:
    runs = runs_on_this_machine()
    odd = took(runs[1], {}, factor=1.5)
    fit = fit_own([runs[0], odd, *runs[2:]], MACHINE)
    assert fit.left_out[odd.id] == pytest.approx([-log(1.5)], abs=0.02)
    assert fit.spread > 1.5 * fit_own(runs, MACHINE).spread


def test_no_part_exceeds_the_whole() -> None:
    fit = fit_own([took(run, {}, factor=0.2) for run in runs_on_this_machine()], MACHINE)
    for constant, value in fit.values.items():
        assert value <= constant.most
        if constant.path != "kernels.host":
            assert value <= 1.0


def test_a_figure_that_is_0_stays_0() -> None:
    run = runs_on_this_machine()[0]
    paths = {figure.path for figure in free_figures([run], MACHINE)}
    assert get_value(run.model("clusters"), "intra_node.start") == 0
    assert "intra_node.start" not in paths and "intra_node.latency" in paths
