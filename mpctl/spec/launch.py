"""How ranks are started, watched and stopped: the table `[launch]` of a job.

A launcher backend with further settings has a table below it, such as `[launch.slurm]`, which only
that backend reads.
"""

import datetime
from collections.abc import Mapping
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, MaxLen, MinLen
from pydantic import BeforeValidator, Field, JsonValue

from mpctl.spec.base import AS_TIME, Count, CountOrZero, StepRanges, StrictModel, Timeout

Word = Annotated[str, Field(min_length=1, pattern=r"^[^\s\x00-\x1f]+$")]
"""Text without spaces and control characters: a name that is passed to another program."""

Argument = Annotated[str, Field(pattern=r"^[^\x00]*$")]
"""An argument of a program: any text that the system can pass to it."""

StopSignal = Literal["SIGUSR1", "SIGTERM", "SIGINT", "none"]

VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]

LaunchedKind = Literal["cpu", "cuda"]
"""Kinds of device that ranks run on, by torch's names; accelerators of others are only planned."""

LAUNCHED_AS: Mapping[str, LaunchedKind] = {"cpu": "cpu", "cuda": "cuda", "rocm": "cuda"}
"""torch's name of each kind of device that ranks run on: its ROCm builds answer to cuda, and RCCL
to nccl."""

SPARED_AFTER = 2
"""`exclude_after` of a run with spare hosts: one failure may be chance, and a replacement costs
nothing."""

TIMEOUT_SECONDS = 300.0
"""`launch.timeout_seconds` where it is not set."""

SILENCE_SECONDS = 20.0
"""`launch.silence_seconds` where it is not set."""

RANK_MARGIN_SECONDS = 5.0
"""Margin of a rank's own time-out in a collective over the longest of the launcher. The launcher, which
sees all ranks, ends a hung attempt at `timeout_seconds`, or earlier if it has fitted a limit
(run/launch/learnt_timeout.py), and names the rank at fault; a rank can only name the peer that it waits
for, so it gives up later, in case no launcher is watching."""


def _as_sbatch_reads(value: object) -> object:
    """TOML reads 12:00:00 as a time of day and 30 as a number; sbatch reads hours and minutes."""
    if isinstance(value, datetime.time):
        return value.isoformat()
    return str(value) if type(value) is int else value


TimeLimit = Annotated[Word, BeforeValidator(_as_sbatch_reads)]
"""A time limit as text, from any of the forms that TOML reads."""


class SlurmSpec(StrictModel):
    """Options with which a Slurm job is submitted; ignored inside an existing allocation."""

    partition: Word | None = Field(None, description="partition; the cluster's default when absent")
    account: Word | None = Field(None, description="account that is charged")
    time: TimeLimit | None = Field(
        None,
        description="time limit as sbatch takes it: minutes, 12:00:00 or 2-00:00:00; the "
        "partition's default when absent",
    )
    requeue: bool = Field(
        True, description="requeue the job after its checkpoint before the time limit, and when a node fails"
    )
    exclusive: bool = Field(
        True,
        description="without launch.threads_per_rank, ask for whole nodes and all their memory (--exclusive --mem=0); "
        "false: neither, for sites that share nodes",
    )
    signal_seconds: Annotated[int, Ge(1), Le(65_535)] | None = Field(
        None,
        description="seconds before the time limit at which ranks are asked to save; follows from "
        "step time and checkpoint size when absent",
    )
    qos: Word | None = Field(None, description="quality of service")
    constraint: Word | None = Field(None, description="features that the nodes must have")
    dependency: Word | None = Field(None, description="jobs that must end first, as sbatch takes it: afterok:1234")
    array: list[dict[str, JsonValue]] = Field(
        default_factory=list,
        description="runs of this job that one submission makes, each with the settings of its "
        "table: [{seed = 1}, {seed = 2}]; their directories are RUN/task-0, RUN/task-1 and so on",
    )
    array_limit: Count | None = Field(None, description="most runs of the array that run at once; no limit when absent")
    setup: list[str] = Field(
        default_factory=list,
        description='lines of bash that the batch script runs first: ["module load cuda/12.8"]; '
        "what they export reaches the ranks",
    )
    container: Literal["none", "pyxis", "apptainer"] = Field(
        "none", description="what runs the ranks of each node in container_image"
    )
    container_image: Word | None = Field(
        None, description="image, as pyxis or apptainer takes it: a file or docker://NAME"
    )
    container_mounts: list[Word] = Field(
        default_factory=list,
        description="more folders that the container sees, each PATH or PATH:PATH_INSIDE; the run "
        "directory and the data are always mounted at their own paths",
    )
    container_python: Word = Field("python3", description="Python of the image, with torch and this mpctl")
    srun: list[str] = Field(
        default_factory=list,
        description="more options of srun for the step that starts the ranks of each node, each as "
        "on its command line: --network=...",
    )
    extra: list[str] = Field(
        default_factory=list, description="more options of sbatch, each as on its command line: --exclusive"
    )


class SshSpec(StrictModel):
    """The hosts that `--on ssh` uses, and how they are reached."""

    hostfile: str | None = Field(None, description="file with a line `HOST slots=N` for each host")
    include: str | None = Field(None, description="use only these hosts and slots of the hostfile: n1@n2:0,1")
    exclude: str | None = Field(None, description="leave these hosts and slots of the hostfile out")
    python: Word | None = Field(
        None, description="Python on the hosts that has mpctl and torch; the launcher's when absent"
    )
    config: str | None = Field(
        None, description="configuration file of the ssh client (ssh -F); ~/.ssh/config when absent"
    )
    connect_timeout: Annotated[int, Ge(1), Le(3600)] = Field(
        10, description="seconds within which each host must accept an ssh connection"
    )
    address: Word | None = Field(
        None, description="address of the launcher's host to which the hosts connect; found by itself when absent"
    )
    pass_env: list[VariableName] = Field(
        default_factory=list,
        description="more environment variables of the launcher to pass to the hosts; those of "
        "torch, NCCL, gloo and OpenMP and PYTHONPATH are always passed",
    )


Name = Annotated[str, MinLen(1), MaxLen(253)]
"""The name of an object or of a resource."""


class TolerationSpec(StrictModel):
    """A taint that the pods tolerate, as in a pod's `tolerations`."""

    key: Name | None = Field(None, description="the taint's key; every taint when absent")
    value: str | None = Field(None, description="the taint's value; any when absent")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(
        None, description="the taint's effect; any when absent"
    )
    seconds: CountOrZero | None = Field(
        None, description="seconds that a pod stays after a taint NoExecute; for ever when absent"
    )


class VolumeSpec(StrictModel):
    """One more volume of the pods, such as a corpus that several teams read."""

    claim: Name = Field(description="PersistentVolumeClaim")
    mount_path: Name = Field(description="absolute path at which the pods mount it")
    read_only: bool = Field(True, description="mount it read-only")
    sub_path: Name | None = Field(None, description="folder of the claim; all of it when absent")


class KubernetesSpec(StrictModel):
    """The objects that `--on kubernetes` creates. Their names are checked where they are used, so
    that all are reported at once and in the words of Kubernetes."""

    kind: Literal["TrainJob", "PyTorchJob", "JobSet"] = Field(
        "TrainJob",
        description="TrainJob (Kubeflow Trainer v2), PyTorchJob (Training Operator) or JobSet, "
        "which needs the JobSet controller alone",
    )
    image: Name | None = Field(None, description="container image with Python, torch and mpctl")
    namespace: Name | None = Field(None, description="namespace; kubectl's current one when absent")
    context: Name | None = Field(None, description="context of kubectl's configuration; the current one when absent")
    claim: Name | None = Field(
        None, description="PersistentVolumeClaim that holds the run directory; every pod mounts it"
    )
    mount_path: Name | None = Field(
        None,
        description="absolute path at which the pods mount the claim; the submitting "
        "machine must see the same files there",
    )
    volumes: list[VolumeSpec] = Field(default_factory=list, description="more claims that the pods mount")
    runtime: Name = Field("torch-distributed", description="training runtime of a TrainJob; other kinds have none")
    runtime_kind: Literal["ClusterTrainingRuntime", "TrainingRuntime"] = Field(
        "ClusterTrainingRuntime", description="whether the runtime belongs to the cluster or to the namespace"
    )
    gpu_resource: Name = Field("nvidia.com/gpu", description="name of the GPUs as a resource")
    cpus_per_node: Count | None = Field(
        None,
        description="CPUs that a pod requests, and its limit; when absent, one for each "
        "thread of its ranks, on GPUs 2 a rank without launch.threads_per_rank, and no limit",
    )
    memory_per_node: Name | None = Field(
        None,
        description="memory of a pod, requested and its limit, such as 512Gi; when absent, a "
        "pod requests what the plan knows of and has no limit",
    )
    resources: dict[str, str] = Field(
        default_factory=dict, description='more resources of a pod, by name: {"rdma/hca" = "8"}'
    )
    shared_memory: Name | None = Field(
        None, description="most memory of /dev/shm, such as 64Gi; the pod's own when absent"
    )
    queue: Name | None = Field(None, description="local queue of Kueue; the job is then created suspended")
    priority_class: Name | None = Field(None, description="workload priority class of Kueue")
    service_account: Name | None = Field(None, description="service account of the pods")
    image_pull_secret: Name | None = Field(None, description="secret to pull the image with")
    restricted: bool = Field(
        False,
        description="pods that the Pod Security Standard `restricted` admits: no root, no further "
        "privileges, no capabilities, the default seccomp profile",
    )
    run_as_user: CountOrZero | None = Field(None, description="user id of the pods; the image's")
    run_as_group: CountOrZero | None = Field(None, description="group id of the pods; the image's")
    fs_group: CountOrZero | None = Field(None, description="group that owns the mounted volumes")
    host_network: bool = Field(False, description="pods use the network of their host; not for a TrainJob")
    ipc_lock: bool = Field(False, description="let pods lock memory (capability IPC_LOCK), as RDMA needs it")
    node_selector: dict[str, str] = Field(default_factory=dict, description="labels that the nodes must have, by name")
    tolerations: list[Name | TolerationSpec] = Field(
        default_factory=list,
        description='taints that the pods tolerate: keys, or {key = "gpu", value = "h100", effect = "NoSchedule"}',
    )
    same_topology: Name | None = Field(
        None,
        description="label of nodes, such as topology.kubernetes.io/zone, whose value should "
        "be the same for all pods, where that is possible",
    )
    labels: dict[str, str] = Field(default_factory=dict, description="more labels of object and pods")
    annotations: dict[str, str] = Field(default_factory=dict, description="more annotations of object and pods")
    env: dict[str, str] = Field(default_factory=dict, description="more environment variables of the pods, by name")
    secret_env: dict[str, str] = Field(
        default_factory=dict,
        description='environment variables from secrets, by name: {HF_TOKEN = "hub/token"} for the '
        "key token of the secret hub",
    )
    env_from: list[str] = Field(
        default_factory=list,
        description="secrets and config maps whose every key becomes an environment variable: "
        "secret/NAME or configmap/NAME; not for a TrainJob",
    )
    ttl_seconds: CountOrZero | None = Field(
        None,
        description="seconds after which an object that has ended is deleted; kept when absent; not for a TrainJob",
    )
    pod_patch: dict[str, JsonValue] = Field(
        default_factory=dict,
        description="whatever else the pods need: merged into their template (metadata and spec); "
        "of lists, items with the same name are merged",
    )


class LaunchSpec(StrictModel):
    """How ranks are started, watched and stopped."""

    on: Literal["auto", "local", "slurm", "ssh", "kubernetes", "torchrun"] = Field(
        "auto",
        description="launcher backend; auto: torchrun inside a world that another program "
        "started, slurm inside an allocation of several nodes, else local",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="where ranks run; auto: the kind of the cluster's device, else cuda if present"
    )
    threads_per_rank: Count | None = Field(None, description="CPU threads of a rank; cores / ranks when absent")
    timeout_seconds: Timeout | None = Field(
        None,
        description="seconds in a collective after which a waiting rank counts as hung; when "
        "absent 300, and between steps like those before 10 times the longest of them, at least 30",
    )
    start_seconds: Timeout = Field(
        300.0,
        description="seconds that starting may take without progress: torchrun up, ranks "
        "up, libraries imported, ranks connected; building the model does not count",
    )
    silence_seconds: Annotated[float, Ge(5), Le(3600), AS_TIME] = Field(
        SILENCE_SECONDS,
        description="seconds without a message after which launcher and host take each other for "
        "lost: the host then ends its ranks; no effect on ranks of the launcher's own host with "
        "--on local",
    )
    numa_binding: Literal["node", "none"] = Field(
        "node",
        description="bind each rank on a GPU to the processor cores of its GPU's NUMA node, as "
        "torchrun --numa-binding does; no effect on CPU and on hosts of one node",
    )
    shared_memory: bool = Field(True, description="CPU ranks of one host send through shared memory; false: by gloo")
    check_memory: bool = Field(True, description="refuse a launch whose planned peak memory exceeds what is free")
    track_memory: bool = Field(True, description="measure the memory of one early step, to compare it with the plan")
    compile: bool = Field(
        False,
        description="run layers, or with tp or cp above 1 the operations between their messages, through torch.compile",
    )
    stop_seconds: Timeout = Field(
        60.0, description="seconds that ranks get to finish their step and save when the run is stopped"
    )
    warm_start: bool = Field(
        True,
        description="fork ranks from a process that has imported torch, and keep one ready while "
        "the run may be restarted; false: every rank is a new process; forks only on Linux",
    )
    max_restarts: CountOrZero = Field(
        0,
        description="most restarts after failures without a new checkpoint between them, each "
        "from the newest one; the same error at the same step twice in a row ends the run",
    )
    elastic: bool = Field(
        False,
        description="continue with fewer hosts when some are lost, and with all when they are "
        "back: dp changes, the global batch stays; for launchers of several hosts",
    )
    min_nodes: Count | None = Field(None, description="fewest nodes with which an elastic run continues; 1 when absent")
    max_nodes: Count | None = Field(
        None,
        description="nodes that an elastic run was planned for; filled in when it continues with fewer, for --resume",
    )
    spare_nodes: CountOrZero = Field(
        0,
        description="most hosts beyond those of the plan that are kept connected and idle, to take "
        "the place of lost and bad ones; for --on slurm, which allocates them, and --on ssh",
    )
    exclude_after: Count | None = Field(
        None,
        description="failures that a host is blamed for after which the run does not use it again; "
        "when absent, 2 with launch.spare_nodes, else no limit",
    )
    tensorboard: bool = Field(False, description="write RUN/tensorboard while training; needs mpctl[tensorboard]")
    csv: bool = Field(False, description="write RUN/metrics.csv while training")
    metrics: Word | None = Field(
        None,
        description="metrics for Prometheus: :9400, at which the launcher answers its own host, "
        "ADDRESS:9400 (0.0.0.0:9400 for all addresses), or a file .prom for a textfile "
        "collector; needs mpctl[prometheus]",
    )
    hook: list[str] = Field(
        default_factory=list,
        description="command that is called with a JSON document on its standard input when an "
        "attempt fails, when the run starts again and when it ends",
    )
    profile: StepRanges = Field(
        "",
        description="steps, such as 5-7, in which every rank records a trace into RUN/profile; "
        "`mpctl bench trace` shows it",
    )
    program: list[Argument] = Field(
        default_factory=list,
        description="what every rank runs instead of mpctl's own training: a program and its "
        'arguments, ["python", "train.py", "--lr", "1e-4"]; {megatron} becomes the flags of the '
        "plan for that trainer",
    )
    program_dir: str | None = Field(
        None, description="working directory of the program on every host; that of `mpctl launch` when absent"
    )
    program_argv: list[Argument] = Field(
        default_factory=list, description="the program with the plan's flags; filled in by `mpctl launch`"
    )
    program_env: dict[str, str] = Field(
        default_factory=dict, description="variables by which the program gets the plan; filled in by `mpctl launch`"
    )
    stop_signal: StopSignal = Field(
        "SIGUSR1",
        description="signal by which each rank of a program learns that the run is to stop, beside "
        "the file MPCTL_STOP; SIGUSR1 is ignored by one without a handler, SIGTERM and SIGINT end "
        "it",
    )
    heartbeat_seconds: Timeout | None = Field(
        None,
        description="seconds without a heartbeat after which a program that has sent one counts "
        "as hung, even if it computes; never when absent",
    )
    predicted_step_seconds: Annotated[float, Gt(0), Le(1e30)] | None = Field(
        None, description="step time of the plan, seconds; filled in by `mpctl launch`"
    )
    slurm: SlurmSpec = Field(default_factory=SlurmSpec, description="settings of `--on slurm`")
    ssh: SshSpec = Field(default_factory=SshSpec, description="settings of `--on ssh`")
    kubernetes: KubernetesSpec = Field(default_factory=KubernetesSpec, description="settings of `--on kubernetes`")

    @property
    def most_blames(self) -> int | None:
        """Failures that a host is blamed for after which it is not used again; None for no
        limit."""
        return self.exclude_after or (SPARED_AFTER if self.spare_nodes else None)

    @property
    def rank_timeout_seconds(self) -> float:
        """How long a rank waits for its peers in a collective before it fails by itself."""
        return self.longest_wait_seconds + RANK_MARGIN_SECONDS

    @property
    def longest_wait_seconds(self) -> float:
        """`timeout_seconds`, or what holds where it is not set."""
        return TIMEOUT_SECONDS if self.timeout_seconds is None else self.timeout_seconds
