"""How long a message takes over the links that its group spans.

Seconds of a message of n bytes over a group of t ranks in d domains, g = t/d in each (a domain is a
node, or several that NVLink joins). B is the bandwidth of one rank inside a domain, C that of all
network cards of a domain's nodes, s the groups that share them (ranks of the domain over g); a and
b are the latencies inside of a domain and between two, `start` the time before the first byte. p
counts phases: 2 for an all-reduce, 1 for other collectives.

    ring           p (t-1)/t n x the slowest of 1/B, s/C  +  start + p ((t-d) a + d b)
    chain          n x the slowest of 1/B, s/C            +  start + (t-d) a + d b
    all-to-all     the longer of (g-1)/t n / B
                   and g (t-g)/t n x s/C                  +  start + (g-1) a + (t-g) b
    stage to stage n / B, or n x the stage's ranks on a node over its cards  +  start + a or b

A ring enters and leaves a domain once, whatever g is; in an all-to-all each of the g ranks sends
1/t of its message to each of the t-g ranks elsewhere. Inside of one domain d b is 0 and a ring has
t-1 steps. An all-reduce over many domains goes up and down a tree (NCCL's double binary one) where
that is shorter, and may be faster where switches add up (`all_reduce`). Each level of the fabric
that a group leaves is one more border, whose bandwidth is that of the cards under it over its
oversubscription, with a latency of its own. Where any group of an axis leaves a network, all groups
count as leaving it. On some networks large groups reach a smaller part of the bandwidth than groups
of two domains (`decay`). Where that was not measured, a byte takes 1 + (t - t2) / CROWD times as
long, t2 being the ranks of two domains: gradients go in buckets, and each of a ring's t - 1 steps
waits for the slowest of its links, so that seconds grow with the ranks and not with a power of
them (InternLM-7B from 32 to 1,024 GPUs).

By hand, 1 MB over 10 GB/s and 5 us from a stage to the next: 105 us in a node, 4 x 100 + 5 us from
a node of 4 ranks of that stage. An all-reduce of 8 MB by 8 ranks in a node at 100 GB/s and 1 us:
2 x 7/8 x 80 + 14 x 1 = 154 us. 8 nodes of 4 with 40 GB/s of cards each, one rank of a group on
each: a rank has 10 GB/s. Under leaves of 4 nodes, of which 1/8 leaves (oversubscription 8), 4 ranks
of the group share 4 x 10/8 = 5 GB/s, and the ring goes at that pace; with 1/4 it would not notice.
An all-to-all of 8 MB by 8 ranks on two nodes of 4: a rank sends 4 MB to the other node, 4 ranks
16 MB over 40 GB/s: 400 us, where a ring's 7 MB take 175; and 3 x 1 + 4 x 5 us of latency. With
CROWD 550, 566 ranks on nodes of 8: 1 + (566 - 16) / 550, so twice as long for a byte.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from math import log2
from typing import NamedTuple

from mpctl.core.axes import EXPERT_UNIONS, UNIONS
from mpctl.core.collectives import bus_factor, get_collective
from mpctl.core.topology import Group, Topology
from mpctl.model.layout.link_levels import LinkLevel, Span, find_span, topology_levels
from mpctl.plan.estimate.communication import Message
from mpctl.plan.estimate.system import MEASURED, System
from mpctl.spec.cluster import ClusterSpec, InnerLinkSpec, LinkSpec


class MissingLink(LookupError):
    """A message needs a link whose bandwidth is not known; the text names the link."""


class Route(NamedTuple):
    """How a collective of the groups of one axis goes.

    ranks: ranks of a group; domains: domains that a group spans; seconds_per_byte: of the slowest
    link of a ring; start: seconds before the first byte; inside, between: latency in seconds of a
    ring step within a domain and from one to the next; reducing: an all-reduce's bandwidth over
    that of others; above: for each level of the fabric that the group leaves, the number of
    networks it spans and the seconds that leaving one adds; exchange: for an all-to-all, seconds
    for each byte of its message inside of a domain and out of the slowest network, which go on at
    once, and the latency of its sends.
    """

    ranks: int
    domains: int
    seconds_per_byte: float
    start: float
    inside: float
    between: float
    reducing: float = 1.0
    above: tuple[tuple[int, float], ...] = ()
    exchange: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def collective(self, kind: str, size: float, outer: float = 1.0) -> float:
        """Seconds of one collective of `size` bytes over this route. outer: as in Message. Raises
        ValueError for any other kind: an unknown one, or a message from one rank to another."""
        phases, pattern = get_collective(kind)
        if pattern == "pair":
            raise ValueError(f"{kind!r} goes from one rank to another, and is no collective")
        if self.ranks == 1:
            return 0.0
        if pattern == "peers":
            within, across, latency = self.exchange
            return size * max(within, outer * across) + latency + self.start
        sent = bus_factor(kind, self.ranks) * size * self.seconds_per_byte
        sent /= self.reducing if phases == 2 else 1.0
        hops = self.domains if self.domains > 1 else 0  # a ring of t ranks in one has t - 1 steps
        inner = (self.ranks - self.domains) * self.inside
        ring = phases * (inner + hops * self.between + sum(n * more for n, more in self.above))
        return sent + self.start + (min(ring, self._tree) if phases == 2 else ring)

    def step(self, size: float) -> float:
        """Seconds in which every rank sends `size` bytes to the next one around the ring."""
        latency = self.between if self.domains > 1 else self.inside
        return size * self.seconds_per_byte + self.start + latency + sum(more for _, more in self.above)

    @property
    def _tree(self) -> float:
        inside = (self.ranks // self.domains - 1) * self.inside
        above = sum(log2(n) * more for n, more in self.above)
        return 2 * (inside + log2(self.domains) * self.between + above)


class _Border(NamedTuple):
    """A border that groups cross: each spans `networks` networks of a level, with `together` of its
    ranks in each. pace: seconds for each byte that a group sends out of one; latency: seconds that
    leaving adds."""

    networks: int
    together: int
    pace: float
    latency: float

    def exchanged(self, ranks: int) -> float:
        """Seconds for each byte of an all-to-all's message, of which each rank sends 1/t to each of
        the ranks outside."""
        return self.together * (ranks - self.together) / ranks * self.pace


class Network:
    """Prices messages over the links of a cluster, for one topology. system: what is assumed of a
    network that was not measured."""

    def __init__(self, cluster: ClusterSpec, topology: Topology, system: System = MEASURED) -> None:
        self.cluster, self.topology, self.system = cluster, topology, system
        self._routes: dict[str, Route] = {}
        self._prices: dict[tuple[str, str, int, tuple[int, ...], float], float] = {}

    def seconds(self, message: Message) -> float:
        """Seconds of a message, `count` of them one after the other. Raises MissingLink where a
        link that it crosses has no bandwidth."""
        key = message.axis, message.kind, message.bytes, message.stages, message.outer
        price = self._prices.get(key)
        if price is None:
            price = self._prices[key] = self._price(*key)
        return self.system.factor * message.count * price

    def _price(self, axis: str, kind: str, size: int, stages: tuple[int, ...], outer: float) -> float:
        if kind == "send":
            return self._send(stages, size)
        if stages:
            return self._sum_over(stages, size)
        if kind == "sendrecv":
            return self.route(axis).step(size)
        return self.route(axis).collective(kind, size, outer)

    def route(self, axis: str) -> Route:
        """The route of a group, by its name in plans: an axis, a union of several (dp_cp), world.
        Raises MissingLink where a link that it crosses has no bandwidth."""
        if axis not in self._routes:
            self._routes[axis] = self._find(axis)
        return self._routes[axis]

    @property
    def is_unmeasured(self) -> bool:
        """Whether ranks on several domains send over a network whose large groups nobody
        measured."""
        link, ranks = self.cluster.inter_node, self._levels[0].ranks
        return link is not None and link.decay is None and self.topology.world_size > ranks

    def multicasts(self, axis: str) -> bool:
        """Whether the groups of an axis are within switches that broadcast and add."""
        link = self.cluster.intra_node
        return link is not None and link.multicast and self.route(axis).domains == 1

    @cached_property
    def _levels(self) -> tuple[LinkLevel, ...]:
        return topology_levels(self.cluster, self.topology)

    def _find(self, axis: str) -> Route:
        axes = UNIONS.get(axis) or EXPERT_UNIONS.get(axis, (axis,))
        ranks = self.topology.group_size(*axes)
        if ranks == 1:
            return Route(1, 1, 0.0, 0.0, 0.0, 0.0)
        spans = [find_span(self.topology, axes, level.ranks) for level in self._levels]
        return self._route(axis, ranks, spans)

    def _route(self, axis: str, ranks: int, spans: Sequence[Span]) -> Route:
        domains, together = spans[0].networks, spans[0].together
        inner = self._intra_node(axis) if together > 1 else None
        outer = self._link(axis) if domains > 1 else None
        slowest = outer or inner
        assert slowest is not None, "a group of two ranks has a link"
        inside, borders = 0.0, list[_Border]()
        if inner:
            inside = _direct(inner, together - 1) / (inner.bandwidth * inner.efficiency)
        if outer:
            borders = list(self._borders(outer, ranks, spans))
        a, b = inner.latency if inner else 0.0, outer.latency if outer else 0.0
        exchange = (
            (together - 1) / ranks * inside,
            max((x.exchanged(ranks) for x in borders), default=0.0),
            (together - 1) * a
            + (ranks - together) * b
            + sum((ranks - border.together) * border.latency for border in borders),
        )
        return Route(
            ranks,
            domains,
            max(inside, *(border.pace for border in borders), 0.0),
            slowest.start,
            a,
            b,
            slowest.all_reduce,
            tuple((border.networks, border.latency) for border in borders[1:]),
            exchange,
        )

    def _borders(self, outer: LinkSpec, ranks: int, spans: Sequence[Span]) -> Iterator[_Border]:
        """The border of the domain, and of each network of the fabric that groups of `ranks` ranks
        leave. Groups that share network cards divide their bandwidth."""
        speed = outer.bandwidth * outer.efficiency
        domain = min(self._levels[0].ranks, self.topology.world_size)
        nodes = max(1, domain // self.topology.gpus_per_node)
        crowd = crowding(outer, ranks, 2 * domain)
        first = spans[0]
        pace = max(1.0, domain / first.together) * crowd / (speed * nodes)
        yield _Border(first.networks, first.together, pace, 0.0)
        for level, span in zip(self._levels[1:], spans[1:], strict=True):
            if span.networks > 1:
                pace = level.oversubscription * self._used * crowd / (span.together * speed)
                yield _Border(span.networks, span.together, pace, level.latency)

    @property
    def _used(self) -> int:
        return min(self.topology.gpus_per_node, self.topology.world_size)

    def _sum_over(self, stages: Collection[int], size: float) -> float:
        networks = [self._networks(stages, level) for level in self._levels]
        spans = [Span(n, len(stages) if n == 1 else 1) for n in networks]
        return self._route("pp", len(stages), spans).collective("all_reduce", size)

    def _send(self, stages: Collection[int], size: float) -> float:
        """Seconds of a message from one stage to another, over one link that the ranks of a stage
        on one node share, and out of each network of the fabric in between."""
        domain, *fabric = self._levels
        if self._networks(stages, domain) == 1:
            inner = self._intra_node("pp")
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
            return first  # in a large world this skips the search through the others
        shown, _ = self.topology.straddling("pp", domain)
        return shown[0] if shown else first

    @property
    def pipelines_cross_nodes(self) -> bool:
        """Whether the stages of a pipeline are on several nodes."""
        first, last = self._pipeline[0], self._pipeline[-1]
        return self.topology.node(first) != self.topology.node(last)

    def _networks(self, stages: Collection[int], level: LinkLevel) -> int:
        """Number of networks of a level that the pipeline's ranks at these stages span."""
        return len({self._pipeline[stage] // level.ranks for stage in stages})

    def _intra_node(self, axis: str) -> InnerLinkSpec:
        if self.cluster.intra_node is None:
            raise MissingLink(f"cluster.intra_node has no bandwidth, and {axis} needs it")
        return self.cluster.intra_node

    def _link(self, axis: str) -> LinkSpec:
        if self.cluster.inter_node is None:
            raise MissingLink(f"cluster.inter_node has no bandwidth, and {axis} needs it")
        return self.cluster.inter_node


CROWD = 550.0  # ranks; fitted to 11 systems, benchmarks/results/measurements.md "Systems that no preset knows"


def crowding(link: LinkSpec, ranks: int, near: int) -> float:
    """Factor on the seconds per byte of a group of `ranks` ranks relative to one of `near` ranks, those
    of two domains. From the link's `decay`, or if it states none, as in networks never measured."""
    if link.decay is None:
        return 1 + max(0, ranks - near) / CROWD
    return float(max(1.0, ranks / near) ** link.decay)


def _direct(link: InnerLinkSpec, peers: int) -> float:
    """Ratio of the link's bandwidth to that of a rank to `peers` peers: without a switch each peer has its own link."""
    return link.direct_links / min(peers, link.direct_links) if link.direct_links else 1.0


# ------------------------------------------------------------------------------
# Seconds that are added where ranks share too few cores.
#
# Ranks that wait leave their core to others, so the cores of a node are busy as long as any of its
# ranks has work. A step then ends neither before its slowest chain of work and messages nor before
# the cores have done the work of all ranks: T = max(chain, sum of work / cores).
#
# By hand, 4 stages on 2 cores, each with 1 s of work in a pipeline of 1.5 s: 4 / 2 = 2 s, of which
# 0.5 s is contention. With 4 cores it is 1.5 s and none.


def contention_seconds(works: Sequence[float], ranks_per_core: float, chain: float) -> float:
    """Seconds that a step takes longer than `chain`, which it takes where ranks have a core each.

    works: seconds of work of a rank of each stage, which all have as many ranks.

    >>> contention_seconds([1.0] * 4, 2.0, 1.5)
    0.5
    """
    if ranks_per_core == 1.0:
        return 0.0
    return max(ranks_per_core * sum(works) / len(works) - chain, 0.0)
