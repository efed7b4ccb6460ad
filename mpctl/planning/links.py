"""The links of a plan in words and as JSON: NVLink domains, cards, and the fabric above them.

A plan whose domains are its nodes, on a cluster that names no fabric, has nothing to say here
beyond its nodes: `links_text` is empty, and pictures and tables stay as they are.
"""

from __future__ import annotations

from mpctl.layout.link_levels import LinkLevel, find_holder, shown_levels, topology_levels
from mpctl.planning.plan import Plan
from mpctl.planning.schemas import LinkEntry
from mpctl.spec.cluster import LinkSpec
from mpctl.topology import Topology
from mpctl.units import plural


def links_text(plan: Plan, topology: Topology) -> str:
    """`NVLink domains of 64 ranks (16 nodes), NVLink5 900 GB/s a GPU; between them InfiniBand 200
    GB/s a node; 2 pods of 512 ranks, 1:4 oversubscribed`."""
    cluster, shown = plan.job.cluster, shown_levels(plan.job.cluster, topology)
    if not shown:
        return ""
    domain, *fabric = topology_levels(cluster, topology)
    nodes = domain.ranks // topology.gpus_per_node
    size = f" ({plural(nodes, 'node')})" if nodes > 1 else ""
    parts = [f"{_count(topology, domain)} of {domain.ranks:,} ranks{size}"]
    parts[0] += _link_text(cluster.intra_node, "a GPU")
    if domain.ranks < topology.world_size and cluster.inter_node is not None:
        parts.append(f"between them{_link_text(cluster.inter_node, 'a node').removeprefix(',')}")
    parts += [
        f"{_count(topology, level)} of {level.ranks:,} ranks{over_text(level)}" for level in fabric
    ]
    return "; ".join(parts)


def over_text(level: LinkLevel) -> str:
    """`, 1:4 oversubscribed`, or nothing where all of the cards' bandwidth leaves the level."""
    over = level.oversubscription
    return f", 1:{over:g} oversubscribed" if over > 1 else ""


def find_holder_name(plan: Plan, topology: Topology, kind: str) -> str | None:
    """The innermost level that holds every group of a kind: `node`, `NVLink domain`, `pod`; None
    where the groups leave all of them."""
    holder = find_holder(plan.job.cluster, topology, kind)
    return None if holder is None else holder.name


def link_entries(plan: Plan, topology: Topology) -> list[LinkEntry]:
    """The levels of links, the node first: ranks under each network, how many there are, and what
    leaves one."""
    node = LinkLevel("node", topology.gpus_per_node)
    return [
        {
            "name": level.name,
            "ranks": level.ranks,
            "networks": -(-topology.world_size // level.ranks),
            "oversubscription": level.oversubscription,
            "latency_seconds": level.latency,
        }
        for level in (node, *shown_levels(plan.job.cluster, topology))
    ]


def _count(topology: Topology, level: LinkLevel) -> str:
    return plural(-(-topology.world_size // level.ranks), level.name)


def _link_text(link: LinkSpec | None, of: str) -> str:
    if link is None:
        return ""
    name = f" {link.name}" if link.name else ""
    return f",{name} {link.bandwidth / 1e9:,.4g} GB/s {of}"
