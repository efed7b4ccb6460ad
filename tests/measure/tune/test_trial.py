"""One trial: how many steps it makes, and what its end means."""

from __future__ import annotations

import pytest

from mpctl.measure.tune.trial import (
    TrialOrder,
    TrialWatch,
    failed_result,
    launch_trial,
    result_of,
    steps_for,
    trial_job,
)
from mpctl.plan.planning.plan import load_plan
from mpctl.records.rundir.directory import RunDir
from mpctl.records.rundir.summary import Failure
from mpctl.run.launch.supervise import RunOutcome
from tests.measure.bench.small_jobs import small_settings, write_texts

FIVE = (3.0, 1.0, 1.0, 1.0, 1.0)
PEAK = {"memory": {"peak": {"planned": 90, "measured": 100}}}


def ended(status, seconds=FIVE, **outcome):
    return result_of(RunOutcome(status, 1, **outcome), [PEAK], seconds)


def test_a_trial_makes_as_many_steps_as_its_share_allows():
    assert steps_for(share=30.0, start=10.0, step=2.0) == 10
    assert steps_for(share=30.0, start=10.0, step=0.1) == 12
    assert steps_for(share=30.0, start=40.0, step=2.0) == 5


def test_a_trial_validates_saves_and_restarts_nothing():
    job = trial_job(load_plan("demo", {"launch.max_restarts": 3}).job, 7)
    assert (job.training.steps, job.training.eval_samples) == (7, 0)
    assert (job.checkpoint.interval, job.checkpoint.at_end) == (0, False)
    assert job.launch.max_restarts == 0


def test_the_result_of_a_launch():
    assert ended("finished").status == "measured" and ended("finished").peak_bytes == 100
    assert ended("finished", FIVE[:4]).status == "too-slow"
    stopped = ended("stopped", signal=2)
    assert stopped.status == "measured" and stopped.is_stopped
    assert ended("stopped", FIVE[:3], signal=2).status == "interrupted"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "out-of-memory"),
        ("signal 9 (SIGKILL, often sent by the kernel when memory runs out)", "out-of-memory"),
        ("RuntimeError: DefaultCPUAllocator: can't allocate memory", "out-of-memory"),
        ("memory ran out, and the kernel killed a process of this control group", "out-of-memory"),
        ("RuntimeError: Connection closed by peer", "failed"),
    ],
)
def test_a_failure_is_of_memory_or_another(error, status):
    failure = Failure(rank=1, error=error, doing="step 1")
    found = ended("failed", (), failure=failure)
    assert found.status == status and error in found.error
    assert failed_result(error).status == status


@pytest.mark.slow
def test_a_trial_that_is_hopeless_is_ended_and_measured(tmp_path):
    """A run of one rank and 4000 steps, of which a few are made."""
    texts = tmp_path / "texts"
    texts.mkdir()
    one = {"parallel.tp": 1, "cluster.gpus_per_node": 1}
    job = load_plan("demo", {**small_settings(write_texts(texts)), **one}).job
    run = RunDir(tmp_path / "run")
    found = launch_trial(TrialOrder(job, 4000, run, 60.0, 1e-9, "mpctl tune"), TrialWatch())
    assert found.status == "measured" and 5 <= len(found.seconds) < 4000
    assert not found.is_stopped and run.summary.exists()
