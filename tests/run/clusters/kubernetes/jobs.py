"""Jobs with a table [launch.kubernetes], for the tests of this folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mpctl.spec.job import JobSpec
from mpctl.spec.load import load_job

KINDS = ("TrainJob", "PyTorchJob", "JobSet")
EVERYTHING: dict[str, Any] = {
    "namespace": "team-a",
    "queue": "gpus",
    "priority_class": "high",
    "service_account": "trainer",
    "image_pull_secret": "registry",
    "node_selector": {"nvidia.com/gpu.product": "H100"},
    "tolerations": [
        "nvidia.com/gpu",
        {"key": "team", "value": "a", "effect": "NoSchedule"},
        {"key": "gone", "effect": "NoExecute", "seconds": 60},
    ],
    "memory_per_node": "512Gi",
    "cpus_per_node": 96,
    "env": {"NCCL_DEBUG": "WARN"},
    "resources": {"rdma/hca": "8"},
    "shared_memory": "64Gi",
    "ipc_lock": True,
    "run_as_user": 1000,
    "run_as_group": 1000,
    "fs_group": 2000,
    "same_topology": "topology.kubernetes.io/zone",
    "labels": {"team": "a"},
    "annotations": {"example.com/owner": "Ann <ann@example.com>"},
    "secret_env": {"HF_TOKEN": "hub/token"},
    "volumes": [{"claim": "corpora", "mount_path": "/mnt/corpora", "sub_path": "web"}],
    "pod_patch": {"spec": {"volumes": [{"name": "runs"}, {"name": "scratch", "emptyDir": {"sizeLimit": "1Ti"}}]}},
}
"""Settings that every kind of object has a field for."""
FURTHER: dict[str, Any] = {"host_network": True, "env_from": ["secret/hub", "configmap/nccl"], "ttl_seconds": 3600}
"""Settings that a TrainJob has no field for."""


def kubernetes_job(mount: Path | str = "/mnt/runs", device: str = "cuda", **settings: Any) -> JobSpec:
    """A legal job of 2 nodes with 4 GPUs each; settings: of [launch.kubernetes]."""
    given = {"image": "registry/mpctl:1", "claim": "runs", "mount_path": str(mount), **settings}
    return load_job(
        None,
        {
            "name": "Llama 3",
            "model.preset": "gpt2",
            "cluster.nodes": 2,
            "cluster.gpus_per_node": 4,
            "parallel.tp": 4,
            "parallel.dp": 2,
            "launch.threads_per_rank": 3,
            "launch.device": device,
            **{f"launch.kubernetes.{key}": value for key, value in given.items()},
        },
    )
