"""Training runs that hold a measured machine: which layouts, what is fitted, and the table."""

from __future__ import annotations

from dataclasses import replace
from math import log
from typing import Any, cast

import pytest

from mpctl.bench.machine import (
    MachineCheck,
    disturbed_runs,
    machine_checks,
    mean_errors,
    measured_runs,
    with_rounds,
)
from mpctl.calibrate.own_cluster import fit_cluster, own_spread
from mpctl.spec.load import load_job
from tests.bench.verify_runs import case_of, run_of

CLUSTER = load_job(None, {"cluster": "this-machine"}).cluster


def test_a_layout_is_one_run_of_the_median_of_its_rounds_on_the_given_cluster() -> None:
    one, two = case_of("1 rank"), case_of("dp2", parallel__dp=2, cluster__gpus_per_node=2,
                                          training__global_batch_size=2)  # fmt: skip
    rounds = [
        run_of(case, s, number=n) for n, s in enumerate((1.0, 5.0, 2.0)) for case in (one, two)
    ]
    slow = CLUSTER.model_copy(update={"name": "mine", "slowdown": 2.0})
    runs = measured_runs(rounds, "mine", slow)
    assert [(run.id, run.measured["step_seconds"]) for run in runs] == [
        ("1 rank", 2.0),
        ("dp2", 2.0),
    ]
    assert runs[0].parts == {"devices": "mine", "clusters": "mine", "runtimes": "mpctl"}
    assert [run.job.cluster.gpus_per_node for run in runs] == [1, 2]
    assert {run.job.cluster.slowdown for run in runs} == {2.0}


def test_checks_are_seconds_of_what_was_planned() -> None:
    cases = [case_of(f"batch {n}", training__global_batch_size=n) for n in (1, 2, 4)]
    runs = measured_runs([run_of(case, 1.0) for case in cases], "mine", CLUSTER)
    fit = fit_cluster(runs)
    checks = machine_checks(runs, fit)
    assert [check["layout"] for check in checks] == [case.title for case in cases]
    for check, run in zip(checks, runs, strict=True):
        assert log(check["measured_seconds"]) == pytest.approx(run.residuals({})[0])
        assert log(check["fitted_seconds"]) == pytest.approx(run.residuals(fit.values)[0])
        assert check["left_out_seconds"] is not None and check["ranks"] == 1
    errors = mean_errors(checks)
    assert errors["fitted"] < errors["measured"]


def test_without_enough_layouts_nothing_was_left_out() -> None:
    runs = measured_runs([run_of(case_of("1 rank"), 1.0)], "mine", CLUSTER)
    (check,) = machine_checks(runs, fit_cluster(runs))
    assert check["left_out_seconds"] is None
    assert mean_errors([check]).keys() == {"measured", "fitted"}


def test_the_spread_is_that_of_single_runs() -> None:
    """Rounds of 0.9, 1 and 1.1 s: the band has to hold the runs, not only their medians."""
    cases = [case_of(f"batch {n}", training__global_batch_size=n) for n in (1, 2, 4)]
    rounds = [run_of(case, s, number=n) for n, s in enumerate((0.9, 1.0, 1.1)) for case in cases]
    fit = fit_cluster(measured_runs(rounds, "mine", CLUSTER))
    errors = [off - log(s) for off in fit.left_out.values() for s in (0.9, 1.0, 1.1)]
    found = with_rounds(fit, rounds)
    assert found.spread == own_spread(errors) and found.values == fit.values
    still = [run_of(case, 1.0, number=n) for n in range(3) for case in cases]
    assert with_rounds(fit, still).spread == own_spread(list(fit.left_out.values()) * 3)


def test_a_lone_rank_that_waited_was_disturbed() -> None:
    """Steps by hand have half of their time as processor time; of two ranks one may wait."""
    two = case_of("dp2", parallel__dp=2, cluster__gpus_per_node=2, training__global_batch_size=2)
    waited = run_of(case_of("1 rank"), 1.0)
    computed = [{**record, "cpu_seconds": record["step_seconds"]} for record in waited.records]
    alone = replace(waited, case=case_of("alone"), records=cast(Any, computed))
    assert disturbed_runs([waited, alone, run_of(two, 1.0)]) == ["1 rank"]


def test_errors_are_means_of_their_sizes() -> None:
    checks: list[MachineCheck] = [
        {"layout": name, "ranks": 1, "seconds": 2.0, "measured_seconds": 3.0,
         "fitted_seconds": fitted, "left_out_seconds": 2.0}
        for name, fitted in (("a", 1.0), ("b", 2.5))
    ]  # fmt: skip
    assert mean_errors(checks) == {"measured": 0.5, "fitted": 0.375, "left_out": 0.0}
