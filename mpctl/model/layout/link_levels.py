"""Links between the ranks of a job: the NVLink domain, and the networks above its nodes' cards.

A *domain* is the GPUs that `cluster.intra_node` joins: those of a node, or `cluster.nvlink_domain`
of several nodes (72 over 18 trays of an NVL72). A job that needs several domains takes the same
number of nodes from each where it can (Slurm: --segment): the most that divide its nodes evenly and
are more than half a domain, else it fills them in order. Above are the levels of `cluster.fabric`,
innermost first: a leaf or rail group, a pod, a building. Ranks fill every level in order, so that
rank r is in network r // ranks of a level.

By hand: 64 nodes of 4 GPUs in domains of 72. 18 nodes a domain do not divide 64, 16 do: four
domains of 64 ranks. A leaf over 576 GPUs, 8 domains, holds 8 x 64 = 512 ranks.

>>> [domain_nodes(nodes, 18) for nodes in (2, 18, 20, 64, 37, 36)]
[2, 18, 10, 16, 18, 18]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mpctl.core.topology import Topology
from mpctl.spec.cluster import ClusterSpec


class LinkLevel(NamedTuple):
    """One level of links. ranks: of the job under one network of the level; oversubscription: the
    bandwidth of its nodes' cards over the bandwidth that leaves it; latency: seconds that leaving
    one adds."""

    name: str
    ranks: int
    oversubscription: float = 1.0
    latency: float = 0.0


class Span(NamedTuple):
    """Placement of groups in the networks of a level. networks: the number that a group spans; together:
    its most ranks in one."""

    networks: int
    together: int


def domain_nodes(nodes: int, most: int) -> int:
    """Nodes that a job of `nodes` has in each NVLink domain of `most` nodes."""
    if nodes <= most:
        return nodes
    return next((n for n in range(most, most // 2, -1) if nodes % n == 0), most)


def link_levels(cluster: ClusterSpec, nodes: int, per_node: int) -> tuple[LinkLevel, ...]:
    """The levels of a job on `nodes` nodes, the NVLink domain first, then those of the fabric.

    per_node: ranks on each node.
    """
    most = max(1, (cluster.nvlink_domain or per_node) // per_node)
    domain = domain_nodes(nodes, most) * per_node
    above = (
        LinkLevel(f.name, max(1, f.gpus // (most * per_node)) * domain, f.oversubscription, f.latency)
        for f in cluster.fabric
    )
    return (LinkLevel(domain_name(cluster), domain), *above)


def topology_levels(cluster: ClusterSpec, topology: Topology) -> tuple[LinkLevel, ...]:
    """The levels of the cluster that contain the ranks of a topology."""
    return link_levels(cluster, topology.nodes, topology.gpus_per_node)


def domain_name(cluster: ClusterSpec) -> str:
    """`NVLink domain`, or `node` where no NVLink is known to join its ranks."""
    link, device = cluster.intra_node, cluster.device
    named = link.name if link is not None else None
    if cluster.nvlink_domain is None and (device is None or device.kind != "cuda"):
        return "node"
    return "NVLink domain" if named is None or "nvlink" in named.lower() else "node"


def find_span(topology: Topology, axes: Sequence[str], ranks: int) -> Span:
    """Find how groups over these axes spread over networks of `ranks` ranks each; if any group leaves
    its network, all count as leaving it.

    >>> t = Topology.of({"tp": 2, "dp": 4, "pp": 2})
    >>> find_span(t, ["tp"], 4), find_span(t, ["dp"], 4), find_span(t, ["tp"], 3)
    (Span(networks=1, together=2), Span(networks=2, together=2), Span(networks=2, together=1))
    """
    size, world = topology.group_size(*axes), topology.world_size
    if size == world:
        networks = -(-world // ranks)
        return Span(networks, -(-size // networks))
    straddling = [topology.straddling(a, ranks) for a in axes if topology.group_size(a) > 1]
    if not straddling:
        return Span(1, 1)
    group = topology.group(straddling[0][0][0][0] if straddling[0][1] else 0, *axes)
    networks = len({rank // ranks for rank in group})
    if networks == 1 and any(count for _, count in straddling):
        networks = 2
    return Span(networks, -(-size // networks))


def shown_levels(cluster: ClusterSpec, topology: Topology) -> tuple[LinkLevel, ...]:
    """The levels beyond a node, innermost first: an NVLink domain of several nodes, and the fabric;
    none of them where each domain is a node and no fabric is named."""
    domain, *fabric = topology_levels(cluster, topology)
    several = (domain,) if domain.ranks > topology.gpus_per_node else ()
    return (*several, *fabric)


def find_holder(cluster: ClusterSpec, topology: Topology, kind: str) -> LinkLevel | None:
    """The innermost level, from nodes on, that contains every group of a kind; None where none
    does."""
    node = LinkLevel("node", topology.gpus_per_node)
    levels = (node, *shown_levels(cluster, topology))
    return next((level for level in levels if _holds(topology, kind, level.ranks)), None)


def _holds(topology: Topology, kind: str, ranks: int) -> bool:
    group = topology.group(0, *topology.kinds[kind])
    if group[-1] - group[0] >= ranks:  # a shortcut for large worlds
        return False
    return find_span(topology, topology.kinds[kind], ranks).networks == 1
