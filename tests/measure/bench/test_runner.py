"""Rounds within a budget, runs of cases, and the share of a step that ranks wait."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from typing import Any

import pytest

from mpctl.core.errors import RunFailed
from mpctl.measure.bench.cases import plan_cases
from mpctl.measure.bench.runner import Budget, CaseRun, Watch, communication_share, group_runs, planned_share, run_cases
from mpctl.plan.estimate.step import Band, StepTime
from mpctl.records.rundir.directory import RunDir
from mpctl.run.hosts.machine import Machine
from tests.measure.bench.small_jobs import planned_case, small_case, step_records
from tests.measure.bench.verify_runs import case_of, run_of


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def rounds(budget, clock, lengths):
    done = []
    for number, length in zip(budget.rounds(len(lengths)), lengths, strict=False):
        clock.now += length
        done.append(number)
    return done


def test_a_round_begins_only_where_one_as_long_would_end_in_time():
    clock = Clock()
    assert rounds(Budget(10.0, clock), clock, [4.0] * 5) == [0, 1]


def test_the_first_round_always_begins():
    clock = Clock()
    assert rounds(Budget(1.0, clock), clock, [4.0] * 5) == [0]


def test_without_a_budget_all_rounds_run():
    clock = Clock()
    budget = Budget(None, clock)
    assert rounds(budget, clock, [4.0] * 5) == [0, 1, 2, 3, 4] and budget.left is None


def test_what_fits_into_a_budget():
    clock = Clock()
    budget = Budget(10.0, clock)
    clock.now += 4.0
    assert budget.fits(6.0) and not budget.fits(6.1) and Budget(None, clock).fits(1e9)


def test_how_many_rounds_are_likely_follows_from_the_longest():
    clock = Clock()
    budget = Budget(10.0, clock)
    assert [budget.likely(number, 9) for number in _each(budget, clock, 3.0)] == [9, 3, 3]
    assert Budget(None, clock).likely(4, 9) == 9
    budget = Budget(100.0, clock)
    assert [budget.likely(number, 3) for number in _each(budget, clock, 3.0)] == [3, 3, 3]


def _each(budget, clock, length):
    for number in budget.rounds(3):
        yield number
        clock.now += length


def case_run(case, seconds, number=0):
    run = RunDir(f"{case.name}-r{number + 1}")
    return CaseRun(case, number, run, step_records(seconds), [], {}, 2)


def test_steps_of_the_warm_up_do_not_count():
    run = case_run(planned_case(), [9, 9, 1.0, 3.0, 2.0])
    assert run.step_seconds == 2.0
    assert [record["step"] for record in run.steady] == [3, 4, 5]
    assert case_run(planned_case(), [9, 8]).step_seconds == 8.5  # all that there is


def test_runs_are_grouped_by_case_in_their_first_order():
    a, b = planned_case(name="a"), planned_case(name="b")
    runs = [case_run(a, [1]), case_run(b, [2]), case_run(a, [3], 1), case_run(b, [4], 1)]
    groups = group_runs(runs)
    assert list(groups) == ["a", "b"]
    assert [run.round for run in groups["a"]] == [0, 1]


def planned(tmp_path, texts, **cases):
    to_run = [small_case(name, texts, **settings) for name, settings in cases.items()]
    return plan_cases(to_run, tmp_path / "out", Machine(2, 0, 2**40), overwrite=False)


@pytest.mark.slow
def test_rounds_alternate_and_every_run_has_its_summary(tmp_path, texts):
    cases = planned(tmp_path, texts, one={}, two={"parallel.tp": 2, "cluster.gpus_per_node": 2})
    told, titles = [], []
    watch = Watch(lambda *progress: told.append(progress), titles.append)
    runs = run_cases(cases, tmp_path / "out", command="mpctl bench", rounds=2, budget=Budget(), watch=watch)
    seen = []
    for run in runs:
        seen.append(run)
        assert json.loads(run.run.summary.read_text()) == run.summary
    assert [run.run.path.name for run in seen] == ["one-r1", "two-r1", "one-r2", "two-r2"]
    assert [len(run.records) for run in seen] == [3] * 4
    assert [len(run.reports) for run in seen] == [1, 2, 1, 2]
    assert {run.case.launch.run.path for run in seen} == {run.run.path for run in seen}
    assert all(run.units >= 1 for run in seen)
    assert all(rank["agrees"] for run in seen for rank in run.summary["plan_beside_run"])
    steps = [done for stage, done, total in told if stage == "train the cases"]
    assert steps == sorted(steps) and steps[-1] == 12 and told[-1][2] == 12
    assert titles[1] == "two, round 1 of 2"
    assert [path.name for path in (tmp_path / "out/data").iterdir()] == ["1"]  # prepared once


@pytest.mark.slow
def test_a_run_that_fails_ends_the_bench_with_its_title(tmp_path, texts):
    cases = planned(tmp_path, texts, good={}, bad={"model.hidden": 64, "model.head_dim": 32})
    runs = run_cases(
        cases, tmp_path / "out", command="mpctl bench", rounds=1, budget=Budget(), watch=Watch(lambda *progress: None)
    )
    assert next(runs).case.name == "good"
    shutil.rmtree(tmp_path / "out/data")
    with pytest.raises(RunFailed, match=r"bad: .*log"):
        next(runs)


def waited(*shares: float) -> Any:
    """A run whose ranks waited for these shares of a step."""
    reports: Any = [{"rank": n, "communication_share": share} for n, share in enumerate(shares)]
    return replace(run_of(case_of("tp2"), 1.0), reports=reports)


def test_ranks_are_averaged_and_runs_give_their_median() -> None:
    runs = [waited(0.1, 0.3), waited(0.5, 0.7), waited(0.2, 0.4)]
    assert communication_share(runs) == pytest.approx(0.3)
    assert communication_share([*runs[:1], run_of(case_of("tp2"), 1.0)]) == pytest.approx(0.2)
    assert communication_share([run_of(case_of("tp2"), 1.0)]) is None


def test_planned_messages_and_bubbles_are_waited_for() -> None:
    parts = {"compute": 4.0, "tp": 1.0, "cp": 0.5, "pp": 0.25, "dp_cp": 0.25, "bubble": 1.0}
    time = StepTime(
        **parts,
        contention=1.0,
        optimizer=1.0,
        other=1.0,
        model_flops=1.0,
        hardware_flops=1.0,
        peak=1.0,
        band=Band(1.1, ()),
    )
    assert planned_share(time) == pytest.approx(3 / 10)
