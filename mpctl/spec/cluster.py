"""A cluster: devices, nodes, and the levels of links between them.

Bandwidths are bytes per second in one direction, memory is bytes, peaks are FLOP/s of dense
matrix products, so that no estimate has to know a unit prefix.
"""

import re
from typing import Annotated, Literal

from annotated_types import Ge, Le
from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from mpctl.spec.base import (
    Bytes,
    BytesPerSecond,
    Count,
    DType,
    Factor,
    FlopPerSecond,
    Part,
    Seconds,
    Share,
    StrictModel,
    Timeout,
)
from mpctl.spec.presets import find_preset, preset_names

Watts = Annotated[float, Ge(0.1), Le(1e6)]
MeanHours = Annotated[float, Ge(0.1), Le(1e9)]
"""Hours between two failures of one device or node."""


class NarrowProducts(StrictModel):
    """The fraction of their peak that large products of 8-bit and 4-bit operands reach; that of
    16-bit products when absent."""

    fp8: Part | None = Field(None, description="one scale for each tensor (fp8)")
    mxfp8: Part | None = Field(None, description="one scale for 32 elements (mxfp8)")
    nvfp4: Part | None = Field(
        None,
        description="4 bits, one scale for 16 elements (nvfp4), with its recipe's rounding, rotations and "
        "products kept in higher precision",
    )

    def find(self, dtype: DType) -> float | None:
        """The fraction at a dtype, None where it is not stated."""
        found: float | None = getattr(self, dtype, None)
        return found


class Kernels(StrictModel):
    """How much of a device's data sheet its kernels reach, fitted to measured matrix products and
    runs."""

    processors: Annotated[int, Ge(1), Le(2**20)] = Field(
        1, description="streaming multiprocessors (SMs) that tiles of a matrix product run on"
    )
    products: Part = Field(description="fraction of peak FLOP/s that a large matrix product reaches")
    narrow: NarrowProducts = Field(
        default_factory=NarrowProducts, description="the same for products of fewer bits, by dtype"
    )
    depth: Annotated[float, Ge(0), Le(1e6)] = Field(
        0.0, description="start-up cost of a product's tile, in elements of the contracted dimension"
    )
    waves: Share = Field(0.0, description="fraction of idle SMs charged in a product's last wave")
    misaligned: Part = Field(
        1.0, description="relative speed of a product with a side that is a multiple of 8, not of 64"
    )
    unaligned: Part = Field(1.0, description="relative speed of a product with a side that is not a multiple of 8")
    memory: Part = Field(description="fraction of the memory bandwidth that kernels reach")
    flash: Part = Field(description="fraction of peak FLOP/s of flash attention's forward")
    flash_backward: Part = Field(description="fraction of peak FLOP/s of flash attention's backward")
    triton: Part = Field(
        0.9, description="speed of mpctl's own attention kernels, written in Triton, relative to flash"
    )
    launch: Seconds = Field(0.0, description="least time that any kernel takes, seconds")
    host: Factor = Field(1.0, description="host time relative to the hosts that the runtime profiles were fitted on")
    source: str = Field(description="measurements that the figures come from")


def _require_kind(kind: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9]{1,15}", kind):
        message = "Input should be a short word in lower case"
        hint = "such as cpu, cuda, rocm, xpu or tpu"
        raise PydanticCustomError("device_kind", message, {"hint": hint})
    return kind


class DeviceSpec(StrictModel):
    """One accelerator, or one CPU core that hosts a rank."""

    name: str = Field(description="the vendor's name of the device")
    kind: Annotated[str, AfterValidator(_require_kind)] = Field(
        description="cpu, or the kind of accelerator: cuda, rocm, xpu, tpu, ...; any is planned; cuda (NCCL), "
        "cpu (gloo, shared memory) and, untried, rocm are launched"
    )
    memory_bytes: Bytes = Field(description="memory that one rank may use, bytes")
    memory_bandwidth: BytesPerSecond | None = Field(
        None, description="memory bandwidth, bytes/s; without it no step time is estimated"
    )
    host_link: BytesPerSecond | None = Field(
        None, description="bytes/s of its link to the host, each way, by the data sheet; 32e9, PCIe 4 x16, when absent"
    )
    peak_flops: dict[DType, FlopPerSecond] = Field(description="peak FLOP/s of dense matrix products, by data type")
    blas_workspace: Bytes | None = Field(
        None,
        description="bytes of workspace for each thread that multiplies; when absent torch's default: 8.1 MiB "
        "on cuda, 108 MiB on rocm",
    )
    watts: Watts | None = Field(None, description="thermal design power or power limit, W; for the energy of a run")
    kernels: Kernels | None = Field(
        None, description="fractions of these that kernels reach; typical values when absent"
    )
    reported_as: list[str] = Field(
        default_factory=list, description="names that the driver and torch report; a run looks up its peak by them"
    )
    source: str = Field(description="data sheet or measurement that the figures come from")

    @property
    def is_cpu(self) -> bool:
        """Whether it is a CPU core that hosts a rank instead of an accelerator."""
        return self.kind == "cpu"


class LinkSpec(StrictModel):
    """One level of the network: the links inside a node, or those between nodes."""

    name: str | None = Field(None, description="its kind, such as NVLink5 or PCIe 4, for pictures")
    bandwidth: BytesPerSecond = Field(
        description="bytes/s in one direction: per GPU (intra_node), per node (inter_node)"
    )
    latency: Seconds = Field(0.0, description="time before a message's first byte, seconds")
    efficiency: Part = Field(1.0, description="fraction of the bandwidth that large messages reach")
    start: Seconds = Field(0.0, description="time that every collective takes to start, seconds")
    multicast: bool = Field(
        False,
        description="its switches broadcast and add (NVLink SHARP), so that messages can be sent in pieces "
        "during a product",
    )
    all_reduce: Factor = Field(
        1.0,
        description="bandwidth of an all-reduce relative to that of gathers and scatters; above 1 "
        "where switches add up",
    )
    decay: Share | None = Field(
        None,
        description="inter_node: exponent d of efficiency x (ranks / ranks of two nodes)^-d over more than "
        "two nodes; when absent that of typical networks, 0 for none",
    )


class InnerLinkSpec(LinkSpec):
    """The links inside a node, or inside an NVLink domain of several nodes."""

    direct_links: Count | None = Field(
        None,
        description="links of a GPU, one to each peer, without a switch (AMD's xGMI: 7); when absent a switch "
        "gives any peer the full bandwidth",
    )


class FabricSpec(StrictModel):
    """One level of the network above the nodes' cards, such as a leaf, rail group or pod."""

    name: str = Field(description="its kind, such as leaf, rail, pod")
    gpus: Count = Field(description="GPUs under one such network")
    oversubscription: Annotated[float, Ge(1), Le(1e3)] = Field(
        1.0, description="bandwidth of its nodes' cards over the bandwidth that leaves it (7 for 1:7); 1 is none"
    )
    latency: Seconds = Field(0.0, description="seconds that leaving one such network adds to inter_node.latency")


class OperationsSpec(StrictModel):
    """Conditions of long runs on a cluster: failures, storage, power, prices. The defaults are published
    figures (docs/goodput.md)."""

    gpu_mtbf_hours: MeanHours = Field(
        79_000.0,
        description="hours of a GPU between failures of GPUs that end a run (Llama 3: 268 in 54 days of 16,384)",
    )
    node_mtbf_hours: MeanHours = Field(
        17_600.0,
        description="hours of a node between all other failures that end a run (Llama 3: 151 in 54 days of 2,048)",
    )
    repair_hours: Annotated[float, Ge(0), Le(1e4)] = Field(
        24.0, description="hours until a failed node may be used again; an assumption"
    )
    detect_seconds: Timeout = Field(
        23.0,
        description="seconds until a failure is noticed: of a lost host (docs/reliability.md); a "
        "hang takes launch.timeout_seconds",
    )
    restart_seconds: Timeout = Field(
        300.0,
        description="seconds from there to the first step, without reading the checkpoint (5 to 20 min: arXiv "
        "2410.21680)",
    )
    storage_write: BytesPerSecond | None = Field(
        None,
        description="bytes/s that all nodes together write; 83 MB/s for each GPU of the run when "
        "absent (Llama 3: 2 TB/s for 24,000)",
    )
    storage_read: BytesPerSecond | None = Field(
        None, description="bytes/s that all nodes together read; as for writing when absent"
    )
    price_per_gpu_hour: Annotated[float, Ge(0), Le(1e6)] | None = Field(
        None, description="price of a GPU-hour, in any currency"
    )
    watts_per_gpu: Watts | None = Field(
        None,
        description="power of a node in training over its GPUs, W; 1.38 x device.watts when absent "
        "(76 % of the 10.2 kW of 8 H100: arXiv 2506.14551)",
    )
    pue: Annotated[float, Ge(1), Le(10)] = Field(
        1.1, description="power of the data centre over that of its nodes; large ones have 1.1"
    )


class ClusterSpec(StrictModel):
    """The machines of a job: equal nodes of equal devices, and the links between them."""

    name: str | None = Field(None, description="the cluster's name; a preset fills it in")
    nodes: Count = Field(1, description="number of hosts")
    gpus_per_node: Count | None = Field(
        None, description="ranks (GPUs) on each host; the number that the layout needs when absent"
    )
    device: DeviceSpec | None = Field(None, description="a device preset's name, or its table")
    host_memory: Bytes | None = Field(
        None,
        description="memory of a host, bytes; a plan warns if offloaded states and inputs and checkpoint copies leave "
        "less than a tenth",
    )
    host_bandwidth: BytesPerSecond | None = Field(
        None,
        description="bytes/s at which a host updates offloaded states; 117e9 when absent (10 billion parameters in "
        "2.57 s on a DGX-2: arXiv 2101.06840, table 4)",
    )
    cores: Count | None = Field(
        None,
        description="CPU cores that the ranks of a node share; more ranks than cores take turns; one for each "
        "rank when absent",
    )
    nvlink_domain: Count | None = Field(
        None,
        description="GPUs that the intra_node link joins, also of several nodes (NVL72: 72); those of one "
        "node when absent",
    )
    intra_node: InnerLinkSpec | None = Field(
        None, description="link between the GPUs of one node, or of one NVLink domain"
    )
    inter_node: LinkSpec | None = Field(None, description="link between nodes, bandwidth of a node")
    headroom: Annotated[float, Ge(0), Le(90)] = Field(
        5.0, description="percent of a device's memory that a plan must leave free for the job to fit"
    )
    fabric: list[FabricSpec] = Field(
        default_factory=list, description="levels of the network above the nodes' network cards, innermost first"
    )
    slowdown: Factor = Field(
        1.0, description="kernel time relative to the device preset: clocks, cooling, library versions"
    )
    step_factor: Factor | None = Field(
        None,
        description="factor on all estimated seconds, set by `mpctl calibrate`; when absent 1 on measured "
        "systems, else the runtime's shift_apart",
    )
    spread: Part | None = Field(
        None,
        description="spread of log(measured / estimated) on this cluster (`mpctl bench machine`): 9 of 10 "
        "runs are within 1.645 times it",
    )
    operations: OperationsSpec = Field(
        default_factory=OperationsSpec,
        description="failures, storage, power and prices of long runs (`mpctl plan --tokens`)",
    )
    source: str | None = Field(None, description="where the figures come from")

    @property
    def ranks_per_core(self) -> float:
        """How many ranks take turns on a core; 1 where each rank has its own core or device."""
        if self.cores is None or self.device is None or not self.device.is_cpu:
            return 1.0
        return max((self.gpus_per_node or 1) / self.cores, 1.0)

    @property
    def bandwidths(self) -> list[float]:
        """Bytes/s of the link inside a node and of that between nodes; 0 where there is none."""
        inner, outer = self.intra_node, self.inter_node
        return [inner.bandwidth if inner else 0.0, outer.bandwidth if outer else 0.0]

    @property
    def usable_bytes(self) -> int | None:
        """Bytes of a device's memory that a job may take: all but the headroom; None without a
        device."""
        if self.device is None:
            return None
        return int(self.device.memory_bytes * (1 - self.headroom / 100))

    def fits(self, need: int) -> bool | None:
        """Whether `need` bytes on a device leave the headroom free; None without a device."""
        return None if self.usable_bytes is None else need <= self.usable_bytes


Link = Literal["intra_node", "inter_node"]


def linked_clusters(cluster: ClusterSpec, link: Link) -> list[str]:
    """Names of the cluster presets that state this link and have the same device and the same
    number of them in a node. A preset of a single node states no network."""
    if cluster.device is None:
        return []
    names = []
    for name in preset_names("clusters"):
        preset = find_preset("clusters", name) or {}
        device = preset.get("device")
        if link not in preset or preset.get("gpus_per_node") != cluster.gpus_per_node:
            continue
        table = find_preset("devices", device) if isinstance(device, str) else device
        if table and table.get("name") == cluster.device.name:
            names.append(name)
    return names


def link_hint(cluster: ClusterSpec, link: Link) -> str:
    """How to state a link that is missing: its bandwidth, or a preset that has it."""
    names = linked_clusters(cluster, link)
    other = f"; or use --cluster {' or '.join(names)}, which has it" if names else ""
    return f"set cluster.{link}.bandwidth, bytes/s in one direction{other}"
