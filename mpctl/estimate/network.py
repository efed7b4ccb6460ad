"""How long a message takes over the links that its group spans.

A ring sends (t-1)/t of a message from every rank in each phase; an all-reduce has two phases, a
gather or a scatter one. A broadcast or a reduction passes a whole message along the ring in pieces,
so that its bytes cross every link once, one behind the other. Of a group that leaves its node, g
ranks lie in each: rings enter and leave a node once, through as much of its network as the groups
that share the node leave to this one, the part of g of its ranks. The slower of the two links sets
the pace; where any group of an axis leaves its node, all count as such. Latency: `start`, and a
step of the ring inside a node for each rank and between nodes for each node; an all-reduce over
many nodes goes up and down a tree (NCCL's double binary one) where that is shorter, and may be
faster where switches add up (`all_reduce`). On some networks large groups reach less of it than
those of two nodes (`decay`). From stage to
stage a message crosses one link, which the ranks of a stage on one node share.

By hand, 1 MB over 10 GB/s and 5 us from a stage to the next: 105 us in a node, 4 x 100 + 5 us from
a node of 4 ranks of that stage. An all-reduce of 8 MB by 8 ranks in a node at 100 GB/s and 1 us:
2 x 7/8 x 80 + 14 x 1 = 154 us.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from math import log2

from mpctl.axes import AXIS_NAMES
from mpctl.estimate.message import Message, ring_phases
from mpctl.spec.cluster import ClusterSpec, LinkSpec
from mpctl.topology import Group, Topology

# The axes of a group whose name in plans is not an axis: `dp` is over the replicas, dp x cp.
GROUP_AXES: dict[str, tuple[str, ...]] = {"dp": ("dp", "cp"), "world": AXIS_NAMES}

PIPELINED = frozenset({"broadcast", "reduce"})  # all of a message crosses each link


class MissingLink(LookupError):
    """A message needs a link whose bandwidth is not known; says which."""


@dataclass(frozen=True, slots=True)
class Route:
    """How a collective of the groups of one axis goes.

    ranks: of a group; nodes: that a group spans; seconds_per_byte: of the slowest link of a ring;
    start: seconds before the first byte; inside, between: seconds of latency of a step of the ring
    within a node and from node to node; reducing: an all-reduce's bandwidth over that of others.
    """

    ranks: int
    nodes: int
    seconds_per_byte: float
    start: float
    inside: float
    between: float
    reducing: float = 1.0

    def collective(self, kind: str, size: float) -> float:
        """Seconds of one collective of `size` bytes over this route."""
        if self.ranks == 1:
            return 0.0
        phases = ring_phases(kind)
        share = 1.0 if kind in PIPELINED else phases * (self.ranks - 1) / self.ranks
        sent = share * size * self.seconds_per_byte
        sent /= self.reducing if phases == 2 else 1.0
        hops = self.nodes if self.nodes > 1 else 0  # a ring of t ranks in one node has t - 1 steps
        ring = phases * ((self.ranks - self.nodes) * self.inside + hops * self.between)
        return sent + self.start + (min(ring, self._tree) if phases == 2 else ring)

    @property
    def _tree(self) -> float:
        inside = (self.ranks // self.nodes - 1) * self.inside
        return 2 * (inside + log2(self.nodes) * self.between)


@dataclass(frozen=True)
class Network:
    """Prices messages over the links of a cluster, for one topology."""

    cluster: ClusterSpec
    topology: Topology

    def seconds(self, message: Message) -> float:
        """Seconds of a message, `count` of them one after the other. Raises MissingLink where a
        link that it crosses has no bandwidth."""
        return message.count * self._once(message)

    def _once(self, message: Message) -> float:
        if message.kind == "send":
            return self._send(message.stages, message.bytes)
        if message.stages:
            return self._sum_over(message.stages, message.bytes)
        return self.route(message.axis).collective(message.kind, message.bytes)

    def route(self, axis: str) -> Route:
        """The route of a group, by its name in plans: an axis or a union of several, dp for the
        replicas, world. Raises MissingLink where a link that it crosses has no bandwidth."""
        routes = self._routes
        if axis not in routes:
            routes[axis] = self._find(axis)
        return routes[axis]

    def multicasts(self, axis: str) -> bool:
        """Whether the groups of an axis lie within switches that broadcast and add."""
        link = self.cluster.intra_node
        return link is not None and link.multicast and self.route(axis).nodes == 1

    @cached_property
    def _routes(self) -> dict[str, Route]:
        return {}

    def _find(self, axis: str) -> Route:
        topology = self.topology
        axes = GROUP_AXES.get(axis, (axis,))
        ranks = topology.group_size(*axes)
        if ranks == 1:
            return Route(1, 1, 0.0, 0.0, 0.0, 0.0)
        if ranks == topology.world_size:
            return self._route(axis, ranks, topology.nodes, -(-ranks // topology.nodes))
        straddling = [topology.straddling(a) for a in axes if topology.group_size(a) > 1]
        group = topology.group(straddling[0][0][0][0] if straddling[0][1] else 0, *axes)
        nodes = len({topology.node(rank) for rank in group})
        if nodes == 1 and any(count for _, count in straddling):
            nodes = 2
        return self._route(axis, ranks, nodes, -(-ranks // nodes))

    def _route(self, axis: str, ranks: int, nodes: int, in_node: int) -> Route:
        """The route of groups that span so many nodes, with `in_node` ranks in each."""
        inner = self._link(axis, "intra_node") if in_node > 1 else None
        outer = self._link(axis, "inter_node") if nodes > 1 else None
        paces = [1 / (inner.bandwidth * inner.efficiency)] if inner else []
        if outer:
            sharing = max(1.0, self._used / in_node)
            crowd = max(1.0, ranks / (2 * self._used)) ** outer.decay
            paces.append(sharing * crowd / (outer.bandwidth * outer.efficiency))
        slowest = outer or inner
        assert slowest is not None, "a group of two ranks has a link"
        return Route(
            ranks, nodes, max(paces), slowest.start,
            inner.latency if inner else 0.0, outer.latency if outer else 0.0, slowest.all_reduce,
        )  # fmt: skip

    @property
    def _used(self) -> int:
        """Ranks of a node."""
        return min(self.topology.gpus_per_node, self.topology.world_size)

    def _sum_over(self, stages: Collection[int], size: float) -> float:
        """Seconds of an all-reduce by the ranks of a pipeline at these stages."""
        nodes = len({self.topology.node(self._pipeline[stage]) for stage in stages})
        in_node = len(stages) if nodes == 1 else 1
        return self._route("pp", len(stages), nodes, in_node).collective("all_reduce", size)

    def _send(self, stages: Collection[int], size: float) -> float:
        """Seconds of a message from one stage to another, over one link that the ranks of a stage
        on one node share."""
        crosses = self._are_apart(stages)
        link, sharing = self._link("pp", _level(crosses)), self._sharing if crosses else 1
        pace = sharing / (link.bandwidth * link.efficiency)
        return size * pace + link.latency + link.start

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
    def pipelines_cross_nodes(self) -> bool:
        """Whether the stages of a pipeline lie on several nodes."""
        first, last = self._pipeline[0], self._pipeline[-1]
        return self.topology.node(first) != self.topology.node(last)

    @property
    def _sharing(self) -> int:
        """Ranks of one stage on one node: as many as lie between neighbours of a pipeline."""
        return min(self.topology.gpus_per_node, self.topology.strides["pp"])

    def _link(self, axis: str, level: str) -> LinkSpec:
        link: LinkSpec | None = getattr(self.cluster, level)
        if link is None:
            raise MissingLink(f"cluster.{level} has no bandwidth, and {axis} needs it")
        return link


def _level(crosses: bool) -> str:
    return "inter_node" if crosses else "intra_node"
