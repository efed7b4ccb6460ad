"""The created objects: valid under Kubeflow's published schemas, and as planned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from mpctl.plan.planning.plan import make_plan
from mpctl.run.clusters.kubernetes.manifest import CONTAINERS, manifest_text
from mpctl.run.clusters.torchrun.world import find_world
from tests.run.clusters.kubernetes.jobs import EVERYTHING, FURTHER, KINDS, kubernetes_job
from tests.run.clusters.kubernetes.pod_security import restricted_issues
from tests.run.clusters.kubernetes.published import job_set_issues, pytorch_job_issues, train_job_issues

RUN = Path("/mnt/runs/llama")
SCHEMAS: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "TrainJob": train_job_issues,
    "PyTorchJob": pytorch_job_issues,
    "JobSet": job_set_issues,
}
COMMAND = ["mpctl", "launch", "--resume", "--run-dir", str(RUN), "--allow-other-owner", "--on", "torchrun"]


def text_of(kind: str, device: str = "cuda", **settings: Any) -> str:
    job = kubernetes_job(device=device, kind=kind, **settings)
    return manifest_text(make_plan(job), RUN, name="llama-1")


def rendered(kind: str, device: str = "cuda", **settings: Any) -> Any:
    """The object as kubectl reads it."""
    return yaml.safe_load(text_of(kind, device, **settings))


def pods(kind: str, document: Any) -> list[Any]:
    """The parts of an object that become specs of pods: of the Master and of the Workers."""
    if kind == "PyTorchJob":
        replicas = document["spec"]["pytorchReplicaSpecs"]
        return [replica["template"]["spec"] for replica in replicas.values()]
    spec = document["spec"]
    if kind == "TrainJob":
        (patch,) = spec["runtimePatches"]
        spec = patch["trainingRuntimeSpec"]["template"]["spec"]
    (job,) = spec["replicatedJobs"]
    assert job["name"] == "node"
    return [job["template"]["spec"]["template"]["spec"]]


def at(document: Any, path: tuple[str | int, ...]) -> Any:
    for part in path:
        document = document[part]
    return document


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", [{}, EVERYTHING], ids=["least", "everything"])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_it_is_valid_under_the_published_schema(kind: str, settings: dict[str, Any], device: str) -> None:
    assert SCHEMAS[kind](rendered(kind, device, **settings)) == []
    if settings and kind != "TrainJob":
        assert SCHEMAS[kind](rendered(kind, device, **settings, **FURTHER)) == []


WRONG: list[tuple[str, tuple[str | int, ...], Any]] = [
    ("TrainJob", ("spec", "trainer", "numProcPerNode"), "4"),
    (
        "TrainJob",
        (
            "spec",
            "runtimePatches",
            0,
            "trainingRuntimeSpec",
            "template",
            "spec",
            "replicatedJobs",
            0,
            "template",
            "spec",
            "template",
            "spec",
            "nodeName",
        ),
        "n1",
    ),
    ("PyTorchJob", ("spec", "nprocPerNode"), 4),
    (
        "PyTorchJob",
        ("spec", "pytorchReplicaSpecs", "Worker", "template", "spec", "containers", 0, "volumeMounts", 0, "path"),
        "/x",
    ),
]


@pytest.mark.parametrize(("kind", "path", "value"), WRONG)
def test_the_schema_refuses_a_wrong_field(kind: str, path: tuple[str | int, ...], value: object) -> None:
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
    elif kind == "JobSet":
        (replicated,) = spec["replicatedJobs"]
        job = replicated["template"]["spec"]
        assert (job["parallelism"], job["completions"], job["backoffLimit"]) == (2, 2, 0)
        ignored = [rule.keys() - {"action"} for rule in job["podFailurePolicy"]["rules"]]
        assert ignored == [{"onPodConditions"}, {"onExitCodes"}]
        resources = job["template"]["spec"]["containers"][0]["resources"]
    else:
        replicas = spec["pytorchReplicaSpecs"]
        assert spec["nprocPerNode"] == "4"
        assert {role: replica["replicas"] for role, replica in replicas.items()} == {"Master": 1, "Worker": 1}
        (container,) = replicas["Worker"]["template"]["spec"]["containers"]
        resources = container["resources"]
    # Requests too: with limits alone the Trainer starts one process a node. Processors are asked
    # for without a limit, which would slow ranks down that have the node for themselves.
    assert resources["limits"] == {"nvidia.com/gpu": "4"}
    assert resources["requests"].items() >= {"nvidia.com/gpu": "4", "cpu": "12"}.items()


def test_a_pod_of_gpus_asks_for_two_processors_a_rank_where_no_threads_are_set() -> None:
    job = kubernetes_job(kind="JobSet")
    launch = job.launch.model_copy(update={"threads_per_rank": None})
    job = job.model_copy(update={"launch": launch})
    document = yaml.safe_load(manifest_text(make_plan(job), RUN, name="a"))
    (pod,) = pods("JobSet", document)
    assert pod["containers"][0]["resources"]["requests"]["cpu"] == "8"


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_pod_requests_the_memory_that_the_plan_knows_of(device: str) -> None:
    """So that it is not the first that a full node evicts; a figure of one's own is a limit too."""
    (pod,) = pods("JobSet", rendered("JobSet", device))
    resources = pod["containers"][0]["resources"]
    plan = make_plan(kubernetes_job(device=device, kind="JobSet"))
    assert plan.estimate is not None
    step = 4 * plan.estimate.memory[0].allocated_bytes if device == "cpu" else 0
    step += 4 * (2**29 if device == "cpu" else 2**31)  # Python, torch and CUDA of each rank
    copies = plan.estimate.checkpoint_bytes  # one replica writes, and a node has all of it
    asked = int(resources["requests"]["memory"].removesuffix("Mi")) * 2**20
    assert 0 <= asked - (step + copies) < 2**20 and "memory" not in resources["limits"]
    (pod,) = pods("JobSet", rendered("JobSet", device, memory_per_node="1Gi"))
    resources = pod["containers"][0]["resources"]
    assert resources["requests"]["memory"] == resources["limits"]["memory"] == "1Gi"


def test_a_pytorch_job_of_one_node_has_no_worker_and_replaces_pods_that_a_signal_ended() -> None:
    job = kubernetes_job(kind="PyTorchJob")
    cluster = job.cluster.model_copy(update={"nodes": 1})
    text = manifest_text(make_plan(job.model_copy(update={"cluster": cluster})), RUN, name="a")
    spec = yaml.safe_load(text)["spec"]
    assert list(spec["pytorchReplicaSpecs"]) == ["Master"]
    assert spec["pytorchReplicaSpecs"]["Master"]["restartPolicy"] == "ExitCode"
    assert "backoffLimit" not in spec["runPolicy"]  # with one the first replaced pod ends the job


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
    assert (spec["runPolicy"] if kind == "PyTorchJob" else spec)["suspend"] is True
    assert "suspend" not in text_of(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_further_settings_reach_the_pods(kind: str) -> None:
    text = text_of(kind, **EVERYTHING)
    document = yaml.safe_load(text)
    assert document["metadata"]["namespace"] == "team-a"
    for pod in pods(kind, document):
        assert pod["nodeSelector"] == {"nvidia.com/gpu.product": "H100"}
        assert pod["tolerations"] == [
            {"key": "nvidia.com/gpu", "operator": "Exists"},
            {"key": "team", "operator": "Equal", "value": "a", "effect": "NoSchedule"},
            {"key": "gone", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 60},
        ]
        assert pod["serviceAccountName"] == "trainer"
        assert pod["imagePullSecrets"] == [{"name": "registry"}]
        assert pod["securityContext"] == {
            "runAsUser": 1000,
            "runAsGroup": 1000,
            "fsGroup": 2000,
            "fsGroupChangePolicy": "OnRootMismatch",
        }
        (container,) = pod["containers"]
        assert container["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
        assert {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": "64Gi"}} in (pod["volumes"])
        corpora = {"claimName": "corpora", "readOnly": True}
        assert {"name": "volume-0", "persistentVolumeClaim": corpora} in pod["volumes"]
        assert pod["volumes"][-1] == {"name": "scratch", "emptyDir": {"sizeLimit": "1Ti"}}
        mount = {"name": "volume-0", "mountPath": "/mnt/corpora", "readOnly": True, "subPath": "web"}
        assert mount in container["volumeMounts"]
        ((preferred,),) = pod["affinity"]["podAffinity"].values()
        assert preferred["podAffinityTerm"]["topologyKey"] == "topology.kubernetes.io/zone"
    assert "memory: 512Gi" in text and "cpu: '96'" in text and "name: NCCL_DEBUG" in text
    assert "rdma/hca: '8'" in text and text.count("example.com/owner") >= 2
    secret = {"secretKeyRef": {"name": "hub", "key": "token"}}
    trainer = document["spec"].get("trainer")
    for pod in pods(kind, document):
        env = (trainer or pod["containers"][0])["env"]
        assert {"name": "HF_TOKEN", "valueFrom": secret} in env


@pytest.mark.parametrize("kind", KINDS)
def test_the_restricted_policy_admits_the_pods_on_request(kind: str) -> None:
    """By the published rules of the policy; without the setting they are refused."""
    settings = {**EVERYTHING, "ipc_lock": False}
    for pod in pods(kind, rendered(kind, **settings, restricted=True)):
        assert list(restricted_issues(pod)) == []
    for pod in pods(kind, rendered(kind, **EVERYTHING)):
        assert "runAsNonRoot" in list(restricted_issues(pod))


def test_settings_that_a_train_job_has_no_field_for() -> None:
    (pod,) = pods("JobSet", document := rendered("JobSet", **FURTHER))
    assert (pod["hostNetwork"], pod["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    (container,) = pod["containers"]
    assert container["envFrom"] == [{"secretRef": {"name": "hub"}}, {"configMapRef": {"name": "nccl"}}]
    assert document["spec"]["ttlSecondsAfterFinished"] == 3600
    assert rendered("PyTorchJob", **FURTHER)["spec"]["runPolicy"]["ttlSecondsAfterFinished"] == 3600


def test_a_pod_of_a_job_set_finds_its_place_and_node_0() -> None:
    (pod,) = pods("JobSet", rendered("JobSet"))
    env = {one["name"]: one.get("value") for one in pod["containers"][0]["env"]}
    (index,) = (
        one["valueFrom"]["fieldRef"]["fieldPath"]
        for one in pod["containers"][0]["env"]
        if one["name"] == "PET_NODE_RANK"
    )
    assert index == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    world = find_world({**{k: v for k, v in env.items() if v is not None}, "PET_NODE_RANK": "1"})
    assert world is not None
    assert (world.nodes, world.node, world.ranks_per_node) == (2, 1, 4)
    assert env["PET_MASTER_ADDR"] == "llama-1-node-0-0.llama-1"
    assert pod["restartPolicy"] == "Never"


def test_the_text_has_no_anchors() -> None:
    text = text_of("PyTorchJob")
    assert "&id" not in text and "*id" not in text
