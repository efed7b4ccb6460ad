"""Whole tunings with a computed target: what ends them, what failures teach, kills at any point."""

from __future__ import annotations

from functools import cache

import pytest

from mpctl.errors import InputError, RunFailed
from mpctl.planning.layout_settings import LayoutSettings
from mpctl.tune.document import tune_document
from mpctl.tune.loop import Tuning, without_failed
from mpctl.tune.pool import Pool
from mpctl.tune.state import TuneFolder
from mpctl.tune.trial import TrialResult
from tests.tune.fakes import Clock, FakeTarget, Killed, small_request, tuning_of
from tests.tune.test_choose import plan
from tests.tune.test_state import record

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
        tuning = tuning_of(
            tmp_path / "t", request_, FakeTarget(truth, Clock(), noise=0.05), trials=3
        )
        tuning.run()
        assert tuning.ended == "trials" and len(tuning.records) == 3


def test_no_trial_begins_that_would_end_after_the_budget(tmp_path, request_, truth):
    target = FakeTarget(truth, Clock(), noise=0.1)
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
