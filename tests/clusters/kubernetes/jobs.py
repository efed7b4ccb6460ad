"""Jobs with a table [launch.kubernetes], for the tests of this folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mpctl.spec.job import JobSpec
from mpctl.spec.load import load_job

KINDS = ("TrainJob", "PyTorchJob")
EVERYTHING: dict[str, Any] = {
    "namespace": "team-a", "queue": "gpus", "priority_class": "high", "service_account": "trainer",
    "image_pull_secret": "registry", "node_selector": {"nvidia.com/gpu.product": "H100"},
    "tolerations": ["nvidia.com/gpu"], "memory_per_node": "512Gi", "cpus_per_node": 96,
    "env": {"NCCL_DEBUG": "WARN"},
}  # fmt: skip


def kubernetes_job(
    mount: Path | str = "/mnt/runs", device: str = "cuda", **settings: Any
) -> JobSpec:
    """A legal job of 2 nodes with 4 GPUs each; settings: of [launch.kubernetes]."""
    given = {"image": "registry/mpctl:1", "claim": "runs", "mount_path": str(mount), **settings}
    return load_job(None, {
        "name": "Llama 3", "model.preset": "gpt2", "cluster.nodes": 2, "cluster.gpus_per_node": 4,
        "parallel.tp": 4, "parallel.dp": 2, "launch.threads_per_rank": 3,
        "launch.device": device,
        **{f"launch.kubernetes.{key}": value for key, value in given.items()},
    })  # fmt: skip
