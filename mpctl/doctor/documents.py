"""What a host reports about itself: one model a probe, written as JSON by one process and read by
another.

Sizes are bytes, times seconds, rates bytes per second. None stands for what the host does not tell.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Size = Annotated[int, Field(ge=0)]


class ReportModel(BaseModel):
    """Base of all models here: types are strict; keys that a newer version adds are ignored."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", protected_namespaces=())


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
    """What torch says about itself once it is imported, in a process of its own."""

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
        """Bytes that can be allocated: within the limit of the control group where there is one."""
        return self.available if self.group_free is None else min(self.available, self.group_free)


class Limits(ReportModel):
    """Limits of a process or a user; None: no limit."""

    open_files: int | None
    open_files_hard: int | None
    processes: int | None
    locked_memory: int | None = Field(description="bytes that a process may keep from being paged")
    group_processes: int | None = Field(
        description="processes that the control group may still add"
    )


class Gpu(ReportModel):
    """A GPU as nvidia-smi, or the driver amdgpu, describes it."""

    index: int
    name: str
    memory_total: Size
    memory_used: Size
    driver: str
    mig: bool
    uncorrected_errors: int | None = Field(description="ECC errors since the driver was loaded")
    processes: int = Field(description="processes that compute on it now")


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
    """A network interface. speed: bits per second in one direction; None where unknown."""

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
    towards: str | None = Field(
        description="the interface that leads to the first host, which ranks are told to use"
    )
    gloo_setting: str | None = Field(description="GLOO_SOCKET_IFNAME")
    nccl_setting: str | None = Field(description="NCCL_SOCKET_IFNAME")
    first_port: int = Field(description="first port of the ephemeral range")
    last_port: int
    used_ports: int = Field(description="ports of that range in use now")
    loopback_error: str | None = Field(
        description="why no connection to 127.0.0.1 could be opened; None when it could"
    )


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
    """The rate at which messages of one size went from one host to the other."""

    size: int
    rate: float


class PairResult(ReportModel):
    """What two hosts measured over a TCP connection, as gloo uses them.

    first, second: their places; the first has connected. latency: half of the median round trip.
    offset: the second's clock minus the first's, off by at most half of the fastest round trip.
    forward, backward: by size, to the second and from it. error: why there is nothing of this.
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
    """What one host measured with those partners to which it has connected."""

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
    """A probe that gave no result. error: its exception, or that its time ran out."""

    probe: str
    error: str


class HostReport(ReportModel):
    """Everything that one host reports. A probe that failed has no section; `failures` says why."""

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
    loopback: PairResult | None = Field(
        None, description="two processes of this host, measured over 127.0.0.1"
    )
    failures: list[ProbeFailure] = Field(default_factory=list)
    seconds: dict[str, float] = Field(default_factory=dict, description="time that each probe took")
