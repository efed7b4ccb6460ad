"""What a cluster is made of: devices, nodes and the two kinds of links between them.

Bandwidths are bytes per second in one direction, memory is bytes, peaks are FLOP/s of dense
matrix products, so that no estimate has to know a unit prefix.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mpctl.spec.base import Bytes, Count, DType, NonNegative, Positive, Share, Table


class Kernels(Table):
    """What kernels reach of a device's figures: a fit to measured products and published runs."""

    processors: Count = Field(1, description="that take tiles of a product: streaming processors")
    products: Positive = Field(description="part of the peak that a large product reaches")
    products_fp8: Positive | None = Field(None, description="of the fp8 peak; as others if absent")
    depth: NonNegative = Field(
        0.0, description="elements of a contraction that a tile starts up in"
    )
    waves: Share = Field(0.0, description="of a last wave's idle processors, how many count")
    misaligned: Positive = Field(
        1.0, description="speed of a product with a side in multiples of 8 but not of 64"
    )
    unaligned: Positive = Field(1.0, description="with a side not even in multiples of 8")
    memory: Positive = Field(description="part of the memory's bandwidth that kernels reach")
    flash: Positive = Field(description="part of the peak, flash attention forward")
    flash_backward: Positive = Field(description="and backward")
    launch: NonNegative = Field(
        0.0, description="seconds that a kernel takes on the device at least"
    )
    host: Positive = Field(
        1.0, description="seconds of its hosts to those of the hosts that profiles were fitted on"
    )
    source: str = Field(description="measurements behind the figures")


class Device(Table):
    """One accelerator, or one CPU core that hosts a rank."""

    name: str = Field(description="what the vendor calls it")
    kind: Literal["cuda", "cpu"] = Field(description="which backend runs on it: NCCL or gloo")
    memory_bytes: Bytes = Field(description="memory one rank may use, bytes")
    memory_bandwidth: Positive | None = Field(None, description="bytes/s")
    peak_flops: dict[DType, Positive] = Field(description="dense matrix FLOP/s by dtype")
    kernels: Kernels | None = Field(None, description="what of the figures kernels reach")
    source: str = Field(description="datasheet or measurement behind the figures")


class Link(Table):
    """A network level, per direction."""

    bandwidth: Positive = Field(description="bytes/s: per GPU inside a node, per node between")
    latency: NonNegative = Field(0.0, description="seconds a message waits before its first byte")
    efficiency: Positive = Field(1.0, description="part of the bandwidth that large messages reach")
    start: NonNegative = Field(0.0, description="seconds that any collective takes to start")


class Cluster(Table):
    """Nodes of equal devices."""

    name: str | None = None
    nodes: Count = Field(1, description="number of hosts")
    gpus_per_node: Count | None = Field(
        None, description="ranks a host carries; when absent, what the layout needs"
    )
    device: Device | None = Field(None, description="a device preset's name, or its table")
    intra_node: Link | None = Field(None, description="link between GPUs of one node")
    inter_node: Link | None = Field(None, description="link between nodes, whole node")
    slowdown: Positive = Field(
        1.0, description="times as long as its device's preset says do kernels take here: clocks, "
        "cooling, library versions"
    )  # fmt: skip
    source: str | None = None
