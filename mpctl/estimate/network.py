"""How long a message takes over the link that its group spans.

A group is as fast as the slowest link in it: where any group of an axis leaves its node, all of
them count as between nodes, and the ranks of a node share its link. Collectives are rings: (t-1)/t
of the message and t-1 latencies in each phase. From stage to stage a message crosses one link,
which the ranks of a stage on one node share.

By hand, 1 MB from a stage to the next over 10 GB/s and 5 us: 105 us in a node, 4 x 100 + 5 us from
a node of 4 ranks of that stage.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

from mpctl.estimate.communication import ring_bytes
from mpctl.estimate.messages import Message
from mpctl.estimate.pipeline import HandOver
from mpctl.spec.cluster import Cluster, Link
from mpctl.topology import Group, Topology


class MissingLink(LookupError):
    """A message needs a link whose bandwidth is not known; says which."""


@dataclass(frozen=True)
class Network:
    cluster: Cluster
    topology: Topology

    def collective(self, message: Message) -> float:
        """Seconds of all of a message's count."""
        topology, axis = self.topology, message.axis
        crosses = self._crossing[axis]
        ranks = topology.sizes[axis] * (topology.sizes["cp"] if axis == "dp" else 1)
        sharing = min(topology.gpus_per_node, topology.world_size) if crosses else 1
        link = self._link(axis, crosses)
        return message.count * _ring(message.bytes, ranks, message.kind, link, sharing)

    def sum_over(self, stages: Collection[int], size: int) -> float:
        """Seconds of an all-reduce by the ranks of a pipeline at these stages."""
        crosses = self._are_apart(stages)
        sharing = self._sharing if crosses else 1
        return _ring(size, len(stages), "all_reduce", self._link("pp", crosses), sharing)

    def transfer(self, hand_over: HandOver) -> float:
        """Seconds from one stage to another."""
        crosses = self._are_apart((hand_over.sender.stage, hand_over.receiver.stage))
        link, sharing = self._link("pp", crosses), self._sharing if crosses else 1
        return sum(size / (link.bandwidth / sharing) + link.latency for size in hand_over.sizes)

    @cached_property
    def _crossing(self) -> dict[str, bool]:
        return {axis: self.topology.straddling(axis)[1] > 0 for axis in ("tp", "cp", "dp")}

    @cached_property
    def _pipeline(self) -> Group:
        """The ranks of one pipeline, of one that leaves its node where any does."""
        first = self.topology.group(0, "pp")
        if self.topology.node(first[0]) != self.topology.node(first[-1]):
            return first  # of a large world the others need not be looked at
        shown, _ = self.topology.straddling("pp")
        return shown[0] if shown else first

    def _are_apart(self, stages: Collection[int]) -> bool:
        return len({self.topology.node(self._pipeline[stage]) for stage in stages}) > 1

    @property
    def _sharing(self) -> int:
        """Ranks of one stage on one node: as many as lie between neighbours of a pipeline."""
        return min(self.topology.gpus_per_node, self.topology.strides["pp"])

    def _link(self, axis: str, crosses: bool) -> Link:
        link = self.cluster.inter_node if crosses else self.cluster.intra_node
        if link is None:
            level = "inter_node" if crosses else "intra_node"
            raise MissingLink(f"cluster.{level} has no bandwidth, and {axis} needs it")
        return link


def _ring(size: int, ranks: int, kind: str, link: Link, sharing: int) -> float:
    phases = 2 if kind == "all_reduce" else 1
    transfer = ring_bytes(size, ranks, phases=phases) / (link.bandwidth / sharing)
    return transfer + phases * (ranks - 1) * link.latency
