"""The state of a job from kubectl's JSON: jobs and pods as the controllers leave them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpctl.clusters.kubernetes.jobs import job_state, pod_selector, resource


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
    rows = [{"type": kind, "status": "True", "reason": reason, "message": message}
            for kind, reason, message in conditions]  # fmt: skip
    return {"status": {"conditions": rows}}


RUNNING = {"items": [pod(1), pod(0)]}


def test_pods_run() -> None:
    state = job_state(job(), RUNNING)
    assert (state.phase, state.reason) == ("running", "")
    assert [(p.node, p.host, p.exit_code) for p in state.pods] == [(0, "n0", None), (1, "n1", None)]


@pytest.mark.parametrize(
    ("condition", "phase"),
    [("Suspended", "suspended"), ("Complete", "succeeded"), ("Succeeded", "succeeded"),
     ("Failed", "failed"), ("Running", "running")],
)  # fmt: skip
def test_a_condition_decides(condition: str, phase: str) -> None:
    state = job_state(job(("Created", "", ""), (condition, "Because", "of this")), RUNNING)
    assert (state.phase, state.reason) == (phase, "Because: of this")


def test_a_condition_that_is_false_says_nothing() -> None:
    document = job(("Suspended", "Resumed", "it was resumed"))
    document["status"]["conditions"][0]["status"] = "False"
    assert job_state(document, RUNNING).phase == "running"


def test_why_a_job_is_pending() -> None:
    unplaced = pod(0, "Pending", conditions=[
        {"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
         "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."},
    ])  # fmt: skip
    state = job_state(job(), {"items": [unplaced]})
    assert state.phase == "pending" and "Insufficient nvidia.com/gpu" in state.reason
    waiting = pod(
        0, "Pending", **container(waiting={"reason": "ImagePullBackOff", "message": "no"})
    )
    assert job_state(job(), {"items": [waiting]}).reason == "ImagePullBackOff: no"
    assert job_state(job(), {"items": []}) == job_state({}, {})


def test_how_a_container_ended() -> None:
    killed = pod(1, "Failed", **container(terminated={"exitCode": 137, "reason": "OOMKilled"}))
    (state,) = job_state(job(), {"items": [killed]}).pods
    assert (state.exit_code, state.problem) == (137, "OOMKilled")


def test_pods_of_a_pytorch_job_are_numbered_from_the_master() -> None:
    def replica(role: str, index: int) -> dict[str, Any]:
        labels = {"training.kubeflow.org/replica-type": role,
                  "training.kubeflow.org/replica-index": str(index)}  # fmt: skip
        return {"metadata": {"name": f"{role}-{index}", "labels": labels}}

    items = [replica("worker", 1), replica("worker", 0), replica("master", 0)]
    names = [p.name for p in job_state({}, {"items": items}).pods]
    assert names == ["master-0", "worker-0", "worker-1"]


def test_how_objects_are_named() -> None:
    assert resource("PyTorchJob") == "pytorchjobs.kubeflow.org"
    assert pod_selector("TrainJob", "a") == "jobset.sigs.k8s.io/jobset-name=a"


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["status", "conditions", "items", "type", "metadata", "state",
                                       "containerStatuses", "spec", "labels"]), inner, max_size=4),
)  # fmt: skip


@given(ANYTHING, ANYTHING)
def test_no_answer_of_a_cluster_raises(document: object, pods: object) -> None:
    assert job_state(document, pods).phase
