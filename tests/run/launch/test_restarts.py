"""When a failed run is started again, and on which batches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mpctl.records.rundir.directory import RunDir
from mpctl.records.rundir.summary import Failure
from mpctl.run.hosts.machine import Machine
from mpctl.run.launch.launch_plan import plan_launch
from mpctl.run.launch.restarts import Decision, RestartPolicy, skip_batches
from mpctl.spec.job import JobSpec
from mpctl.spec.load import load_job
from tests.run.launch.command import launch
from tests.train.runtime.tiny import tiny_job, tiny_plan

LOST = Failure(1, "killed by signal 9 (SIGKILL)", doing="step 6", log="log")
CRASH = replace(LOST, error="ValueError: token 60000 of 0x7f00", would_repeat=True)


def policy(**settings: Any) -> RestartPolicy:
    return RestartPolicy(load_job(None, {k.replace("__", "."): v for k, v in settings.items()}))


def decided(one: RestartPolicy, *failures: tuple[Failure, int, int]) -> list[bool]:
    return [one.decide(f, step=s, checkpoint=c).goes_on for f, s, c in failures]


def test_the_example_of_the_module() -> None:
    one = policy(launch__max_restarts=2)
    assert decided(one, (LOST, 5, 0), (LOST, 7, 0), (LOST, 12, 10)) == [True] * 3
    assert one.used == 1
    assert decided(one, (LOST, 12, 10), (LOST, 12, 10)) == [True, False]


def test_no_restart_is_the_default() -> None:
    assert policy().decide(LOST, step=5, checkpoint=0) == Decision(False)


def test_the_same_error_at_the_same_step_ends_the_run() -> None:
    one = policy(launch__max_restarts=9)
    other_rank = replace(CRASH, rank=2, error="ValueError: token 60001 of 0x7faa")
    assert decided(one, (CRASH, 6, 5)) == [True]
    end = one.decide(other_rank, step=6, checkpoint=5)
    assert not end.goes_on and end.words == (
        "the same error came twice in a row after step 6, so it would come again: not started "
        "again, though 8 restarts of launch.max_restarts are left"
    )


@pytest.mark.parametrize(("failure", "step"), [(CRASH, 7), (replace(CRASH, error="KeyError: 'x'"), 6), (LOST, 6)])
def test_other_failures_are_tried_again(failure: Failure, step: int) -> None:
    one = policy(launch__max_restarts=9)
    assert decided(one, (CRASH, 6, 5), (failure, step, 5), (CRASH, 6, 5)) == [True] * 3


def test_kills_at_the_same_step_are_no_repetition() -> None:
    assert decided(policy(launch__max_restarts=3), *[(LOST, 6, 5)] * 4) == [True] * 3 + [False]


def test_a_rollback_leaves_out_the_batches_up_to_the_one_at_fault() -> None:
    one = policy(training__rollback_batches=3, training__max_rollbacks=2)
    bad = replace(CRASH, rollback=17)
    first = one.decide(bad, step=16, checkpoint=10)
    assert first == Decision(True, "rolling back to step 10, without batches 15 to 17", "15-17")
    second = one.decide(replace(bad, rollback=16), step=15, checkpoint=15)
    assert second.skip_batches == "15-17, 19"  # step 15 was of batch 18
    end = one.decide(bad, step=16, checkpoint=15)
    assert not end.goes_on and end.words.startswith("not started again after 2 rollbacks")


def test_a_rollback_reaches_no_further_back_than_the_checkpoint() -> None:
    one = policy(training__skip_batches="2-3")
    decision = one.decide(replace(CRASH, rollback=5), step=4, checkpoint=3)
    assert decision.skip_batches == "2-3, 6-7" and one.used == 0
    without = policy().decide(replace(CRASH, rollback=2), step=1, checkpoint=0)
    assert without.skip_batches == "1-2"


def test_the_ranks_read_what_is_left_out(data: Path, tmp_path: Path) -> None:
    plan = plan_launch(tiny_plan(tiny_job(data)), RunDir(tmp_path), Machine(2, 0, 2**34))
    changed = skip_batches(plan, "4-5")
    assert changed.job.training.skip_batches == "4-5"
    assert JobSpec.model_validate_json(changed.files["job.json"]) == changed.job
    assert skip_batches(plan, None) is plan


@pytest.mark.slow
def test_a_run_rolls_back_and_continues(data: Path, tmp_path: Path) -> None:
    """Losses that hardly fall count as spikes: from step 13 on, with a checkpoint at 10."""
    keys = {
        "training.on_spike": '"rollback"',
        "training.spike_factor": 1.0001,
        "training.spike_window": 12,
        "training.learning_rate": 1e-9,
        "training.max_rollbacks": 1,
        "checkpoint.interval": 5,
    }
    sets = [part for key, value in keys.items() for part in ("--set", f"{key}={value}")]
    run = launch(data, tmp_path / "run", "--tp", "1", *sets).ended()
    assert "rolling back to step 10, without batch" in run.stderr
    job = JobSpec.model_validate_json((run.run_dir / "job.json").read_text())
    assert job.training.skip_batches.startswith("11")
    assert run.summary["attempts"] == 2
