"""A pod that is started again: which launches are over, and which go on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpctl.clusters.kubernetes.jobs import ended_launch
from mpctl.rundir.directory import RunDir
from mpctl.rundir.launcher import this_launcher, write_launcher, write_stop_request
from mpctl.runs.submitted import write_unstarted

POD = {"MPCTL_JOB": "llama-1"}


def ended(folder: Path, status: str | None, job: str = "llama-1") -> RunDir:
    run = RunDir(folder)
    write_launcher(run.launcher, this_launcher("torchrun", job_id=job))
    if status is not None:
        run.summary.write_text(json.dumps({"status": status}))
    return run


def test_a_failed_launch_is_over(tmp_path: Path) -> None:
    words = ended_launch(ended(tmp_path, "failed"), POD)
    assert words is not None and "llama-1 has failed" in words and "--submit" in words


def test_a_launch_that_was_refused_before_training_is_tried_again(tmp_path: Path) -> None:
    write_unstarted((run := ended(tmp_path, None)).path, "failed")
    assert json.loads(run.summary.read_text())["status"] == "failed"
    assert ended_launch(run, POD) is None


@pytest.mark.parametrize("status", ["stopped", "finished", None])
def test_a_pod_that_was_moved_or_killed_goes_on(tmp_path: Path, status: str | None) -> None:
    """Without a summary the pod of the launcher was killed."""
    run = ended(tmp_path, status)
    assert ended_launch(run, POD) is None
    write_stop_request(run.stop_request, now=False, relayed=True)  # one pod of several was moved
    assert ended_launch(run, POD) is None


def test_a_launch_that_was_stopped_on_request_is_over(tmp_path: Path) -> None:
    run = ended(tmp_path, "stopped")
    write_stop_request(run.stop_request, now=False)
    words = ended_launch(run, POD)
    assert words is not None and "stopped on request" in words


def test_a_new_submission_of_the_same_run_starts(tmp_path: Path) -> None:
    assert ended_launch(ended(tmp_path, "failed", job="llama-0"), POD) is None


def test_outside_of_a_pod_nothing_is_over(tmp_path: Path) -> None:
    assert ended_launch(ended(tmp_path, "failed"), {}) is None
    assert ended_launch(RunDir(tmp_path / "absent"), POD) is None
    (tmp_path / "launcher.json").write_text("[]")
    assert ended_launch(RunDir(tmp_path), POD) is None
