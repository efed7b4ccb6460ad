"""Runs of cases: what they measured by hand, and two real cases in two rounds."""

import json
import shutil

import pytest

from mpctl.bench.cases import plan_cases
from mpctl.bench.runner import Budget, CaseRun, Watch, group_runs, run_cases
from mpctl.errors import RunFailed
from mpctl.hosts.machine import Machine
from mpctl.rundir.directory import RunDir
from tests.bench.small_jobs import planned_case, small_case, step_records


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
    runs = run_cases(
        cases, tmp_path / "out", command="mpctl bench", rounds=2, budget=Budget(), watch=watch
    )
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
        cases, tmp_path / "out", command="mpctl bench", rounds=1, budget=Budget(),
        watch=Watch(lambda *progress: None),
    )  # fmt: skip
    assert next(runs).case.name == "good"
    shutil.rmtree(tmp_path / "out/data")
    with pytest.raises(RunFailed, match=r"bad: .*log"):
        next(runs)
