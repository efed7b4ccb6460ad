"""A cluster: devices, nodes, and the levels of links between them.

Bandwidths are bytes per second in one direction, memory is bytes, peaks are FLOP/s of dense
matrix products, so that no estimate has to know a unit prefix.
"""

import re
from typing import Annotated, Literal

from pydantic_core import PydanticCustomError

from mpctl.spec.base import (
    After,
    Bounded,
    Bytes,
    BytesPerSecond,
    Count,
    DType,
    Factor,
    Field,
    FlopPerSecond,
    Part,
    Seconds,
    Share,
    StrictModel,
)
from mpctl.spec.presets import find_preset, preset_names


class NarrowProducts(StrictModel):
    """What large products of operands of 8 and 4 bits reach of their own peak; as those of 16 bits
    when absent."""

    fp8: Part | None = Field("one scale a tensor (fp8)", None)
    mxfp8: Part | None = Field("one scale for 32 elements (mxfp8)", None)
    nvfp4: Part | None = Field(
        "4 bits, one scale for 16 elements (nvfp4); its recipe's rounding and "
        "rotations of operands, and what it leaves in more bits, included",
        None,
    )

    def find(self, dtype: DType) -> float | None:
        """The fraction at a dtype, None where it is not told."""
        found: float | None = getattr(self, dtype, None)
        return found


class Kernels(StrictModel):
    """How much of a device's data sheet its kernels reach, fitted to measured matrix products and
    runs."""

    processors: Annotated[int, Bounded(ge=1, le=2**20)] = Field(
        "streaming multiprocessors (SMs) that tiles of a matrix product run on", 1
    )
    products: Part = Field("fraction of peak FLOP/s that a large matrix product reaches")
    narrow: NarrowProducts = Field("the same of products of fewer bits, by dtype", NarrowProducts)
    depth: Annotated[float, Bounded(ge=0, le=1e6)] = Field(
        "start-up cost of a product's tile, in elements of the contracted dimension", 0.0
    )
    waves: Share = Field("fraction of idle SMs charged in a product's last wave", 0.0)
    misaligned: Part = Field(
        "relative speed of a product with a side that is a multiple of 8, not of 64", 1.0
    )
    unaligned: Part = Field("relative speed of a product with a side that is no multiple of 8", 1.0)
    memory: Part = Field("fraction of the memory bandwidth that kernels reach")
    flash: Part = Field("fraction of peak FLOP/s of flash attention's forward")
    flash_backward: Part = Field("fraction of peak FLOP/s of flash attention's backward")
    launch: Seconds = Field("least time that any kernel takes, seconds", 0.0)
    host: Factor = Field(
        "host time relative to the hosts that the runtime profiles were fitted on", 1.0
    )
    source: str = Field("measurements that the figures come from")


def _require_kind(kind: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9]{1,15}", kind):
        message = "Input should be a short word in lower case"
        hint = "such as cpu, cuda, rocm, xpu or tpu"
        raise PydanticCustomError("device_kind", message, {"hint": hint})
    return kind


class DeviceSpec(StrictModel):
    """One accelerator, or one CPU core that hosts a rank."""

    name: str = Field("the vendor's name of the device")
    kind: Annotated[str, After(_require_kind)] = Field(
        "cpu, or the kind of accelerator: cuda, rocm, xpu, tpu, ...; any is planned, "
        "mpctl launch runs cuda (NCCL), rocm (RCCL, never tried) and cpu (gloo, shared memory)"
    )
    memory_bytes: Bytes = Field("memory that one rank may use, bytes")
    memory_bandwidth: BytesPerSecond | None = Field(
        "memory bandwidth, bytes/s; without it no step time is estimated", None
    )
    peak_flops: dict[DType, FlopPerSecond] = Field(
        "peak FLOP/s of dense matrix products, by data type"
    )
    kernels: Kernels | None = Field(
        "how much of these figures kernels reach; typical values when absent", None
    )
    reported_as: list[str] = Field(
        "names by which the driver and torch report it, by which a run finds its peak",
        list,
    )
    source: str = Field("data sheet or measurement that the figures come from")

    @property
    def is_cpu(self) -> bool:
        """Whether it is a CPU core that hosts a rank, not an accelerator."""
        return self.kind == "cpu"


class LinkSpec(StrictModel):
    """One level of the network: the links inside a node, or those between nodes."""

    name: str | None = Field("what it is, such as NVLink5 or PCIe 4; in pictures", None)
    bandwidth: BytesPerSecond = Field(
        "bytes/s in one direction: of a GPU (intra_node), of a node (inter_node)"
    )
    latency: Seconds = Field("time before a message's first byte, seconds", 0.0)
    efficiency: Part = Field("fraction of the bandwidth that large messages reach", 1.0)
    start: Seconds = Field("time that every collective takes to start, seconds", 0.0)
    multicast: bool = Field(
        "its switches broadcast and add (NVLink SHARP): kernels can send in pieces "
        "what the product beside them needs or makes",
        False,
    )
    all_reduce: Factor = Field(
        "bandwidth of an all-reduce over that of gathers and scatters; above 1 where "
        "switches add up",
        1.0,
    )
    decay: Share = Field(
        "between nodes, exponent by which collectives of more ranks than those of two "
        "nodes reach less: efficiency x (ranks / ranks of two nodes)^-decay",
        0.0,
    )


class InnerLinkSpec(LinkSpec):
    """The links inside a node, or inside an NVLink domain of several nodes."""

    direct_links: Count | None = Field(
        "links of a GPU, one to each peer, that make up the bandwidth where there is "
        "no switch (AMD's xGMI: 7); absent: a switch, by which any peer has all of it",
        None,
    )


class FabricSpec(StrictModel):
    """One level of the network above the nodes' cards, such as a leaf, a rail group or a pod."""

    name: str = Field("what it is, such as leaf, rail, pod")
    gpus: Count = Field("GPUs under one such network")
    oversubscription: Annotated[float, Bounded(ge=1, le=1e3)] = Field(
        "how many times less bandwidth leaves one such network than its nodes' cards "
        "have together (7 of 1:7); 1: none",
        1.0,
    )
    latency: Seconds = Field(
        "seconds that leaving one such network adds to inter_node.latency", 0.0
    )


class ClusterSpec(StrictModel):
    """The machines of a job: equal nodes of equal devices, and the links between them."""

    name: str | None = Field("the cluster's name; a preset fills it in", None)
    nodes: Count = Field("number of hosts", 1)
    gpus_per_node: Count | None = Field(
        "ranks (GPUs) on each host; as many as the layout needs when absent", None
    )
    device: DeviceSpec | None = Field("a device preset's name, or its table", None)
    cores: Count | None = Field(
        "cores of a node that its ranks share, where the device is one core (kind "
        "cpu); more ranks than cores take turns; a core for each rank when absent",
        None,
    )
    nvlink_domain: Count | None = Field(
        "GPUs that the intra_node link joins, over several nodes (72 of an NVL72, 18 "
        "nodes of 4); those of one node when absent",
        None,
    )
    intra_node: InnerLinkSpec | None = Field(
        "link between the GPUs of one node, or of one NVLink domain", None
    )
    inter_node: LinkSpec | None = Field("link between nodes, for a whole node", None)
    headroom: Annotated[float, Bounded(ge=0, le=90)] = Field(
        "percent of a device's memory that a job must leave free by its plan to fit; "
        "the default is calibrated on runs that did not fit (docs/measurements.md)",
        5.0,
    )
    fabric: list[FabricSpec] = Field(
        "levels of the network above the nodes' cards, innermost first", list
    )
    slowdown: Factor = Field(
        "kernel time relative to the device preset: clocks, cooling, library versions", 1.0
    )
    spread: Part | None = Field(
        "spread of log(measured / estimated) over runs of mpctl on this very cluster "
        "(`mpctl bench machine`): 9 of 10 lie within 1.645 of it",
        None,
    )
    source: str | None = Field("where the figures come from", None)

    @property
    def ranks_per_core(self) -> float:
        """How many ranks take turns on a core; 1 where each has a core, or a device, of its own."""
        if self.cores is None or self.device is None or not self.device.is_cpu:
            return 1.0
        return max((self.gpus_per_node or 1) / self.cores, 1.0)

    @property
    def usable_bytes(self) -> int | None:
        """Bytes of a device's memory that a job may take: all but the headroom; None without a
        device."""
        if self.device is None:
            return None
        return int(self.device.memory_bytes * (1 - self.headroom / 100))


Link = Literal["intra_node", "inter_node"]


def linked_clusters(cluster: ClusterSpec, link: Link) -> list[str]:
    """The names of cluster presets that state this link, of the same device and as many of it in a
    node: of one node alone no network is known."""
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
