"""The table `[launch.kubernetes]`: the objects that `--on kubernetes` creates and reads.

Names are checked where they are used (clusters/kubernetes/names.py), so that all of them are
reported at once and in the words of Kubernetes.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mpctl.spec.base import Count, StrictModel

Name = Annotated[str, Field(min_length=1, max_length=253)]
"""The name of an object or of a resource."""


class KubernetesSpec(StrictModel):
    """The objects that `--on kubernetes` creates."""

    kind: Literal["TrainJob", "PyTorchJob"] = Field(
        "TrainJob", description="TrainJob (Kubeflow Trainer v2) or PyTorchJob (Training Operator)"
    )
    image: Name | None = Field(None, description="container image with Python, torch and mpctl")
    namespace: Name | None = Field(None, description="namespace; kubectl's current one when absent")
    context: Name | None = Field(
        None, description="context of kubectl's configuration; the current one when absent"
    )
    claim: Name | None = Field(
        None,
        description="PersistentVolumeClaim that the run directory lies on; every pod mounts it",
    )
    mount_path: Name | None = Field(
        None, description="absolute path at which the pods mount the claim, and at which the "
        "machine that submits sees the same files"
    )  # fmt: skip
    runtime: Name = Field(
        "torch-distributed", description="training runtime of a TrainJob; a PyTorchJob has none"
    )
    runtime_kind: Literal["ClusterTrainingRuntime", "TrainingRuntime"] = Field(
        "ClusterTrainingRuntime",
        description="whether the runtime belongs to the cluster or to the namespace",
    )
    gpu_resource: Name = Field("nvidia.com/gpu", description="name of the GPUs as a resource")
    cpus_per_node: Count | None = Field(
        None, description="CPUs of a pod; when absent, those of its ranks' threads on CPU, and "
        "none asked for on GPUs"
    )  # fmt: skip
    memory_per_node: Name | None = Field(
        None, description="memory of a pod as Kubernetes takes it, such as 512Gi; none asked for "
        "when absent"
    )  # fmt: skip
    queue: Name | None = Field(
        None, description="local queue of Kueue; the job is then created suspended"
    )
    priority_class: Name | None = Field(None, description="workload priority class of Kueue")
    service_account: Name | None = Field(None, description="service account of the pods")
    image_pull_secret: Name | None = Field(None, description="secret to pull the image with")
    node_selector: dict[str, str] = Field(
        default_factory=dict, description="labels that the nodes must have, by name"
    )
    tolerations: list[Name] = Field(
        default_factory=list, description="keys of taints that the pods tolerate"
    )
    env: dict[str, str] = Field(
        default_factory=dict, description="more environment variables of the pods, by name"
    )
