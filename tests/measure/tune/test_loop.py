"""Whole tunings with a computed target: what ends them, what failures teach, kills at any point."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from mpctl.core.errors import InputError, RunFailed
from mpctl.measure.tune.document import tune_document
from mpctl.measure.tune.loop import Tuning, without_failed
from mpctl.measure.tune.pool import Pool
from mpctl.measure.tune.state import TuneFolder
from mpctl.measure.tune.trial import TargetRefused, TrialResult
from mpctl.plan.planning.layout_settings import LayoutSettings, layout_of
from tests.measure.tune.fakes import Clock, FakeTarget, Killed, small_request, tuning_of
from tests.measure.tune.test_choose import plan
from tests.measure.tune.test_state import record

SMALL = {"training.micro_batch_size": 8, "parallel.zero": 0, "parallel.stage_balance": "even"}


@pytest.fixture(scope="module")
def request_():
    """A space of a dozen layouts."""
    return small_request(**SMALL)


@pytest.fixture(scope="module")
def truth(request_):
    """The plan, but for pipelines, which are as slow again, and recomputation, which is free."""
    pool = Pool(request_.space())

    @cache
    def seconds(layout):
        return pool.evaluator.step_seconds(layout) * (1.5 if layout.pp > 1 else 1.1)

    return seconds


def best_of(request_, truth):
    return min(map(truth, (p.layout for p in Pool(request_.space()).search())))


def measured(tuning):
    return [(r.settings, r.step_seconds) for r in tuning.records if r.status == "measured"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, request_, truth):
    """A tuning that nothing disturbed."""
    target = FakeTarget(truth, Clock(), noise=0.01)
    tuning = tuning_of(tmp_path_factory.mktemp("tunings") / "whole", request_, target)
    tuning.run()
    return tuning


def test_it_finds_the_best_and_says_that_it_leads(whole, request_, truth):
    assert whole.ended == "settled" and whole.is_settled
    assert truth(whole.best) <= 1.03 * best_of(request_, truth)
    document = tune_document(whole, lambda layout: "mpctl launch demo")
    assert document["best"]["settings"] == dict(whole.best._asdict())
    assert document["rivals"] == 0 and document["ended"] == "settled"
    assert len(document["best"]["trials"]) >= 2


def test_what_was_learnt_is_nearer_to_the_trials(whole):
    whole.learn()
    learnt = tune_document(whole, str)["learnt"]
    assert learnt["mean_error_after"] < learnt["mean_error_before"]
    written = {path.parent.name for path in whole.folder.presets.glob("*/*.toml")}
    assert {"devices", "clusters"} <= written


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.quick(1)
def test_a_kill_during_a_trial_changes_nothing(tmp_path, whole, request_, truth, at):
    target = FakeTarget(truth, Clock(), noise=0.01, results={at: Killed()})
    first = tuning_of(tmp_path / "t", request_, target)
    with pytest.raises(Killed):
        first.run()
    assert [r.status for r in first.folder.records()][-1] == "running"
    second = tuning_of(tmp_path / "t", request_, target)
    second.run()
    assert measured(second) == measured(whole)
    assert second.best == whole.best


def test_a_tuning_that_ended_is_not_measured_again(whole, request_):
    def never(order, watch):
        raise AssertionError("a trial was made")

    again = Tuning(request_, whole.folder, never, whole.limits, clock=Clock())
    again.run()
    assert again.ended == "settled" and again.best == whole.best


def test_ctrl_c_keeps_the_steps_of_its_trial(tmp_path, request_, truth):
    stopped = TrialResult("measured", (1.0,) * 6, is_stopped=True)
    target = FakeTarget(truth, Clock(), results={1: stopped})
    tuning = tuning_of(tmp_path / "t", request_, target)
    with pytest.raises(KeyboardInterrupt):
        tuning.run()
    assert tuning.ended == "stopped"
    assert [r.status for r in TuneFolder(tmp_path / "t").records()] == ["measured", "measured"]


def test_the_number_of_trials_is_of_all_sessions(tmp_path, request_, truth):
    for _ in range(2):
        tuning = tuning_of(tmp_path / "t", request_, FakeTarget(truth, Clock(), noise=0.05), trials=3)
        tuning.run()
        assert tuning.ended == "trials" and len(tuning.records) == 3


def test_no_trial_begins_that_would_end_after_the_budget(tmp_path, request_, truth):
    target = FakeTarget(truth, Clock(), noise=0.1, seed=2)
    tuning = tuning_of(tmp_path / "t", request_, target, seconds=60.0)
    tuning.run()
    assert tuning.ended == "budget" and 3 <= len(tuning.records) <= 6
    assert target.clock.now <= 60.0


def test_a_budget_that_is_too_small_for_one_trial_is_refused(tmp_path, request_, truth):
    tuning = tuning_of(tmp_path / "t", request_, FakeTarget(truth, Clock()), seconds=5.0)
    with pytest.raises(InputError, match=r"5\.00 s are too short for one trial.*--budget"):
        tuning.run()
    assert tuning.records == []


def test_a_target_that_refuses_is_named_and_nothing_is_recorded(tmp_path, request_, truth):
    refusal = InputError.of("ranks-can-meet", "n1", "no route to the host", "mend it")
    target = FakeTarget(truth, Clock(), results={0: refusal})
    with pytest.raises(InputError, match="no route"):
        tuning_of(tmp_path / "t", request_, target).run()
    assert TuneFolder(tmp_path / "t").records() == []


def test_a_target_that_refuses_later_ends_the_tuning_and_blames_no_layout(tmp_path, request_, truth):
    refusal = TargetRefused.of("tune-refused", "--on", "sbatch failed: no quota", "mend it")
    target = FakeTarget(truth, Clock(), results={2: refusal})
    tuning = tuning_of(tmp_path / "t", request_, target)
    with pytest.raises(TargetRefused, match="no quota"):
        tuning.run()
    kept = TuneFolder(tmp_path / "t").records()
    assert [one.status for one in kept] == ["measured"] * 2 and tuning.records == kept


def test_a_cancelled_job_says_nothing_of_its_layout(tmp_path, request_, truth):
    gone = TrialResult("cancelled", error="job 77 ended: CANCELLED")
    target = FakeTarget(truth, Clock(), noise=0.01, results={1: gone})
    tuning = tuning_of(tmp_path / "t", request_, target)
    tuning.run()
    assert tuning.ended == "settled"
    assert target.orders[1] == target.orders[2] and tuning.records[2].status == "measured"


def test_five_cancelled_jobs_in_a_row_end_the_tuning(tmp_path, request_, truth):
    gone = {n: TrialResult("cancelled", error="CANCELLED") for n in range(1, 9)}
    tuning = tuning_of(tmp_path / "t", request_, FakeTarget(truth, Clock(), results=gone))
    tuning.run()
    assert tuning.ended == "failing" and len(tuning.records) == 6


def test_the_queue_is_no_part_of_the_budget(tmp_path, request_, truth):
    """Each trial waits an hour; the budget is five minutes."""
    clock = Clock()
    target, waits = FakeTarget(truth, clock, noise=0.01), []

    def measure(order, watch):
        watch.on_submit("77")
        clock.now += 3600
        watch.on_wait("job 77: PENDING", 3600)
        waits.append(tuning.left)
        before = clock.now
        found = target(order, watch)
        return replace(found, run_seconds=clock.now - before, waited=3600.0)

    tuning = tuning_of(tmp_path / "t", request_, measure, clock=clock)
    tuning.run()
    assert tuning.ended == "settled" and waits[0] == 300.0 and tuning.spent < 300.0
    assert tuning.spent == pytest.approx(sum(one.wall for one in tuning.records))
    again = tuning_of(tmp_path / "t", request_, measure, clock=clock)
    assert again.spent == pytest.approx(tuning.spent)
    document = tune_document(tuning, str)
    assert {(one["job"], one["waited_seconds"]) for one in document["trials"]} == {("77", 3600.0)}


def test_a_job_that_outlives_the_tuning_is_waited_for(tmp_path, request_, truth):
    def killed(order, watch):
        watch.on_submit("77")
        raise Killed

    with pytest.raises(Killed):
        tuning_of(tmp_path / "t", request_, killed, clock=Clock()).run()
    target, waited = FakeTarget(truth, Clock(), noise=0.01), []

    def wait(order, watch):
        waited.append((order.job_id, order.run.path.name, layout_of(order.job)))
        return TrialResult("measured", (1.0,) * 12, run_seconds=20.0, waited=600.0)

    tuning = tuning_of(tmp_path / "t", request_, target, trials=2)
    tuning.wait = wait
    tuning.run()
    first = tuning.records[0]
    assert waited == [("77", "001", first.settings)]
    assert (first.status, first.wall, first.waited) == ("measured", 20.0, 600.0)
    assert len(target.orders) == 1 and tuning.spent == pytest.approx(20.0 + tuning.records[1].wall)


def test_a_layout_that_fails_is_a_result(tmp_path, request_, truth):
    crash = TrialResult("failed", error="rank 1 failed at step 1: RuntimeError: no")
    tuning = tuning_of(tmp_path / "t", request_, FakeTarget(truth, Clock(), results={1: crash}))
    tuning.run()
    lost = tuning.records[1].settings
    assert tuning.ended == "settled" and "RuntimeError" in tuning.records[1].error
    assert lost not in [layout for layout, _ in measured(tuning)]


def test_where_every_trial_fails_the_tuning_ends(tmp_path, request_, truth):
    crashes = {n: TrialResult("failed", error=f"crash {n}") for n in range(9)}
    tuning = tuning_of(tmp_path / "t", request_, FakeTarget(truth, Clock(), results=crashes))
    with pytest.raises(RunFailed, match=r"3 trials failed and none was measured.*crash 2"):
        tuning.run()


def test_a_space_without_a_layout_is_refused(tmp_path, truth):
    request_ = small_request(**{"parallel.pp": 2, "parallel.tp": 2})
    with pytest.raises(InputError, match="no legal layout"):
        tuning_of(tmp_path / "t", request_, FakeTarget(truth, Clock())).run()


def test_memory_that_ran_out_rules_out_layouts_that_need_as_much():
    small, large = plan(LayoutSettings(dp=2), 1.0, size=9), plan(LayoutSettings(tp=2), 1.0, size=10)
    out = record(1, "out-of-memory")  # of 10 bytes
    assert list(without_failed([small, large], [out])) == []
    small = plan(LayoutSettings(pp=2), 1.0, size=9)
    assert list(without_failed([small, large], [out])) == [small]


def test_a_failure_rules_out_layouts_that_are_almost_the_same():
    near, far = plan(LayoutSettings(dp=2, zero=1), 1.0), plan(LayoutSettings(tp=2), 1.0)
    assert list(without_failed([near, far], [record(1, "failed")])) == [far]
