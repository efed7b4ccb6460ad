"""Trials as jobs of a scheduler: a run directory and a scheduler's words, by hand."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace

import pytest

from mpctl.core.errors import RunFailed
from mpctl.measure.tune.submitted import ASK_SECONDS, END_SECONDS, SETTLE_SECONDS, JobWait
from mpctl.measure.tune.trial import TrialOrder, TrialWatch
from mpctl.records.rundir.directory import RunDir
from mpctl.records.rundir.launcher import requested_signals, this_launcher, write_launcher
from mpctl.run.clusters.backend import ScheduledJob
from mpctl.run.clusters.kubernetes.jobs import KubernetesScheduler
from tests.measure.tune.fakes import small_request
from tests.run.clusters.kubernetes.api_server import served
from tests.run.history.made import FAILURE, record, summary

BEGAN = 1_790_000_000.0
PENDING = ScheduledJob("PENDING (Priority)", is_active=True, has_begun=False)
RUNNING = ScheduledJob("RUNNING on n1", is_active=True, has_begun=True)


def over(state):
    return ScheduledJob(state, is_active=False, has_begun=True)


class FakeScheduler:
    """answer: what `find` returns or raises; cancelled: the ids that were cancelled."""

    def __init__(self, answer=PENDING):
        self.answer, self.cancelled, self.asked = answer, [], 0

    def find(self, job_id):
        self.asked += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def cancel(self, job_id):
        self.cancelled.append(job_id)


@pytest.fixture
def run(tmp_path):
    found = RunDir(tmp_path / "trials" / "001")
    (found.path / "logs").mkdir(parents=True)
    found.job.write_text(small_request().job.model_dump_json())
    return found


class Wait:
    """A wait by a clock that `at` sets. said: events; states: what was waited for."""

    def __init__(self, run, answer=PENDING, *, best=None):
        self.now, self.run, self.scheduler = BEGAN, run, FakeScheduler(answer)
        self.said, self.states = [], []
        watch = TrialWatch(on_event=self.said.append, on_wait=lambda state, s: self.states.append((state, s)))
        order = TrialOrder(small_request().job, 12, run, 600.0, best, "mpctl tune", BEGAN, "77")
        self.wait = JobWait(order, watch, self.scheduler, "77", None, lambda: self.now, self.sleep)
        self.steps = iter([])

    def at(self, seconds):
        self.now = BEGAN + seconds
        return self.wait.poll()

    def sleep(self, seconds):
        self.now += seconds
        for step in self.steps:
            step()
            return

    def begin(self, seconds):
        write_launcher(self.run.launcher, this_launcher("slurm", job_id="77", hosts=["n1"]))
        text = json.loads(self.run.launcher.read_text()) | {"started": BEGAN + seconds}
        self.run.launcher.write_text(json.dumps(text))

    def train(self, steps, seconds=1.0):
        lines = [record(step, step_seconds=seconds) for step in range(1, steps + 1)]
        self.run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def report(self, status="finished", **more):
        self.run.summary.write_text(json.dumps(summary(status, **more)))


def test_the_queue_is_waited_for_and_no_part_of_the_run(run):
    one = Wait(run)
    assert one.at(0) is None and one.at(ASK_SECONDS - 1) is None and one.scheduler.asked == 1
    assert one.at(2400) is None
    assert one.states == [("job 77: PENDING (Priority)", 0.0), ("job 77: PENDING (Priority)", 2400)]
    one.begin(2400)
    one.train(12)

    def end():
        one.now = BEGAN + 2415
        one.report()
        os.utime(run.summary, (one.now, one.now))

    one.steps = iter([end])
    found = one.wait.result()
    assert (found.status, len(found.seconds), found.peak_bytes) == ("measured", 12, 2**20)
    assert (found.waited, found.run_seconds) == (2400.0, 15.0)
    assert one.scheduler.cancelled == []


@pytest.mark.parametrize(
    ("state", "status"),
    [
        ("OUT_OF_MEMORY", "out-of-memory"),
        ("failed (OOMKilled)", "out-of-memory"),
        ("CANCELLED", "cancelled"),
        ("PREEMPTED", "cancelled"),
        ("NODE_FAIL", "cancelled"),
        ("TIMEOUT", "too-slow"),
        ("failed (DeadlineExceeded: Job was active too long)", "too-slow"),
        ("FAILED (NonZeroExitCode)", "failed"),
    ],
)
def test_a_job_that_ends_without_a_summary_is_an_answer(run, state, status):
    one = Wait(run, over(state))
    one.begin(0)
    assert one.at(0) is None and one.at(SETTLE_SECONDS - 1) is None  # its files may be late
    found = one.at(SETTLE_SECONDS)
    assert found.status == status and f"job 77 ended: {state}" in found.error


def test_a_job_that_ends_before_training_is_told_by_its_log(run):
    one = Wait(run, over("FAILED"))
    write_launcher(run.launcher, replace(this_launcher("slurm", job_id="77"), process_started=None))
    run.batch_log("77").write_text("begin\npython3: No module named mpctl\n\n")
    one.at(0)
    found = one.at(SETTLE_SECONDS)
    assert found.status == "failed" and "No module named mpctl" in found.error


def test_a_job_that_was_cancelled_after_enough_steps_is_measured(run):
    one = Wait(run, over("CANCELLED"))
    one.begin(0)
    one.train(5)
    one.at(0)
    assert one.at(SETTLE_SECONDS).status == "measured"


def test_a_job_that_its_scheduler_has_forgotten_says_nothing_of_its_layout(run):
    one = Wait(run, None)
    one.at(0)
    found = one.at(SETTLE_SECONDS)
    assert found.status == "cancelled" and "does not know it any more" in found.error


@pytest.mark.parametrize(
    ("ended", "status", "words"),
    [
        (summary("failed", failure=FAILURE), "out-of-memory", "RuntimeError: out of memory"),
        (summary("failed", failure={**FAILURE, "error": "no"}), "failed", "rank 1"),
        (summary("stopped", signal=signal.SIGUSR1), "too-slow", "its time limit after 3 steps"),
        (summary("stopped", signal=signal.SIGTERM), "cancelled", "after 3 steps"),
        (summary("finished"), "too-slow", "3 steps in its time"),
    ],
)
def test_what_the_launcher_of_the_job_reports(run, ended, status, words):
    one = Wait(run, RUNNING)
    one.train(3)
    run.summary.write_text(json.dumps(ended))
    found = one.at(0)
    assert found.status == status and words in found.error


def test_a_trial_whose_time_is_over_is_asked_to_end_then_cancelled(run):
    one = Wait(run, RUNNING)
    one.begin(100)
    one.train(5)
    assert one.at(699) is None and requested_signals(run.stop_request) == 0
    assert one.at(700) is None and requested_signals(run.stop_request) == 2
    one.at(700 + END_SECONDS - 1)
    assert one.scheduler.cancelled == []
    one.at(700 + END_SECONDS)
    one.at(800 + END_SECONDS)
    assert one.scheduler.cancelled == ["77"]
    one.report("stopped")
    assert one.at(801 + END_SECONDS).status == "measured"


def test_a_hopeless_trial_is_asked_to_end(run):
    one = Wait(run, RUNNING, best=1.0)
    one.train(5, seconds=1.6)
    one.at(0)
    assert requested_signals(run.stop_request) == 2


@pytest.mark.parametrize(("steps", "status"), [(5, "measured"), (4, "interrupted")])
def test_ctrl_c_cancels_the_job_and_keeps_what_it_measured(run, steps, status):
    one = Wait(run, RUNNING)
    one.train(steps)

    def interrupt():
        raise KeyboardInterrupt

    one.steps = iter([interrupt])
    found = one.wait.result()
    assert found.status == status and found.is_stopped and one.scheduler.cancelled == ["77"]


def test_ctrl_c_while_a_job_is_submitted_cancels_it_where_there_is_one(run):
    """The signal arrives when the scheduler has answered, before the id is returned."""
    one = Wait(run)
    one.wait.job_id = ""

    def submit():
        raise KeyboardInterrupt

    one.wait.submit = submit
    with pytest.raises(KeyboardInterrupt):
        one.wait.result()
    write_launcher(run.launcher, this_launcher("slurm", job_id="78"))
    found = one.wait.result()
    assert found.status == "interrupted" and one.scheduler.cancelled == ["78"]


def test_ctrl_c_deletes_an_object_of_kubernetes(run, tmp_path, monkeypatch):
    with served(tmp_path, monkeypatch) as cluster:
        for name in ("77", "78"):
            kind = {"kind": "TrainJob", "apiVersion": "trainer.kubeflow.org/v1alpha1"}
            cluster.add("trainjobs", {**kind, "metadata": {"name": name}})
        one = Wait(run)
        one.wait.scheduler = KubernetesScheduler(small_request().job)
        assert one.at(0) is None and one.states == [("job 77: pending", 0.0)]
        one.steps = iter([lambda: (_ for _ in ()).throw(KeyboardInterrupt)])
        assert one.wait.result().is_stopped and cluster.names("trainjobs") == ["78"]


def test_a_job_that_cannot_be_cancelled_is_named(run):
    one = Wait(run, RUNNING)
    one.scheduler.cancel = lambda job_id: (_ for _ in ()).throw(RunFailed("scancel failed: no"))
    one.steps = iter([lambda: (_ for _ in ()).throw(SystemExit(128 + signal.SIGTERM))])
    assert one.wait.result().is_stopped
    assert one.said == ["job 77 is not cancelled: scancel failed: no"]


def test_a_lost_terminal_leaves_the_job(run):
    one = Wait(run, RUNNING)
    one.steps = iter([lambda: (_ for _ in ()).throw(SystemExit(128 + signal.SIGHUP))])
    with pytest.raises(SystemExit):
        one.wait.result()
    assert one.scheduler.cancelled == []


def test_a_scheduler_that_does_not_answer_is_asked_again(run):
    one = Wait(run, RunFailed("squeue failed: no controller"))
    for at in (0, 10, 20):
        assert one.at(at) is None
    (said,) = one.said
    assert "squeue failed: no controller" in said and "waited for" in said
    one.scheduler.answer = PENDING
    assert one.at(30) is None and one.states[-1][1] == 30
