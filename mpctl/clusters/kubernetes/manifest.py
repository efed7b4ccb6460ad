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

Pods are not restarted: a PyTorchJob sets that; for a TrainJob its runtime decides, and a restarted
pod finds that its launch has ended.
"""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from mpctl.clusters.backend import JOB_VARIABLES
from mpctl.hosts.checks import named_device
from mpctl.rundir.marker import OPTION
from mpctl.spec.job import JobSpec

Manifest = dict[str, object]
"""An object of Kubernetes, or a part of one."""

API_VERSIONS = {"TrainJob": "trainer.kubeflow.org/v1alpha1", "PyTorchJob": "kubeflow.org/v1"}
CONTAINERS = {"TrainJob": "node", "PyTorchJob": "pytorch"}
MANAGER = "mpctl"
JOB_VARIABLE = JOB_VARIABLES["kubernetes"]
"""Environment variable of a pod: the name of the object that started it."""

AFTER_STOP_SECONDS = 30
"""Seconds that a pod has to end after its ranks have saved or were killed."""


def manifest_text(job: JobSpec, run: Path, *, name: str) -> str:
    """The object as YAML."""
    # Without anchors: a part that occurs twice is a copy.
    plain = json.loads(json.dumps(manifest(job, run, name=name)))
    return str(yaml.safe_dump(plain, sort_keys=False, width=100, allow_unicode=True))


def manifest(job: JobSpec, run: Path, *, name: str) -> Manifest:
    """The object of this name for a job that passed the checks. run: its directory, absolute, on
    the volume claim."""
    settings = job.launch.kubernetes
    labels = {
        "app.kubernetes.io/managed-by": MANAGER,
        "kueue.x-k8s.io/queue-name": settings.queue,
        "kueue.x-k8s.io/priority-class": settings.priority_class,
    }
    metadata: Manifest = {
        "name": name,
        "labels": {label: value for label, value in labels.items() if value is not None},
        "annotations": {"mpctl/run-dir": str(run)},
    }
    if settings.namespace is not None:
        metadata["namespace"] = settings.namespace
    # The pods may run as another user than the owner of the run directory.
    resumption = ["mpctl", "launch", "--resume", "--run-dir", str(run), OPTION]
    variables = {JOB_VARIABLE: name, **settings.env}
    program: Manifest = {
        "command": [*resumption, "--on", "torchrun"],
        "env": [{"name": variable, "value": value} for variable, value in variables.items()],
    }
    make_spec = _train_job_spec if settings.kind == "TrainJob" else _pytorch_job_spec
    return {
        "apiVersion": API_VERSIONS[settings.kind],
        "kind": settings.kind,
        "metadata": metadata,
        "spec": make_spec(job, program),
    }


def _train_job_spec(job: JobSpec, program: Manifest) -> Manifest:
    settings = job.launch.kubernetes
    trainer: Manifest = {
        "image": settings.image,
        "numNodes": job.cluster.nodes,
        "numProcPerNode": job.cluster.gpus_per_node or 1,
        **program,
        "resourcesPerNode": _resources(job),
    }
    pods = {**_pod_settings(job), "containers": [_container(job)]}
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


def _pytorch_job_spec(job: JobSpec, program: Manifest) -> Manifest:
    settings = job.launch.kubernetes
    container = {
        **_container(job), "image": settings.image, **program, "resources": _resources(job),
    }  # fmt: skip
    template: Manifest = {"spec": {**_pod_settings(job), "containers": [container]}}
    policy: Manifest = {"cleanPodPolicy": "Running", "backoffLimit": 0}
    if settings.queue:
        policy["suspend"] = True
    counts = {"Master": 1, "Worker": job.cluster.nodes - 1}
    return {
        "nprocPerNode": str(job.cluster.gpus_per_node or 1),
        "runPolicy": policy,
        "pytorchReplicaSpecs": {
            role: {"replicas": count, "restartPolicy": "Never", "template": template}
            for role, count in counts.items()
            if count
        },
    }


def _resources(job: JobSpec) -> Manifest:
    """The resources of a pod: the GPUs of a node, or on CPU a processor for each thread of its
    ranks."""
    settings, ranks = job.launch.kubernetes, job.cluster.gpus_per_node or 1
    amounts: dict[str, str] = {}
    processors = settings.cpus_per_node
    if named_device(job) != "cpu":  # the submitting machine may differ from the pods
        amounts[settings.gpu_resource] = str(ranks)
    elif processors is None:
        processors = ranks * (job.launch.threads_per_rank or 1)
    if processors is not None:
        amounts["cpu"] = str(processors)
    if settings.memory_per_node is not None:
        amounts["memory"] = settings.memory_per_node
    return {"requests": dict(amounts), "limits": dict(amounts)}


def _container(job: JobSpec) -> Manifest:
    """The container and its volumes: the run's, and shared memory, since a pod has only 64 MiB by
    default and NCCL needs more."""
    settings = job.launch.kubernetes
    mounts = [
        {"name": "runs", "mountPath": settings.mount_path},
        {"name": "shared-memory", "mountPath": "/dev/shm"},
    ]
    return {"name": CONTAINERS[settings.kind], "volumeMounts": mounts}


def _pod_settings(job: JobSpec) -> Manifest:
    """Settings of a pod other than its container; the fields have the same names in both kinds."""
    settings = job.launch.kubernetes
    pods: Manifest = {
        "volumes": [
            {"name": "runs", "persistentVolumeClaim": {"claimName": settings.claim}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        ],
        "terminationGracePeriodSeconds": round(job.launch.stop_seconds) + AFTER_STOP_SECONDS,
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
