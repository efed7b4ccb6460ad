"""What a cluster is made of: devices, nodes and the two kinds of links between them.

Bandwidths are bytes per second in one direction, memory is bytes, peaks are FLOP/s of dense
matrix products, so that no estimate has to know a unit prefix.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mpctl.spec.base import Bytes, Count, DType, NonNegative, Positive, Table


class Device(Table):
    """One accelerator, or one CPU core that hosts a rank."""

    name: str = Field(description="what the vendor calls it")
    kind: Literal["cuda", "cpu"] = Field(description="which backend runs on it: NCCL or gloo")
    memory_bytes: Bytes = Field(description="memory one rank may use, bytes")
    memory_bandwidth: Positive | None = Field(None, description="bytes/s")
    peak_flops: dict[DType, Positive] = Field(description="dense matrix FLOP/s by dtype")
    source: str = Field(description="datasheet or measurement behind the figures")


class Link(Table):
    """A network level, per direction."""

    bandwidth: Positive = Field(description="bytes/s: per GPU inside a node, per node between")
    latency: NonNegative = Field(0.0, description="seconds a message waits before its first byte")


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
    source: str | None = None
