"""The law of goodput: against a simulation, against what was published, and its own limits."""

from __future__ import annotations

from dataclasses import astuple
from math import inf

import pytest

from mpctl.plan.estimate.goodput import (
    Failures,
    SaveCost,
    best_interval,
    daly_interval,
    elastic_share,
    first_order,
    job_mtbf,
    mean_capacity,
    spare_nodes,
    time_shares,
    young_interval,
)
from mpctl.spec.cluster import OperationsSpec
from tests.goodput import HOUR, PUBLISHED, SIZES, Published, case, simulate, simulate_elastic

HARD = {
    "pauses as long as half the time between failures": (Failures(1000.0, 0.0, 50.0), SaveCost(500.0), 700.0),
    "restarts that mostly fail": (Failures(1000.0, 100.0, 2000.0), SaveCost(10.0), 140.0),
    "a write that lasts until the next save": (Failures(1000.0, 20.0, 30.0), SaveCost(5.0, 105.0), 100.0),
    "an interval of three failures": (Failures(1000.0, 20.0, 30.0), SaveCost(5.0), 3000.0),
}


@pytest.mark.parametrize("gpus", SIZES)
def test_a_simulated_run_spends_its_time_as_the_law_says(gpus: int) -> None:
    failures, save = case(gpus)
    interval = best_interval(save, failures.mtbf)
    law = time_shares(failures, save, interval)
    seen = simulate(failures, save, interval, count=100 if gpus < 1000 else 1000)
    assert seen.useful == pytest.approx(law.useful, rel=0.005)
    for name in ("saves", "lost", "down"):
        assert getattr(seen, name) == pytest.approx(getattr(law, name), rel=0.15, abs=2e-4)


@pytest.mark.parametrize(("failures", "save", "interval"), HARD.values(), ids=list(HARD))
def test_it_holds_where_nothing_is_small(failures: Failures, save: SaveCost, interval: float) -> None:
    law = time_shares(failures, save, interval)
    seen = simulate(failures, save, interval, count=20_000, seed=3)
    assert astuple(seen)[:4] == pytest.approx(astuple(law), rel=0.06)
    assert first_order(failures, save, interval) < law.useful


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: row.run)
def test_it_says_what_was_published(row: Published) -> None:
    assert row.low <= row.useful <= row.high


@pytest.mark.parametrize(("gpus", "hours"), [(16_384, 1.8), (131_072, 0.23)])
def test_the_time_between_failures_that_meta_projects(gpus: int, hours: float) -> None:
    of_a_node = 24 / 6.5e-3  # hours; RSC-1, arXiv 2410.21680
    assert job_mtbf(gpus, gpus // 8, inf, of_a_node) == pytest.approx(hours, rel=0.03)


def test_llama_3s_failures_by_gpu_and_node_add_up() -> None:
    facts = OperationsSpec()
    hours = job_mtbf(16_384, 2_048, facts.gpu_mtbf_hours, facts.node_mtbf_hours)
    assert 54 * 24 / hours == pytest.approx(419, rel=0.01)


def test_the_default_rates_are_those_of_blooms_cluster_too() -> None:
    """1 to 2 failures a week of 384 A100 (docs/goodput.md)."""
    facts = OperationsSpec()
    hours = job_mtbf(384, 48, facts.gpu_mtbf_hours, facts.node_mtbf_hours)
    assert 1 < 7 * 24 / hours < 2


@pytest.mark.parametrize("pause", [0.1, 10.0, 300.0, 3600.0, 36_000.0])
def test_no_other_interval_is_better_than_the_best(pause: float) -> None:
    failures, save = Failures(3600.0, 20.0, 300.0), SaveCost(pause)
    best = best_interval(save, failures.mtbf)
    most = time_shares(failures, save, best).useful
    for factor in (0.5, 0.95, 1.05, 2.0):
        assert time_shares(failures, save, best * factor).useful < most
    if pause < 0.2 * failures.mtbf:
        assert daly_interval(pause, failures.mtbf) == pytest.approx(best, rel=0.002)
        assert best < young_interval(pause, failures.mtbf)


def test_without_failures_only_saves_cost() -> None:
    never = Failures(inf, 20.0, 300.0)
    assert astuple(time_shares(never, SaveCost(1.0), 99.0)) == (0.99, 0.01, 0.0, 0.0)
    assert best_interval(SaveCost(1.0), inf) == inf
    assert job_mtbf(8, 1, inf, inf) == inf


def test_what_never_gets_anywhere_is_no_overflow() -> None:
    assert time_shares(Failures(1.0, 20.0, 1e6), SaveCost(1.0), 60.0).useful == 0.0
    assert time_shares(Failures(1.0, 0.0, 0.0), SaveCost(1.0, 1e300), 60.0).useful == 0.0


def test_a_save_waits_for_the_one_before_it() -> None:
    failures, save = Failures(3600.0, 20.0, 300.0), SaveCost(1.0, 201.0)
    assert best_interval(save, failures.mtbf) == 200.0
    assert time_shares(failures, save, 10.0) == time_shares(failures, save, 200.0)


@pytest.mark.parametrize("gpus", [2_048, 131_072])
def test_there_is_a_spare_node_at_99_of_100_failures(gpus: int) -> None:
    failures = Failures(case(gpus)[0].mtbf, 0.0, 0.0)
    repair = 24 * HOUR
    spares = spare_nodes(repair / failures.mtbf)
    for fewer, is_enough in ((0, True), (1 + spares // 12, False)):
        seen = simulate(failures, SaveCost(0.0), failures.mtbf, count=40_000, spares=spares - fewer, repair=repair)
        assert (seen.without_spare < 0.01 * seen.failures) is is_enough


def test_spares_by_hand() -> None:
    assert spare_nodes(0.0) == 0
    assert spare_nodes(0.001) == 1  # the node that fails, and nobody else is away
    assert spare_nodes(1.0, 0.9) == 3  # P(0 or 1 away) = 0.74, P(0 to 2) = 0.92


def test_many_spares_are_as_many_as_the_sum_says() -> None:
    few, many = spare_nodes(399.0), spare_nodes(401.0)
    assert 1 <= many - few <= 4
    assert 1e9 < spare_nodes(1e9) < 1.0001e9


@pytest.mark.parametrize(("gpus", "replica"), [(2_048, 1), (2_048, 4), (16_384, 16), (131_072, 32)])
def test_a_simulated_elastic_run_computes_what_the_law_says(gpus: int, replica: int) -> None:
    failures, background = case(gpus)
    save, nodes = SaveCost(background.pause), gpus // 8

    def capacity(away: int) -> float:
        return max(0, nodes - away) // replica * replica / nodes

    interval = best_interval(save, failures.mtbf)
    mean = mean_capacity(24 * HOUR / failures.mtbf, capacity, nodes)
    law = elastic_share(time_shares(failures, save, interval), failures, mean)
    seen = simulate_elastic(failures, save, interval, nodes=nodes, repair=24 * HOUR, capacity=capacity, count=1500)
    assert seen == pytest.approx(law, rel=0.03)


def test_what_an_elastic_run_computes() -> None:
    assert mean_capacity(0.0, lambda away: 1 - away / 4, 4) == 1.0
    assert mean_capacity(3.0, lambda away: 1 - away / 1000, 1000) == pytest.approx(1 - 3 / 1000)
    whole_replicas = mean_capacity(0.5, lambda away: (16 - away) // 2 / 8, 16)
    assert whole_replicas < 1 - 0.5 / 16  # a node less is a replica of two nodes less
