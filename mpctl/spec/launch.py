"""How ranks are started, watched and stopped: the table `[launch]` of a job.

Each launcher backend that has settings of its own has a table below it, `[launch.slurm]` for
instance, which only that backend reads.
"""

import datetime
from collections.abc import Mapping
from typing import Annotated, Literal

from mpctl.spec.base import (
    Before,
    Bounded,
    Count,
    CountOrZero,
    Field,
    StepRanges,
    StrictModel,
    Timeout,
)

Word = Annotated[str, Bounded(min_length=1, pattern=r"^[^\s\x00-\x1f]+$")]
"""Text without spaces and control characters: a name that another program is given."""

VariableName = Annotated[str, Bounded(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]

LaunchedKind = Literal["cpu", "cuda"]
"""Kinds of device that ranks run on, by torch's names; accelerators of others are only planned."""

LAUNCHED_AS: Mapping[str, LaunchedKind] = {"cpu": "cpu", "cuda": "cuda", "rocm": "cuda"}
"""torch's name of each kind of device that ranks run on: its ROCm builds answer to cuda, and RCCL
to nccl."""

RANK_MARGIN_SECONDS = 5.0
"""By how much a rank's own time-out in a collective exceeds `timeout_seconds`. The launcher, which
sees all ranks, ends a hung attempt at `timeout_seconds` and names the rank at fault; a rank can
only name the peer that it waits for, and gives up later in case nobody watches."""


def _as_sbatch_reads(value: object) -> object:
    """TOML reads 12:00:00 as a time of day and 30 as a number; sbatch reads hours and minutes."""
    if isinstance(value, datetime.time):
        return value.isoformat()
    return str(value) if type(value) is int else value


TimeLimit = Annotated[Word, Before(_as_sbatch_reads)]
"""A time limit as text, however it was written."""


class SlurmSpec(StrictModel):
    """What a Slurm job is submitted with; an allocation that exists already ignores it."""

    partition: Word | None = Field("partition; the cluster's default when absent", None)
    account: Word | None = Field("account that is charged", None)
    time: TimeLimit | None = Field(
        "time limit as sbatch takes it: minutes, 12:00:00 or 2-00:00:00; the "
        "partition's default when absent",
        None,
    )
    requeue: bool = Field(
        "requeue the job after its checkpoint before the time limit, and when a node fails", True
    )
    signal_seconds: Annotated[int, Bounded(ge=1, le=65_535)] | None = Field(
        "how long before the time limit ranks are asked to save, seconds; follows from "
        "step time and checkpoint size when absent",
        None,
    )
    qos: Word | None = Field("quality of service", None)
    constraint: Word | None = Field("features that the nodes must have", None)
    extra: list[str] = Field(
        "more options of sbatch, each as on its command line: --exclusive", list
    )


class SshSpec(StrictModel):
    """The hosts that `--on ssh` uses, and how they are reached."""

    hostfile: str | None = Field("file with a line `HOST slots=N` for each host", None)
    include: str | None = Field("use only these hosts and slots of the hostfile: n1@n2:0,1", None)
    exclude: str | None = Field("leave these hosts and slots of the hostfile out", None)
    python: Word | None = Field(
        "Python on the hosts that has mpctl and torch; the launcher's when absent", None
    )
    config: str | None = Field(
        "configuration file of the ssh client (ssh -F); ~/.ssh/config when absent", None
    )
    connect_timeout: Annotated[int, Bounded(ge=1, le=3600)] = Field(
        "longest time until a host lets ssh connect, seconds", 10
    )
    address: Word | None = Field(
        "address of the launcher's host to which the hosts connect; found by itself when absent",
        None,
    )
    pass_env: list[VariableName] = Field(
        "more environment variables of the launcher that hosts get; those of torch, "
        "NCCL, gloo and OpenMP and PYTHONPATH travel by themselves",
        list,
    )


Name = Annotated[str, Bounded(min_length=1, max_length=253)]
"""The name of an object or of a resource."""


class KubernetesSpec(StrictModel):
    """The objects that `--on kubernetes` creates. Their names are checked where they are used, so
    that all are reported at once and in the words of Kubernetes."""

    kind: Literal["TrainJob", "PyTorchJob"] = Field(
        "TrainJob (Kubeflow Trainer v2) or PyTorchJob (Training Operator)", "TrainJob"
    )
    image: Name | None = Field("container image with Python, torch and mpctl", None)
    namespace: Name | None = Field("namespace; kubectl's current one when absent", None)
    context: Name | None = Field(
        "context of kubectl's configuration; the current one when absent", None
    )
    claim: Name | None = Field(
        "PersistentVolumeClaim that the run directory lies on; every pod mounts it", None
    )
    mount_path: Name | None = Field(
        "absolute path at which the pods mount the claim, and at which the "
        "machine that submits sees the same files",
        None,
    )
    runtime: Name = Field(
        "training runtime of a TrainJob; a PyTorchJob has none", "torch-distributed"
    )
    runtime_kind: Literal["ClusterTrainingRuntime", "TrainingRuntime"] = Field(
        "whether the runtime belongs to the cluster or to the namespace", "ClusterTrainingRuntime"
    )
    gpu_resource: Name = Field("name of the GPUs as a resource", "nvidia.com/gpu")
    cpus_per_node: Count | None = Field(
        "CPUs of a pod; when absent, those of its ranks' threads on CPU, and "
        "none asked for on GPUs",
        None,
    )
    memory_per_node: Name | None = Field(
        "memory of a pod as Kubernetes takes it, such as 512Gi; none asked for when absent", None
    )
    queue: Name | None = Field("local queue of Kueue; the job is then created suspended", None)
    priority_class: Name | None = Field("workload priority class of Kueue", None)
    service_account: Name | None = Field("service account of the pods", None)
    image_pull_secret: Name | None = Field("secret to pull the image with", None)
    node_selector: dict[str, str] = Field("labels that the nodes must have, by name", dict)
    tolerations: list[Name] = Field("keys of taints that the pods tolerate", list)
    env: dict[str, str] = Field("more environment variables of the pods, by name", dict)


class LaunchSpec(StrictModel):
    """How ranks are started, watched and stopped."""

    on: Literal["auto", "local", "slurm", "ssh", "kubernetes", "torchrun"] = Field(
        "launcher backend; auto: torchrun inside of a world that another program "
        "started, slurm inside of an allocation of several nodes, else local",
        "auto",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "where ranks run; auto: the kind of the cluster's device, else cuda if present", "auto"
    )
    threads_per_rank: Count | None = Field("CPU threads of a rank; cores / ranks when absent", None)
    timeout_seconds: Timeout = Field("longest wait for other ranks in a collective, seconds", 300.0)
    start_seconds: Timeout = Field(
        "longest time, seconds, without progress of a start: torchrun up, ranks "
        "up, libraries imported, ranks connected; building the model does not count",
        300.0,
    )
    numa_binding: Literal["node", "none"] = Field(
        "bind each rank on a GPU to the processor cores of its GPU's NUMA node, as "
        "torchrun --numa-binding does; no effect on CPU and on hosts of one node",
        "node",
    )
    shared_memory: bool = Field(
        "CPU ranks of one host exchange through shared memory; false: gloo", True
    )
    check_memory: bool = Field(
        "refuse a launch whose planned peak memory exceeds what is free", True
    )
    track_memory: bool = Field(
        "measure the memory of one early step, to compare it with the plan", True
    )
    compile: bool = Field(
        "run layers, or with tp or cp above 1 the operations between "
        "their messages, through torch.compile",
        False,
    )
    stop_seconds: Timeout = Field(
        "time that ranks get to finish their step and save when stopped, seconds", 60.0
    )
    max_restarts: CountOrZero = Field(
        "restarts after failures since the last checkpoint, each from the newest one; "
        "the same error at the same step twice in a row ends the run",
        0,
    )
    elastic: bool = Field(
        "go on with fewer hosts when some are lost, and with all when they are back: "
        "dp changes, the global batch stays; for launchers of several hosts",
        False,
    )
    min_nodes: Count | None = Field(
        "fewest nodes that an elastic run goes on with; 1 when absent", None
    )
    max_nodes: Count | None = Field(
        "nodes that an elastic run was planned for; filled in when it goes on with "
        "fewer, for --resume",
        None,
    )
    tensorboard: bool = Field(
        "write RUN/tensorboard while training; needs mpctl[tensorboard]", False
    )
    csv: bool = Field("write RUN/metrics.csv while training", False)
    profile: StepRanges = Field(
        "steps in which every rank records what it does when, into RUN/profile: 5-7; "
        "`mpctl bench trace` shows them",
        "",
    )
    predicted_step_seconds: Annotated[float, Bounded(gt=0, le=1e30)] | None = Field(
        "step time of the plan, seconds; filled in by `mpctl launch`", None
    )
    slurm: SlurmSpec = Field("settings of `--on slurm`", SlurmSpec)
    ssh: SshSpec = Field("settings of `--on ssh`", SshSpec)
    kubernetes: KubernetesSpec = Field("settings of `--on kubernetes`", KubernetesSpec)

    @property
    def rank_timeout_seconds(self) -> float:
        """How long a rank waits for its peers in a collective before it fails by itself."""
        return self.timeout_seconds + RANK_MARGIN_SECONDS
