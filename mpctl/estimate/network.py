"""How long a message takes over the links that its group spans.

A ring sends (t-1)/t of a message from every rank in each phase; an all-reduce has two phases, a
gather or a scatter one. A broadcast or a reduction passes a whole message along the ring in pieces,
so that its bytes cross every link once, one behind the other. Of a group that leaves its NVLink
domain (its node, where no domain spans several), g ranks lie in each: rings enter and leave a
domain once, through as much of its nodes' cards as the groups that share them leave to this one,
the part of g of its ranks. Each level of the fabric that the group leaves is another such border,
whose bandwidth is that of the cards under it over its oversubscription. The slowest link sets the
pace; where any group of an axis leaves a network, all count as such. Latency: `start`, a step of
the ring inside a domain for each rank and between domains for each domain, and a level's own for
each of its networks; an all-reduce over many domains goes up and down a tree (NCCL's double binary
one) where that is shorter, and may be faster where switches add up (`all_reduce`). On some networks
large groups reach less of it than those of two domains (`decay`). From stage to stage a message
crosses one link, which the ranks of a stage on one node share.

By hand, 1 MB over 10 GB/s and 5 us from a stage to the next: 105 us in a node, 4 x 100 + 5 us from
a node of 4 ranks of that stage. An all-reduce of 8 MB by 8 ranks in a node at 100 GB/s and 1 us:
2 x 7/8 x 80 + 14 x 1 = 154 us. 8 nodes of 4 with 40 GB/s of cards each, one rank of a group on
each: a rank has 10 GB/s. Under leaves of 4 nodes, of which 1/8 leaves (oversubscription 8), 4 ranks
of the group share 4 x 10/8 = 5 GB/s, and the ring goes at that pace; with 1/4 it would not notice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import log2

from mpctl.axes import AXIS_NAMES
from mpctl.estimate.message import Message, bus_factor, ring_phases
from mpctl.layout.link_levels import LinkLevel, Span, find_span, topology_levels
from mpctl.spec.cluster import ClusterSpec, InnerLinkSpec, LinkSpec
from mpctl.topology import Group, Topology

# The axes of a group whose name in plans is not an axis: `dp` is over the replicas, dp x cp.
GROUP_AXES: dict[str, tuple[str, ...]] = {"dp": ("dp", "cp"), "world": AXIS_NAMES}


class MissingLink(LookupError):
    """A message needs a link whose bandwidth is not known; says which."""


@dataclass(frozen=True, slots=True)
class Route:
    """How a collective of the groups of one axis goes.

    ranks: of a group; domains: that a group spans; seconds_per_byte: of the slowest link of a ring;
    start: seconds before the first byte; inside, between: seconds of latency of a step of the ring
    within a domain and from one to the next; reducing: an all-reduce's bandwidth over that of
    others; above: of each level of the fabric that the group leaves, how many of its networks it
    spans and the seconds that leaving one adds.
    """

    ranks: int
    domains: int
    seconds_per_byte: float
    start: float
    inside: float
    between: float
    reducing: float = 1.0
    above: tuple[tuple[int, float], ...] = ()

    def collective(self, kind: str, size: float) -> float:
        """Seconds of one collective of `size` bytes over this route."""
        if self.ranks == 1:
            return 0.0
        phases = ring_phases(kind)
        sent = bus_factor(kind, self.ranks) * size * self.seconds_per_byte
        sent /= self.reducing if phases == 2 else 1.0
        hops = self.domains if self.domains > 1 else 0  # a ring of t ranks in one has t - 1 steps
        inner = (self.ranks - self.domains) * self.inside
        ring = phases * (inner + hops * self.between + sum(n * more for n, more in self.above))
        return sent + self.start + (min(ring, self._tree) if phases == 2 else ring)

    @property
    def _tree(self) -> float:
        inside = (self.ranks // self.domains - 1) * self.inside
        above = sum(log2(n) * more for n, more in self.above)
        return 2 * (inside + log2(self.domains) * self.between + above)


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
        return link is not None and link.multicast and self.route(axis).domains == 1

    @cached_property
    def _routes(self) -> dict[str, Route]:
        return {}

    @cached_property
    def _levels(self) -> tuple[LinkLevel, ...]:
        return topology_levels(self.cluster, self.topology)

    def _find(self, axis: str) -> Route:
        axes = GROUP_AXES.get(axis, (axis,))
        ranks = self.topology.group_size(*axes)
        if ranks == 1:
            return Route(1, 1, 0.0, 0.0, 0.0, 0.0)
        spans = [find_span(self.topology, axes, level.ranks) for level in self._levels]
        return self._route(axis, ranks, spans)

    def _route(self, axis: str, ranks: int, spans: Sequence[Span]) -> Route:
        """The route of groups that lie so in the networks of each level."""
        domains, together = spans[0].networks, spans[0].together
        inner = self._inner(axis) if together > 1 else None
        outer = self._link(axis) if domains > 1 else None
        paces = (
            [_direct(inner, together - 1) / (inner.bandwidth * inner.efficiency)] if inner else []
        )
        if outer:
            paces += self._paces(outer, ranks, spans)
        slowest = outer or inner
        assert slowest is not None, "a group of two ranks has a link"
        above = list(zip(self._levels, spans, strict=True))[1:]
        return Route(
            ranks, domains, max(paces), slowest.start,
            inner.latency if inner else 0.0, outer.latency if outer else 0.0, slowest.all_reduce,
            tuple((span.networks, level.latency) for level, span in above if span.networks > 1),
        )  # fmt: skip

    def _paces(self, outer: LinkSpec, ranks: int, spans: Sequence[Span]) -> Iterator[float]:
        """Seconds a byte out of the domain, and out of each network of the fabric that groups of so
        many ranks leave: what the groups that share its nodes' cards leave to one."""
        speed = outer.bandwidth * outer.efficiency
        domain = min(self._levels[0].ranks, self.topology.world_size)
        nodes = max(1, domain // self.topology.gpus_per_node)
        crowd = max(1.0, ranks / (2 * domain)) ** outer.decay
        yield max(1.0, domain / spans[0].together) * crowd / (speed * nodes)
        for level, span in zip(self._levels[1:], spans[1:], strict=True):
            if span.networks > 1:
                yield level.oversubscription * self._used * crowd / (span.together * speed)

    @property
    def _used(self) -> int:
        """Ranks of a node."""
        return min(self.topology.gpus_per_node, self.topology.world_size)

    def _sum_over(self, stages: Collection[int], size: float) -> float:
        """Seconds of an all-reduce by the ranks of a pipeline at these stages."""
        networks = [self._networks(stages, level) for level in self._levels]
        spans = [Span(n, len(stages) if n == 1 else 1) for n in networks]
        return self._route("pp", len(stages), spans).collective("all_reduce", size)

    def _send(self, stages: Collection[int], size: float) -> float:
        """Seconds of a message from one stage to another, over one link that the ranks of a stage
        on one node share, and out of each network of the fabric that lies between."""
        domain, *fabric = self._levels
        if self._networks(stages, domain) == 1:
            inner = self._inner("pp")
            pace = _direct(inner, 1) / (inner.bandwidth * inner.efficiency)
            return size * pace + inner.latency + inner.start
        link = self._link("pp")
        speed, stride = link.bandwidth * link.efficiency, self.topology.strides["pp"]
        paces = [min(self.topology.gpus_per_node, stride) / speed]  # ranks of a stage on a node
        latency = link.latency
        for level in fabric:
            if self._networks(stages, level) > 1:
                shared = min(level.ranks, stride) / level.ranks * self._used
                paces.append(level.oversubscription * shared / speed)
                latency += level.latency
        return size * max(paces) + latency + link.start

    @cached_property
    def _pipeline(self) -> Group:
        """The ranks of one pipeline, of one that leaves its domain where any does."""
        first, domain = self.topology.group(0, "pp"), self._levels[0].ranks
        if first[0] // domain != first[-1] // domain:
            return first  # of a large world the others need not be looked at
        shown, _ = self.topology.straddling("pp", domain)
        return shown[0] if shown else first

    @property
    def pipelines_cross_nodes(self) -> bool:
        """Whether the stages of a pipeline lie on several nodes."""
        first, last = self._pipeline[0], self._pipeline[-1]
        return self.topology.node(first) != self.topology.node(last)

    def _networks(self, stages: Collection[int], level: LinkLevel) -> int:
        """Networks of a level that the pipeline's ranks at these stages lie in."""
        return len({self._pipeline[stage] // level.ranks for stage in stages})

    def _inner(self, axis: str) -> InnerLinkSpec:
        if self.cluster.intra_node is None:
            raise MissingLink(f"cluster.intra_node has no bandwidth, and {axis} needs it")
        return self.cluster.intra_node

    def _link(self, axis: str) -> LinkSpec:
        if self.cluster.inter_node is None:
            raise MissingLink(f"cluster.inter_node has no bandwidth, and {axis} needs it")
        return self.cluster.inter_node


def _direct(link: InnerLinkSpec, peers: int) -> float:
    """How many times less than the link's bandwidth a rank has to so many peers: without a switch
    each has its own link."""
    return link.direct_links / min(peers, link.direct_links) if link.direct_links else 1.0
