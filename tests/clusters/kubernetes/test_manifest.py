"""The created objects: valid under Kubeflow's published schemas, and as planned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from mpctl.clusters.kubernetes.manifest import CONTAINERS, manifest_text
from tests.clusters.kubernetes.jobs import EVERYTHING, KINDS, kubernetes_job
from tests.clusters.kubernetes.published import pytorch_job_issues, train_job_issues

RUN = Path("/mnt/runs/llama")
SCHEMAS: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "TrainJob": train_job_issues, "PyTorchJob": pytorch_job_issues,
}  # fmt: skip
COMMAND = ["mpctl", "launch", "--resume", "--run-dir", str(RUN), "--allow-other-owner",
           "--on", "torchrun"]  # fmt: skip


def text_of(kind: str, device: str = "cuda", **settings: Any) -> str:
    job = kubernetes_job(device=device, kind=kind, **settings)
    return manifest_text(job, RUN, name="llama-1")


def rendered(kind: str, device: str = "cuda", **settings: Any) -> Any:
    """The object as kubectl reads it."""
    return yaml.safe_load(text_of(kind, device, **settings))


def pods(kind: str, document: Any) -> list[Any]:
    """The parts of an object that become specs of pods: of the Master and of the Workers."""
    if kind == "PyTorchJob":
        replicas = document["spec"]["pytorchReplicaSpecs"]
        return [replica["template"]["spec"] for replica in replicas.values()]
    (patch,) = document["spec"]["runtimePatches"]
    (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    assert job["name"] == "node"
    return [job["template"]["spec"]["template"]["spec"]]


def at(document: Any, path: tuple[str | int, ...]) -> Any:
    for part in path:
        document = document[part]
    return document


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", [{}, EVERYTHING], ids=["least", "everything"])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_it_is_valid_under_the_published_schema(
    kind: str, settings: dict[str, Any], device: str
) -> None:
    assert SCHEMAS[kind](rendered(kind, device, **settings)) == []


WRONG: list[tuple[str, tuple[str | int, ...], Any]] = [
    ("TrainJob", ("spec", "trainer", "numProcPerNode"), "4"),
    ("TrainJob", ("spec", "runtimePatches", 0, "trainingRuntimeSpec", "template", "spec",
                  "replicatedJobs", 0, "template", "spec", "template", "spec", "nodeName"), "n1"),
    ("PyTorchJob", ("spec", "nprocPerNode"), 4),
    ("PyTorchJob", ("spec", "pytorchReplicaSpecs", "Worker", "template", "spec", "containers", 0,
                    "volumeMounts", 0, "path"), "/x"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "path", "value"), WRONG)
def test_the_schema_refuses_a_wrong_field(
    kind: str, path: tuple[str | int, ...], value: object
) -> None:
    document = rendered(kind)
    at(document, path[:-1])[path[-1]] = value
    (issue,) = SCHEMAS[kind](document)
    assert str(path[-1]) in issue or "StrictInt" in issue


@pytest.mark.parametrize("kind", KINDS)
def test_every_pod_joins_the_world_with_the_run_mounted(kind: str) -> None:
    document = rendered(kind)
    trainer = document["spec"].get("trainer")
    for pod in pods(kind, document):
        (container,) = pod["containers"]
        assert container["name"] == CONTAINERS[kind]
        assert (trainer or container)["command"] == COMMAND
        assert (trainer or container)["image"] == "registry/mpctl:1"
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts == {"runs": "/mnt/runs", "shared-memory": "/dev/shm"}
        claims = [volume.get("persistentVolumeClaim") for volume in pod["volumes"]]
        assert claims == [{"claimName": "runs"}, None]
        assert pod["terminationGracePeriodSeconds"] == 60 + 30  # launch.stop_seconds and some


@pytest.mark.parametrize("kind", KINDS)
def test_its_world_is_that_of_the_plan(kind: str) -> None:
    spec = rendered(kind)["spec"]
    if kind == "TrainJob":
        trainer = spec["trainer"]
        assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 4)
        resources = trainer["resourcesPerNode"]
    else:
        replicas = spec["pytorchReplicaSpecs"]
        assert spec["nprocPerNode"] == "4"
        assert {role: replica["replicas"] for role, replica in replicas.items()} == {
            "Master": 1, "Worker": 1,
        }  # fmt: skip
        (container,) = replicas["Worker"]["template"]["spec"]["containers"]
        resources = container["resources"]
    # Requests too: with limits alone the Trainer starts one process a node.
    assert resources == {"requests": {"nvidia.com/gpu": "4"}, "limits": {"nvidia.com/gpu": "4"}}


def test_a_pytorch_job_of_one_node_has_no_worker_and_none_is_restarted() -> None:
    job = kubernetes_job(kind="PyTorchJob")
    cluster = job.cluster.model_copy(update={"nodes": 1})
    text = manifest_text(job.model_copy(update={"cluster": cluster}), RUN, name="a")
    spec = yaml.safe_load(text)["spec"]
    assert list(spec["pytorchReplicaSpecs"]) == ["Master"]
    assert spec["pytorchReplicaSpecs"]["Master"]["restartPolicy"] == "Never"
    assert spec["runPolicy"]["backoffLimit"] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_on_cpu_it_asks_for_the_threads_of_its_ranks(kind: str) -> None:
    text = text_of(kind, "cpu")
    assert "cpu: '12'" in text and "gpu" not in text.replace("torch-distributed", "")


@pytest.mark.parametrize("kind", KINDS)
def test_a_queue_of_kueue_gets_a_suspended_job(kind: str) -> None:
    document = rendered(kind, queue="gpus", priority_class="high")
    labels = document["metadata"]["labels"]
    assert labels["kueue.x-k8s.io/queue-name"] == "gpus"
    assert labels["kueue.x-k8s.io/priority-class"] == "high"
    spec = document["spec"]
    assert (spec if kind == "TrainJob" else spec["runPolicy"])["suspend"] is True
    assert "suspend" not in text_of(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_further_settings_reach_the_pods(kind: str) -> None:
    text = text_of(kind, **EVERYTHING)
    document = yaml.safe_load(text)
    assert document["metadata"]["namespace"] == "team-a"
    for pod in pods(kind, document):
        assert pod["nodeSelector"] == {"nvidia.com/gpu.product": "H100"}
        assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists"}]
        assert pod["serviceAccountName"] == "trainer"
        assert pod["imagePullSecrets"] == [{"name": "registry"}]
    assert "memory: 512Gi" in text and "cpu: '96'" in text and "name: NCCL_DEBUG" in text


def test_the_text_has_no_anchors() -> None:
    text = text_of("PyTorchJob")
    assert "&id" not in text and "*id" not in text
