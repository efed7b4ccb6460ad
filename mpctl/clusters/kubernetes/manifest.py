"""The object that is created: a TrainJob or a PyTorchJob, as a pure function of the plan.

Both start one pod a node with all GPUs of the node, and set PET_NNODES, PET_NODE_RANK and the
address of node 0 in each of them. What each wants differently:

    TrainJob    trainer.kubeflow.org/v1alpha1, `numProcPerNode` an integer. Image, command and
                resources are fields of `trainer`; all else of a pod is a patch of the runtime,
                whose container is named `node`.
    PyTorchJob  kubeflow.org/v1, `nprocPerNode` a string. A template for the one Master and one for
                the Workers, with a container that must be named `pytorch`.

Resources are given as limits and as requests: the Trainer counts one process a node where a
TrainJob has limits only (pkg/runtime/framework/plugins/torch/torch.go, calculateNumProcPerNode).

Pods are not restarted: a PyTorchJob says so; for a TrainJob its runtime decides, and a pod that is
started again finds that its launch has ended.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from mpctl.clusters.backend import JOB_VARIABLES
from mpctl.hosts.checks import Device, named_device
from mpctl.rundir.marker import OPTION
from mpctl.spec.job import JobSpec
from mpctl.spec.launch import KubernetesSpec

Manifest = dict[str, object]
"""An object of Kubernetes, or a part of one."""

API_VERSIONS = {"TrainJob": "trainer.kubeflow.org/v1alpha1", "PyTorchJob": "kubeflow.org/v1"}
CONTAINERS = {"TrainJob": "node", "PyTorchJob": "pytorch"}
MANAGER = "mpctl"
JOB_VARIABLE = JOB_VARIABLES["kubernetes"]
"""Environment variable of a pod: the name of the object that started it."""

AFTER_STOP_SECONDS = 30
"""Time that a pod has to end after its ranks have saved or were killed, seconds."""


@dataclass(frozen=True)
class PodJob:
    """What the pods of one submission run. name: of the object; command: of every pod; run_path:
    the run directory; processors: CPUs of a pod, None to ask for none; grace_seconds: from the
    request to end a pod to its kill."""

    name: str
    run_path: Path
    command: tuple[str, ...]
    nodes: int
    ranks_per_node: int
    device: Device
    processors: int | None
    grace_seconds: int
    settings: KubernetesSpec

    @property
    def container(self) -> str:
        return CONTAINERS[self.settings.kind]


def pod_job(job: JobSpec, run_path: Path, *, name: str) -> PodJob:
    """The submission of a job that passed the checks. run_path: absolute, on the volume claim."""
    settings, ranks = job.launch.kubernetes, job.cluster.gpus_per_node or 1
    device = named_device(job) or "cuda"  # the machine that submits need not be like the pods
    processors = settings.cpus_per_node
    if processors is None and device == "cpu":
        processors = ranks * (job.launch.threads_per_rank or 1)
    return PodJob(
        name=name,
        run_path=run_path,
        command=pod_command(run_path),
        nodes=job.cluster.nodes,
        ranks_per_node=ranks,
        device=device,
        processors=processors,
        grace_seconds=round(job.launch.stop_seconds) + AFTER_STOP_SECONDS,
        settings=settings,
    )


def pod_command(run_path: Path) -> tuple[str, ...]:
    """What every pod runs: it joins the world that Kubeflow has started. The user of the pods need
    not be the one who submits, to whom the run directory belongs."""
    resumption = ("mpctl", "launch", "--resume", "--run-dir", str(run_path), OPTION)
    return (*resumption, "--on", "torchrun")


def manifest(job: PodJob) -> Manifest:
    kind = job.settings.kind
    return {
        "apiVersion": API_VERSIONS[kind],
        "kind": kind,
        "metadata": _metadata(job),
        "spec": _train_job_spec(job) if kind == "TrainJob" else _pytorch_job_spec(job),
    }


def manifest_text(document: Manifest) -> str:
    plain = json.loads(json.dumps(document))  # without anchors: a part that occurs twice is a copy
    return str(yaml.safe_dump(plain, sort_keys=False, width=100, allow_unicode=True))


def _metadata(job: PodJob) -> Manifest:
    settings = job.settings
    labels = {
        "app.kubernetes.io/managed-by": MANAGER,
        "kueue.x-k8s.io/queue-name": settings.queue,
        "kueue.x-k8s.io/priority-class": settings.priority_class,
    }
    metadata: Manifest = {
        "name": job.name,
        "labels": {name: value for name, value in labels.items() if value is not None},
        "annotations": {"mpctl/run-dir": str(job.run_path)},
    }
    if settings.namespace is not None:
        metadata["namespace"] = settings.namespace
    return metadata


def _train_job_spec(job: PodJob) -> Manifest:
    settings = job.settings
    trainer: Manifest = {
        "image": settings.image,
        "numNodes": job.nodes,
        "numProcPerNode": job.ranks_per_node,
        "command": list(job.command),
        "env": _environment(job),
        "resourcesPerNode": _resources(job),
    }
    pods = {**_pod_settings(job), "containers": [_mounts(job)]}
    patch = {"name": "node", "template": {"spec": {"template": {"spec": pods}}}}
    spec: Manifest = {
        "runtimeRef": {"name": settings.runtime, "kind": settings.runtime_kind},
        "trainer": trainer,
        "runtimePatches": [
            {
                "manager": MANAGER,
                "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [patch]}}},
            }
        ],
    }
    return {"suspend": True, **spec} if settings.queue else spec


def _pytorch_job_spec(job: PodJob) -> Manifest:
    settings = job.settings
    container: Manifest = {
        **_mounts(job),
        "image": settings.image,
        "command": list(job.command),
        "env": _environment(job),
        "resources": _resources(job),
    }
    template: Manifest = {"spec": {**_pod_settings(job), "containers": [container]}}
    policy: Manifest = {"cleanPodPolicy": "Running", "backoffLimit": 0}
    if settings.queue:
        policy["suspend"] = True
    counts = {"Master": 1, "Worker": job.nodes - 1}
    return {
        "nprocPerNode": str(job.ranks_per_node),
        "runPolicy": policy,
        "pytorchReplicaSpecs": {
            role: {"replicas": count, "restartPolicy": "Never", "template": template}
            for role, count in counts.items()
            if count
        },
    }


def _resources(job: PodJob) -> Manifest:
    amounts: dict[str, str] = {}
    if job.device == "cuda":
        amounts[job.settings.gpu_resource] = str(job.ranks_per_node)
    if job.processors is not None:
        amounts["cpu"] = str(job.processors)
    if job.settings.memory_per_node is not None:
        amounts["memory"] = job.settings.memory_per_node
    return {"requests": dict(amounts), "limits": dict(amounts)}


def _environment(job: PodJob) -> Sequence[Manifest]:
    variables = {JOB_VARIABLE: job.name, **job.settings.env}
    return [{"name": name, "value": value} for name, value in variables.items()]


def _mounts(job: PodJob) -> Manifest:
    """The container's volumes: the run's, and shared memory, of which a pod has 64 MiB by itself
    and NCCL needs more."""
    mounts = [
        {"name": "runs", "mountPath": job.settings.mount_path},
        {"name": "shared-memory", "mountPath": "/dev/shm"},
    ]
    return {"name": job.container, "volumeMounts": mounts}


def _pod_settings(job: PodJob) -> Manifest:
    """What a pod has beside its container; the fields have the same names in both kinds."""
    settings = job.settings
    pods: Manifest = {
        "volumes": [
            {"name": "runs", "persistentVolumeClaim": {"claimName": settings.claim}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        ],
        "terminationGracePeriodSeconds": job.grace_seconds,
    }
    if settings.service_account is not None:
        pods["serviceAccountName"] = settings.service_account
    if settings.image_pull_secret is not None:
        pods["imagePullSecrets"] = [{"name": settings.image_pull_secret}]
    if settings.node_selector:
        pods["nodeSelector"] = dict(settings.node_selector)
    if settings.tolerations:
        pods["tolerations"] = [{"key": key, "operator": "Exists"} for key in settings.tolerations]
    return pods
