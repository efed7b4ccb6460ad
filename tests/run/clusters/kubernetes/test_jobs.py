"""The state of a job from kubectl's JSON: jobs and pods as the controllers leave them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpctl.records.rundir.directory import RunDir
from mpctl.records.rundir.launcher import this_launcher, write_launcher, write_stop_request
from mpctl.run.clusters.backend import ScheduledJob
from mpctl.run.clusters.kubernetes.jobs import ended_launch, read_job, resource
from mpctl.run.history.submitted import write_unstarted


def pod(index: int, phase: str = "Running", **status: Any) -> dict[str, Any]:
    annotations = {"batch.kubernetes.io/job-completion-index": str(index)}
    return {
        "metadata": {"name": f"llama-node-0-{index}-x", "annotations": annotations},
        "spec": {"nodeName": f"n{index}"},
        "status": {"phase": phase, **status},
    }


def container(**state: Any) -> dict[str, Any]:
    return {"containerStatuses": [{"name": "node", "state": state}]}


def job(*conditions: tuple[str, str, str]) -> dict[str, Any]:
    rows = [
        {"type": kind, "status": "True", "reason": reason, "message": message} for kind, reason, message in conditions
    ]
    return {"status": {"conditions": rows}}


RUNNING = {"items": [pod(1), pod(0)]}


def test_pods_run() -> None:
    state = read_job(job(), RUNNING)
    assert state == ScheduledJob("running", is_active=True, has_begun=True)


@pytest.mark.parametrize(
    ("condition", "phase", "is_active", "has_begun"),
    [
        ("Suspended", "suspended", True, False),
        ("Complete", "succeeded", False, True),
        ("Succeeded", "succeeded", False, True),
        ("Failed", "failed", False, True),
        ("Running", "running", True, True),
    ],
)
def test_a_condition_decides(condition: str, phase: str, is_active: bool, has_begun: bool) -> None:
    state = read_job(job(("Created", "", ""), (condition, "Because", "of this")), RUNNING)
    assert state == ScheduledJob(f"{phase} (Because: of this)", is_active, has_begun)


def test_a_condition_that_is_false_is_ignored() -> None:
    document = job(("Suspended", "Resumed", "it was resumed"))
    document["status"]["conditions"][0]["status"] = "False"
    assert read_job(document, RUNNING).state == "running"


def test_why_a_job_is_pending() -> None:
    unplaced = pod(
        0,
        "Pending",
        conditions=[
            {
                "type": "PodScheduled",
                "status": "False",
                "reason": "Unschedulable",
                "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
            }
        ],
    )
    state = read_job(job(), {"items": [unplaced]})
    assert state.state.startswith("pending") and "Insufficient nvidia.com/gpu" in state.state
    assert state.is_active and not state.has_begun
    for reason, of in (
        ({"reason": "ImagePullBackOff", "message": "no"}, "waiting"),
        ({"exitCode": 137, "reason": "OOMKilled"}, "terminated"),
    ):
        held = pod(0, "Pending", **container(**{of: reason}))
        words = "ImagePullBackOff: no" if of == "waiting" else "OOMKilled"
        assert read_job(job(), {"items": [held]}).state == f"pending ({words})"
    assert read_job(job(), {"items": []}) == read_job({}, {})


def test_how_objects_are_named() -> None:
    assert resource("PyTorchJob") == "pytorchjobs.kubeflow.org"


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["status", "conditions", "items", "type", "metadata", "state", "containerStatuses", "spec", "labels"]
            ),
            inner,
            max_size=4,
        )
    ),
)


@given(ANYTHING, ANYTHING)
def test_no_answer_of_a_cluster_raises(document: object, pods: object) -> None:
    assert read_job(document, pods).state


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
def test_a_pod_that_was_moved_or_killed_continues(tmp_path: Path, status: str | None) -> None:
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
