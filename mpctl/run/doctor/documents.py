"""Models of a host's report: one per probe, written as JSON by one process and read by another.

Sizes are bytes, times seconds, rates bytes per second. None: the host does not report it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from pydantic import ConfigDict, Field

from mpctl import __version__
from mpctl.core.errors import Issue
from mpctl.run.hosts.peers import Peer
from mpctl.run.hosts.probes import Gpu, ReportModel, Size


class Software(ReportModel):
    """Python, mpctl and torch, as installed (torch is not imported for this)."""

    python: str
    executable: str
    mpctl: str
    mpctl_folder: str
    torch: str | None
    triton: str | None = Field(None, description="compiles the fused kernels of GPUs")
    system: str = Field(description="operating system and kernel")
    architecture: str
    user: str
    home: str
    encoding: str = Field(description="encoding of file names")
    environment: dict[str, str] = Field(description="variables that change how torch or NCCL runs")


class TorchFacts(ReportModel):
    """Facts that torch reports after its import in a separate process."""

    version: str
    import_seconds: float
    cuda_built: str | None = Field(description="CUDA version that torch was built with")
    hip_built: str | None = Field(None, description="ROCm version that torch was built with")
    nccl: str | None = Field(description="NCCL version that torch was built with")
    has_gloo: bool
    has_nccl: bool
    gpus: int = Field(description="GPUs that torch can use")
    gpu_names: list[str]
    gloo_error: str | None = Field(
        description="why an all-reduce of one process through gloo failed; None when it worked"
    )
    nccl_error: str | None = Field(
        description="the same through NCCL on the first GPU; None when it worked or has no GPU"
    )
    cuda_error: str | None = Field(description="why CUDA could not be used, where GPUs are present")


class Processor(ReportModel):
    """Processors that this process may use, and what else the machine has."""

    model: str | None
    cores: int = Field(description="logical processors that this process may use")
    logical: int
    physical: int | None
    sockets: int | None
    numa_nodes: int | None
    quota: float | None = Field(description="processors that the control group grants")
    load: float | None = Field(description="processes that wait or run, average of a minute")


class Memory(ReportModel):
    """Memory that is free now."""

    total: Size
    available: Size
    group_free: Size | None = Field(description="free within the limit of the control group")
    swap_total: Size
    swap_used: Size
    shm_total: Size | None = Field(description="size of /dev/shm, which NCCL uses")
    shm_free: Size | None

    @property
    def free(self) -> int:
        """Bytes that can be allocated, within the limit of the control group if there is one."""
        return self.available if self.group_free is None else min(self.available, self.group_free)


class Limits(ReportModel):
    """Limits of a process or a user; None: no limit."""

    open_files: int | None
    open_files_hard: int | None
    processes: int | None
    locked_memory: int | None = Field(description="bytes that a process may keep from being paged")
    group_processes: int | None = Field(description="processes that the control group may still add")


class Gpus(ReportModel):
    """The GPUs of a host that this process may see, and the links between them."""

    tool: Literal["nvidia-smi", "device files", "amdgpu", "none"]
    visible: str | None = Field(description="CUDA_VISIBLE_DEVICES")
    devices: list[Gpu]
    device_files: int = Field(description="/dev/nvidia0, /dev/nvidia1, ...; AMD's /dev/dri/renderD")
    on_bus: int = Field(0, description="GPUs on the PCI bus, whether a driver is loaded or not")
    links: list[list[str]] = Field(
        description="link between each two GPUs in nvidia-smi's words: NV18, PIX, NODE, SYS, X"
    )
    error: str | None = Field(description="what nvidia-smi said instead of an answer")


class Interface(ReportModel):
    """A network interface. speed: bits per second in one direction; None if unknown."""

    name: str
    is_up: bool
    addresses: list[str]
    speed: int | None
    mtu: int


class InfiniBandPort(ReportModel):
    """A port of an RDMA device (InfiniBand or RoCE), as /sys/class/infiniband describes it."""

    device: str
    port: int
    state: str
    rate: str
    layer: str


class NetworkFacts(ReportModel):
    """Interfaces, names and ports of a host."""

    host: str = Field(description="the host's name for itself")
    host_addresses: list[str] = Field(description="what this name resolves to on the host")
    host_error: str | None = Field(description="why the name does not resolve")
    interfaces: list[Interface]
    default_interface: str | None = Field(description="interface of the default route")
    infiniband: list[InfiniBandPort]
    towards: str | None = Field(description="the interface that leads to the first host, which ranks are told to use")
    gloo_setting: str | None = Field(description="GLOO_SOCKET_IFNAME")
    nccl_setting: str | None = Field(description="NCCL_SOCKET_IFNAME")
    first_port: int = Field(description="first port of the ephemeral range")
    last_port: int
    used_ports: int = Field(description="ports of that range in use now")
    loopback_error: str | None = Field(description="why no connection to 127.0.0.1 could be opened; None when it could")


class Folder(ReportModel):
    """The run directory, or the nearest folder above it that exists; all measured in it."""

    path: str = Field(description="the run directory that was asked about")
    probed: str = Field(description="the folder in which it was measured")
    device: str = Field(description="file system type: ext4, nfs4, lustre, tmpfs, ...")
    total: Size
    free: Size
    write_error: str | None = Field(description="why no file could be written; None when it could")
    lock_error: str | None = Field(description="why flock failed")
    map_error: str | None = Field(description="why a file could not be mapped as shared memory")
    write_rate: float | None = Field(description="bytes/s of one file, fsync included")
    sync_seconds: float | None = Field(description="time to write and fsync 4 KiB, the median")
    is_shared: bool | None = Field(
        description="whether the launcher's file for this test can be read there; None: not asked"
    )


class Transfer(ReportModel):
    """The transfer rate of messages of one size from one host to the other."""

    size: int
    rate: float


class PairResult(ReportModel):
    """Measurements between two hosts over a TCP connection, as gloo uses them.

    first, second: their indices; the first has connected. latency: half of the median round trip.
    offset: the second's clock minus the first's, off by at most half of the fastest round trip.
    forward, backward: by size, to the second and from it. error: why there are no results.
    """

    first: int
    second: int
    connect_seconds: float | None = None
    latency: float | None = None
    offset: float | None = None
    forward: list[Transfer] = Field(default_factory=list)
    backward: list[Transfer] = Field(default_factory=list)
    error: str | None = None

    @property
    def rate(self) -> float | None:
        """Bytes per second of the largest messages, in the slower direction."""
        ends = [transfers[-1].rate for transfers in (self.forward, self.backward) if transfers]
        return min(ends, default=None)


class PairReport(ReportModel):
    """The results of one host with the partners to which it connected."""

    results: list[PairResult]


class CollectiveTiming(ReportModel):
    """An all-reduce of `size` bytes: its median time, and the rate of each rank's link by the
    convention of nccl-tests (busbw = 2 (n - 1) / n times size over time)."""

    size: int
    seconds: float
    bus_rate: float


class CollectiveReport(ReportModel):
    """An all-reduce of torch over all ranks: timings by rank 0; errors: of ranks that failed."""

    backend: str
    hosts: int = Field(description="hosts that the ranks are on, equally many on each")
    world_size: int
    timings: list[CollectiveTiming] = Field(default_factory=list)
    errors: dict[str, str] = Field(default_factory=dict, description="message by rank")


class ProbeFailure(ReportModel):
    """A probe without a result. error: its exception, or that it timed out."""

    probe: str
    error: str


class HostReport(ReportModel):
    """Everything that one host reports. A probe that failed is in `failures` instead of a
    section."""

    host: str = Field(description="the host's name for itself")
    unix_time: float = Field(description="its clock when it answered, seconds since 1970")
    software: Software | None = None
    torch: TorchFacts | None = None
    processor: Processor | None = None
    memory: Memory | None = None
    limits: Limits | None = None
    gpus: Gpus | None = None
    network: NetworkFacts | None = None
    folder: Folder | None = None
    loopback: PairResult | None = Field(None, description="two processes of this host, measured over 127.0.0.1")
    failures: list[ProbeFailure] = Field(default_factory=list)
    seconds: dict[str, float] = Field(default_factory=dict, description="time that each probe took")


class Finding(ReportModel):
    """Something that would break a launch (error) or is worth knowing before one (warning).

    rule: a stable id to search for; where: its subject, such as `memory`; hosts: where it was
    found; message: value and bound in words; hint: a way out.
    """

    status: Literal["error", "warning"]
    rule: str
    where: str
    hosts: list[str]
    message: str
    hint: str = ""


class Diagnosis(ReportModel):
    """Everything that `mpctl doctor` has found: schema mpctl.doctor/1.

    skew: each host's clock minus the launcher's in seconds, 0 where the difference is smaller than
    the time that the host took to answer. connect_seconds: until each host's node agent was there;
    empty on the launcher's host alone. pairs: of hosts, by their indices in `hosts`; all_pairs: the
    number of all pairs, of which `pairs` may be a sample.
    """

    model_config = ConfigDict(populate_by_name=True)

    format: Literal["mpctl.doctor/1"] = Field("mpctl.doctor/1", alias="schema")
    mpctl: str
    backend: str
    job: str | None
    hosts: list[HostReport]
    skew: list[float]
    connect_seconds: list[float] = Field(default_factory=list)
    pairs: list[PairResult]
    all_pairs: int
    collectives: list[CollectiveReport]
    findings: list[Finding]

    @property
    def has_errors(self) -> bool:
        return any(finding.status == "error" for finding in self.findings)


def error(rule: str, where: str, message: str, hint: str = "", hosts: Sequence[str] = ()) -> Finding:
    """Something that would break a launch."""
    return Finding(status="error", rule=rule, where=where, hosts=[*hosts], message=message, hint=hint)


def warning(rule: str, where: str, message: str, hint: str = "", hosts: Sequence[str] = ()) -> Finding:
    """Something worth knowing before a launch."""
    return error(rule, where, message, hint, hosts).model_copy(update={"status": "warning"})


def of_issues(issues: Iterable[Issue], *, backend: str, job: str | None) -> Diagnosis:
    """The diagnosis when the hosts could not be used: only the reasons."""
    return Diagnosis(
        mpctl=__version__,
        backend=backend,
        job=job,
        hosts=[],
        skew=[],
        pairs=[],
        all_pairs=0,
        collectives=[],
        findings=[error(i.rule, i.where, i.message, i.hint) for i in issues],
    )


def with_issues(diagnosis: Diagnosis, issues: Iterable[Issue]) -> Diagnosis:
    """The diagnosis with the reasons to refuse a launch put first, except those of rules that the
    hosts' reports show to be broken."""
    known = {finding.rule for finding in diagnosis.findings}
    new = [error(i.rule, i.where, i.message, i.hint) for i in issues if i.rule not in known]
    return diagnosis.model_copy(update={"findings": [*new, *diagnosis.findings]})


class PairRequest(ReportModel):
    """Input of `python -m mpctl.run.doctor.pairs` on stdin.

    me: this host's index in `hosts`. partners: hosts to measure with, in order of rounds; the host with the smaller
    index connects. token: shared secret of this test. seconds: time limit of one pair.
    """

    me: int
    hosts: list[Peer]
    partners: list[int]
    token: str
    seconds: float = 1.5
    patience: float = Field(10.0, description="seconds that a host may start later than another")


class CollectiveRequest(ReportModel):
    """Input of `python -m mpctl.run.doctor.collectives` on stdin: the ranks to start here."""

    first_rank: int
    ranks: int
    world_size: int
    address: str
    port: int
    device: Literal["cpu", "cuda"]
    interface: str | None = Field(None, description="GLOO_ and NCCL_SOCKET_IFNAME of the ranks")
    seconds: float = 60.0


class ProbeRequest(ReportModel):
    """Input of `python -m mpctl.run.doctor.probe` on stdin.

    run_dir: the run directory to measure, None for none. towards: the address of the first host. nonce: written by the
    launcher into the file `nonce_file` of the run directory, to test whether the host shares it. torch_seconds: time
    limit of the process that imports torch, 0 to leave torch out; probe_seconds: of each other probe. loopback: measure
    two processes of the host.
    """

    run_dir: str | None = None
    towards: str | None = None
    nonce_file: str | None = None
    nonce: str | None = None
    torch_seconds: float = 120.0
    loopback: bool = True
    probe_seconds: float = 20.0
