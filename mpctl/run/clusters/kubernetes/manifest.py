"""The object that is created, as a pure function of the plan: a TrainJob, a PyTorchJob or a JobSet.

Each starts one pod a node with all GPUs of the node. What differs:

    TrainJob    trainer.kubeflow.org/v1alpha1, `numProcPerNode` an integer. Image, command,
                environment and resources are fields of `trainer`; what else it says of a pod is a
                patch of the runtime, whose container is named `node`, and of few fields.
    PyTorchJob  kubeflow.org/v1, `nprocPerNode` a string. A template for the one Master and one for
                the Workers, with a container that must be named `pytorch`.
    JobSet      jobset.x-k8s.io/v1alpha2, one indexed Job with a pod a node. The controllers of the
                other two set PET_NNODES, PET_NODE_RANK and PET_MASTER_ADDR in each pod; here the
                object does: pod I of it is named NAME-node-0-I, in the subdomain NAME.

Resources are given as limits and as requests: the Trainer counts one process a node where a
TrainJob has limits only (pkg/runtime/framework/plugins/torch/torch.go, calculateNumProcPerNode).

A pod that Kubernetes takes away (a drained or lost node, preemption), or that ends by SIGTERM after
it has saved, is replaced and goes on; one that fails ends the object:

    JobSet      podFailurePolicy ignores the former, and backoffLimit 0 lets no other be restarted
    PyTorchJob  restartPolicy ExitCode replaces pods with a code of 128 or more, or without one
                (pkg/controller.v1/common/pod.go of the Training Operator, ReconcilePods), unless
                there is a backoffLimit
    TrainJob    its runtime decides, and a restarted pod finds that its launch has ended (jobs.py)
"""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from mpctl.plan.planning.plan import Plan
from mpctl.records.rundir.marker import OPTION
from mpctl.run.clusters.backend import JOB_VARIABLES
from mpctl.run.hosts.checks import named_device, node_memory_bytes
from mpctl.spec.job import JobSpec
from mpctl.spec.launch import KubernetesSpec, TolerationSpec

Manifest = dict[str, Any]
"""An object of Kubernetes, or a part of one."""

API_VERSIONS = {
    "TrainJob": "trainer.kubeflow.org/v1alpha1",
    "PyTorchJob": "kubeflow.org/v1",
    "JobSet": "jobset.x-k8s.io/v1alpha2",
}
CONTAINERS = {"TrainJob": "node", "PyTorchJob": "pytorch", "JobSet": "node"}
MANAGER = "mpctl"
JOB_VARIABLE = JOB_VARIABLES["kubernetes"]
"""Environment variable of a pod: the name of the object that started it."""

POD_LABELS = {
    "TrainJob": "jobset.sigs.k8s.io/jobset-name",
    "PyTorchJob": "training.kubeflow.org/job-name",
    "JobSet": "jobset.sigs.k8s.io/jobset-name",
}
"""The label of a pod that has the name of its object."""

AFTER_STOP_SECONDS = 30
"""Seconds that a pod has to end after its ranks have saved or were killed."""

REPLACED: list[Manifest] = [
    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    {
        "action": "Ignore",
        "onExitCodes": {"containerName": CONTAINERS["JobSet"], "operator": "In", "values": [128 + signal.SIGTERM]},
    },
]
"""Failures of pods of a JobSet that do not count: each gets a new pod with the same index. All pods
of a run stop when one of them is drained; the others then have the second mark alone."""

COMPLETION_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
MASTER_PORT = "29500"
GPU_RANK_THREADS = 2
"""Threads of a rank on a GPU that compute at the same time: the one that launches kernels in the
forward pass or backward, and the one that copies batches and checkpoints."""


def manifest_text(plan: Plan, run: Path, *, name: str) -> str:
    """The object as YAML."""
    # Without anchors: a part that occurs twice is a copy.
    plain = json.loads(json.dumps(manifest(plan, run, name=name)))
    return str(yaml.safe_dump(plain, sort_keys=False, width=100, allow_unicode=True))


def manifest(plan: Plan, run: Path, *, name: str) -> Manifest:
    """The object of this name for a job that passed the checks. run: its directory, absolute, on
    the volume claim."""
    settings = plan.job.launch.kubernetes
    queue = {"kueue.x-k8s.io/queue-name": settings.queue, "kueue.x-k8s.io/priority-class": settings.priority_class}
    metadata: Manifest = {
        "name": name,
        "labels": {
            "app.kubernetes.io/managed-by": MANAGER,
            **{label: value for label, value in queue.items() if value is not None},
            **settings.labels,
        },
        "annotations": {"mpctl/run-dir": str(run), **settings.annotations},
    }
    if settings.namespace is not None:
        metadata["namespace"] = settings.namespace
    make_spec = {"TrainJob": _train_job, "PyTorchJob": _pytorch_job, "JobSet": _job_set}
    return {
        "apiVersion": API_VERSIONS[settings.kind],
        "kind": settings.kind,
        "metadata": metadata,
        "spec": make_spec[settings.kind](plan.job, pod_template(plan, run, name=name), name),
    }


def _train_job(job: JobSpec, template: Manifest, name: str) -> Manifest:
    settings = job.launch.kubernetes
    (container, *_) = template["spec"]["containers"]
    moved = {key: container.pop(key) for key in ("image", "command", "env", "resources")}
    patch = {"name": "node", "template": {"spec": {"template": template}}}
    spec: Manifest = {
        "runtimeRef": {"name": settings.runtime, "kind": settings.runtime_kind},
        "trainer": {
            "image": moved["image"],
            "numNodes": job.cluster.nodes,
            "numProcPerNode": job.cluster.gpus_per_node or 1,
            "command": moved["command"],
            "env": moved["env"],
            "resourcesPerNode": moved["resources"],
        },
        "runtimePatches": [
            {"manager": MANAGER, "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [patch]}}}}
        ],
    }
    return {"suspend": True, **spec} if settings.queue else spec


def _pytorch_job(job: JobSpec, template: Manifest, name: str) -> Manifest:
    settings = job.launch.kubernetes
    policy: Manifest = {"cleanPodPolicy": "Running"}
    if settings.ttl_seconds is not None:
        policy["ttlSecondsAfterFinished"] = settings.ttl_seconds
    if settings.queue:
        policy["suspend"] = True
    counts = {"Master": 1, "Worker": job.cluster.nodes - 1}
    return {
        "nprocPerNode": str(job.cluster.gpus_per_node or 1),
        "runPolicy": policy,
        "pytorchReplicaSpecs": {
            role: {"replicas": count, "restartPolicy": "ExitCode", "template": template}
            for role, count in counts.items()
            if count
        },
    }


def _job_set(job: JobSpec, template: Manifest, name: str) -> Manifest:
    settings, nodes = job.launch.kubernetes, job.cluster.nodes
    (container, *_) = template["spec"]["containers"]
    place = {
        "PET_NNODES": str(nodes),
        "PET_NPROC_PER_NODE": str(job.cluster.gpus_per_node or 1),
        "PET_MASTER_ADDR": f"{name}-node-0-0.{name}",
        "PET_MASTER_PORT": MASTER_PORT,
    }
    index = {"fieldRef": {"fieldPath": COMPLETION_INDEX}}
    container["env"] += [*_variables(place), {"name": "PET_NODE_RANK", "valueFrom": index}]
    template["spec"]["restartPolicy"] = "Never"
    spec: Manifest = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": 0},
        "replicatedJobs": [
            {
                "name": "node",
                "replicas": 1,
                "template": {
                    "spec": {
                        "parallelism": nodes,
                        "completions": nodes,
                        "completionMode": "Indexed",
                        "backoffLimit": 0,
                        "podFailurePolicy": {"rules": REPLACED},
                        "template": template,
                    }
                },
            }
        ],
    }
    if settings.ttl_seconds is not None:
        spec["ttlSecondsAfterFinished"] = settings.ttl_seconds
    return {"suspend": True, **spec} if settings.queue else spec


# ---------------------------------------------------------------- pods


def pod_template(plan: Plan, run: Path, *, name: str) -> Manifest:
    """The template of a pod, in the form that all kinds share; its first container runs mpctl."""
    job = plan.job
    settings = job.launch.kubernetes
    # The pods may run as another user than the owner of the run directory.
    resumption = ["mpctl", "launch", "--resume", "--run-dir", str(run), OPTION]
    container: Manifest = {
        "name": CONTAINERS[settings.kind],
        "image": settings.image,
        "command": [*resumption, "--on", "torchrun"],
        "env": _environment(settings, name),
        "resources": _resources(plan),
        "volumeMounts": _mounts(settings),
    }
    if settings.env_from:
        container["envFrom"] = [_whole_source(text) for text in settings.env_from]
    if security := _container_security(settings):
        container["securityContext"] = security
    template: Manifest = {"spec": {**_pod_settings(job, name), "containers": [container]}}
    metadata = {"labels": dict(settings.labels), "annotations": dict(settings.annotations)}
    if any(metadata.values()):
        template = {"metadata": {k: v for k, v in metadata.items() if v}, **template}
    merged: Manifest = _merged(template, settings.pod_patch)
    return merged


def _environment(settings: KubernetesSpec, name: str) -> list[Manifest]:
    secrets = []
    for variable, source in settings.secret_env.items():
        secret, _, key = source.partition("/")
        reference = {"secretKeyRef": {"name": secret, "key": key}}
        secrets.append({"name": variable, "valueFrom": reference})
    return [*_variables({JOB_VARIABLE: name, **settings.env}), *secrets]


def _variables(values: Mapping[str, str]) -> list[Manifest]:
    return [{"name": variable, "value": value} for variable, value in values.items()]


def _whole_source(text: str) -> Manifest:
    """An item of `envFrom`: `secret/NAME` or `configmap/NAME`."""
    kind, _, name = text.partition("/")
    return {"secretRef" if kind == "secret" else "configMapRef": {"name": name}}


def _resources(plan: Plan) -> Manifest:
    """The resources of a pod: the GPUs of a node; a processor for each thread of its ranks, on GPUs
    without a limit; and the memory that its ranks need, without which it is among the first that a
    full node starves and evicts."""
    job = plan.job
    settings, ranks = job.launch.kubernetes, job.cluster.gpus_per_node or 1
    limits: dict[str, str] = {}
    requests: dict[str, str] = {}
    device = named_device(job) or "cpu"  # the submitting machine may differ from the pods
    threads = job.launch.threads_per_rank or (1 if device == "cpu" else GPU_RANK_THREADS)
    if device != "cpu":
        limits[settings.gpu_resource] = str(ranks)
    if settings.cpus_per_node is not None:
        limits["cpu"] = str(settings.cpus_per_node)
    else:
        (limits if device == "cpu" else requests)["cpu"] = str(ranks * threads)
    if settings.memory_per_node is not None:
        limits["memory"] = settings.memory_per_node
    elif need := node_memory_bytes(plan, ranks, device):
        requests["memory"] = f"{-(-need // 2**20)}Mi"
    limits |= settings.resources
    return {"requests": {**limits, **requests}, "limits": limits}


def _mounts(settings: KubernetesSpec) -> list[Manifest]:
    """The run's volume, the further ones, and shared memory, since a pod has only 64 MiB by default
    and NCCL needs more."""
    mounts: list[Manifest] = [
        {"name": "runs", "mountPath": settings.mount_path},
        {"name": "shared-memory", "mountPath": "/dev/shm"},
    ]
    for index, volume in enumerate(settings.volumes):
        mount: Manifest = {"name": f"volume-{index}", "mountPath": volume.mount_path}
        if volume.read_only:
            mount["readOnly"] = True
        if volume.sub_path is not None:
            mount["subPath"] = volume.sub_path
        mounts.append(mount)
    return mounts


def _container_security(settings: KubernetesSpec) -> Manifest:
    """Return the security settings of a container: those of the Pod Security Standard `restricted`, or the right to
    lock memory."""
    if settings.restricted:
        return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    return {"capabilities": {"add": ["IPC_LOCK"]}} if settings.ipc_lock else {}


def _pod_security(settings: KubernetesSpec) -> Manifest:
    ids = {"runAsUser": settings.run_as_user, "runAsGroup": settings.run_as_group, "fsGroup": settings.fs_group}
    context: Manifest = {key: value for key, value in ids.items() if value is not None}
    if settings.fs_group is not None:  # else each start changes the owner of every file there
        context["fsGroupChangePolicy"] = "OnRootMismatch"
    if settings.restricted:
        context |= {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    return context


def _pod_settings(job: JobSpec, name: str) -> Manifest:
    """Settings of a pod other than its container; the fields have the same names in all kinds."""
    settings = job.launch.kubernetes
    memory: Manifest = {"medium": "Memory"}
    if settings.shared_memory is not None:
        memory["sizeLimit"] = settings.shared_memory
    volumes: list[Manifest] = [
        {"name": "runs", "persistentVolumeClaim": {"claimName": settings.claim}},
        {"name": "shared-memory", "emptyDir": memory},
    ]
    for index, volume in enumerate(settings.volumes):
        claim: Manifest = {"claimName": volume.claim}
        if volume.read_only:
            claim["readOnly"] = True
        volumes.append({"name": f"volume-{index}", "persistentVolumeClaim": claim})
    pods: Manifest = {
        "volumes": volumes,
        "terminationGracePeriodSeconds": round(job.launch.stop_seconds) + AFTER_STOP_SECONDS,
    }
    if security := _pod_security(settings):
        pods["securityContext"] = security
    if settings.service_account is not None:
        pods["serviceAccountName"] = settings.service_account
    if settings.image_pull_secret is not None:
        pods["imagePullSecrets"] = [{"name": settings.image_pull_secret}]
    if settings.host_network:
        pods |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    if settings.node_selector:
        pods["nodeSelector"] = dict(settings.node_selector)
    if settings.tolerations:
        pods["tolerations"] = [_toleration(one) for one in settings.tolerations]
    if settings.same_topology is not None:
        term = {
            "labelSelector": {"matchLabels": {POD_LABELS[settings.kind]: name}},
            "topologyKey": settings.same_topology,
        }
        preferred = [{"weight": 100, "podAffinityTerm": term}]
        affinity = {"preferredDuringSchedulingIgnoredDuringExecution": preferred}
        pods["affinity"] = {"podAffinity": affinity}
    return pods


def _toleration(one: str | TolerationSpec) -> Manifest:
    if isinstance(one, str):
        return {"key": one, "operator": "Exists"}
    fields = {
        "key": one.key,
        "operator": "Exists" if one.value is None else "Equal",
        "value": one.value,
        "effect": one.effect,
        "tolerationSeconds": one.seconds,
    }
    return {field: value for field, value in fields.items() if value is not None}


def _merged(base: Any, patch: Any) -> Any:
    """`base` with a patch: tables key by key, the items of lists that have names by name; anything
    else is replaced.

    >>> _merged({"a": 1, "b": [{"name": "x", "c": 1}]}, {"b": [{"name": "x", "d": 2}]})
    {'a': 1, 'b': [{'name': 'x', 'c': 1, 'd': 2}]}
    """
    if isinstance(base, dict) and isinstance(patch, dict):
        added = {key: value for key, value in patch.items() if key not in base}
        return {key: _merged(value, patch[key]) if key in patch else value for key, value in base.items()} | added
    lists = (base, patch)
    if all(isinstance(one, list) for one in lists) and all(
        isinstance(item, dict) and "name" in item for item in (*base, *patch)
    ):
        named = {item["name"]: item for item in base}
        for item in patch:
            named[item["name"]] = _merged(named.get(item["name"], {}), item)
        return list(named.values())
    return patch
