"""Messages over several levels of links, by hand: NVLink domains, cards, leaves and pods."""

from __future__ import annotations

from collections import Counter
from itertools import permutations
from typing import Any

import pytest

from mpctl.core.collectives import Kind
from mpctl.model.layout.topology import job_topology
from mpctl.plan.estimate.communication import Message
from mpctl.plan.estimate.network import Network
from mpctl.spec.job import JobSpec, complete
from tests.jobs import job_of

INTRA = {"bandwidth": 100e9, "latency": 1e-6, "efficiency": 1.0}
INTER = {"bandwidth": 40e9, "latency": 5e-6, "efficiency": 1.0}
NODES = {"cluster.nodes": 8, "cluster.gpus_per_node": 4, "cluster.intra_node": INTRA, "cluster.inter_node": INTER}
MB = 1_000_000


def network(settings: dict[str, Any]) -> Network:
    job: JobSpec = complete(job_of({**NODES, **settings}))
    return Network(job.cluster, job_topology(job))


def leaf(gpus: int, oversubscription: float, latency: float = 0.0) -> list[dict[str, Any]]:
    return [{"name": "leaf", "gpus": gpus, "oversubscription": oversubscription, "latency": latency}]


def seconds(settings: dict[str, Any], axis: str, kind: Kind = "all_gather", mb: int = 8) -> float:
    return network(settings).seconds(Message(axis, kind, "", mb * MB))


def test_a_group_over_the_nodes_of_a_domain_goes_by_nvlink() -> None:
    """tp 8 over two nodes of 4: 8 MB x 7/8 at 100 GB/s and 7 steps of 1 us; without the domain,
    4 ranks a node have all of its 40 GB/s, 6 steps inside and 2 between."""
    assert seconds({"parallel.tp": 8, "cluster.nvlink_domain": 8}, "tp") == pytest.approx(77e-6)
    apart = {"parallel.tp": 8, "parallel.allow_tp_across_nodes": True}
    assert seconds(apart, "tp") == pytest.approx((175 + 6 + 10) * 1e-6)


def test_ranks_of_a_domain_share_the_cards_of_its_nodes() -> None:
    """dp 8 over tp 4 in domains of 16: four ranks of a group in each of two domains, whose four
    nodes have 160 GB/s, so 40 GB/s for each of its four groups: 8 MB x 7/8 / 40 GB/s = 175 us,
    6 steps of 1 us and 2 of 5 us. One rank of a group on each node has the same 10 GB/s."""
    dp = {"parallel.tp": 4, "cluster.nvlink_domain": 16}
    assert seconds(dp, "dp_cp") == pytest.approx((175 + 6 + 10) * 1e-6)
    assert seconds({"parallel.tp": 4}, "dp_cp") == pytest.approx((700 + 8 * 5) * 1e-6)


@pytest.mark.parametrize(("oversubscription", "gigabytes"), [(1, 10), (4, 10), (8, 5), (16, 2.5)])
def test_a_leaf_slows_a_ring_where_less_leaves_it_than_its_groups_send(
    oversubscription: float, gigabytes: float
) -> None:
    """Leaves of 4 nodes: a group's 4 ranks there share 4 x 10 GB/s over the oversubscription, and
    the ring leaves a leaf once."""
    settings = {"parallel.tp": 4, "cluster.fabric": leaf(16, oversubscription)}
    sent = 7 * MB / (gigabytes * 1e9)
    assert seconds(settings, "dp_cp") == pytest.approx(sent + 8 * 5e-6)


def test_leaving_a_leaf_adds_its_latency() -> None:
    """dp 8 spans 2 leaves: 2 x 3 us on a ring; a tree pays log2(2) of them, up and down."""
    settings = {"parallel.tp": 4, "cluster.fabric": leaf(16, 1.0, 3e-6)}
    assert seconds(settings, "dp_cp") == pytest.approx((700 + 8 * 5 + 2 * 3) * 1e-6)
    tree = 2 * (3 * 5 + 3)
    assert seconds(settings, "dp_cp", "all_reduce") == pytest.approx((1400 + tree) * 1e-6)


def test_stages_under_different_leaves_share_what_leaves_one() -> None:
    """pp 2 of 16 ranks a stage, a leaf each. On a node 4 ranks share 40 GB/s: 8 MB in 800 us. Out
    of a leaf with 1:4, 16 share 4 x 40 / 4 GB/s: four times that."""
    stages = Message("pp", "send", "", 8 * MB, stages=(0, 1))
    plain = {"parallel.tp": 4, "parallel.pp": 2}
    assert network(plain).seconds(stages) == pytest.approx(805e-6)
    leaves = {**plain, "cluster.fabric": leaf(16, 4.0, 2e-6)}
    assert network(leaves).seconds(stages) == pytest.approx(3207e-6)
    domain = {**plain, "cluster.nvlink_domain": 32}
    assert network(domain).seconds(stages) == pytest.approx(81e-6)


def test_without_a_switch_few_peers_have_few_links() -> None:
    """xGMI: 7 links make 100 GB/s. tp 2 has one of them, 8 MB / 2 at 14.3 GB/s; tp 8 all."""
    mesh = {"cluster.nodes": 1, "cluster.gpus_per_node": 8, "cluster.intra_node": {**INTRA, "direct_links": 7}}
    assert seconds({**mesh, "parallel.tp": 2}, "tp") == pytest.approx((280 + 1) * 1e-6)
    assert seconds({**mesh, "parallel.tp": 8}, "tp") == pytest.approx((70 + 7) * 1e-6)


def test_an_all_to_all_on_a_node_takes_as_long_as_a_gather() -> None:
    """8 MB by tp 4: a rank sends 2 MB to each of three others at 100 GB/s, in 3 sends of 1 us."""
    assert seconds({"parallel.tp": 4}, "tp", "all_to_all") == pytest.approx((60 + 3) * 1e-6)


def test_an_all_to_all_sends_every_part_over_the_border_on_its_own() -> None:
    """tp 8 on two nodes of 4: of its 8 MB a rank sends 4 x 1 MB to the other node, the node's four
    ranks 16 MB over 40 GB/s: 400 us; 3 sends inside and 4 across. A gather's ring crosses once."""
    settings = {"parallel.tp": 8, "parallel.allow_tp_across_nodes": True}
    assert seconds(settings, "tp", "all_to_all") == pytest.approx((400 + 3 + 4 * 5) * 1e-6)
    assert seconds(settings, "tp", "all_gather") == pytest.approx((175 + 6 + 2 * 5) * 1e-6)


def test_an_all_to_all_out_of_a_leaf_shares_what_leaves_it() -> None:
    """dp 8 over tp 4, leaves of 4 nodes at 1:8 and 3 us: of 8 MB a rank sends 7 MB out of its node
    at 10 GB/s, 700 us; four ranks of a group send 4 x 4 MB out of a leaf at 5 GB/s, 3200 us. 7
    sends of 5 us, four of which leave the leaf."""
    settings = {"parallel.tp": 4, "cluster.fabric": leaf(16, 8.0, 3e-6)}
    expected = (3200 + 7 * 5 + 4 * 3) * 1e-6
    assert seconds(settings, "dp_cp", "all_to_all") == pytest.approx(expected)


@pytest.mark.parametrize("axis", ["tp", "cp", "dp_cp"])
@pytest.mark.parametrize("order", ["tp-cp-dp-pp", "cp-dp-tp-pp", "dp-pp-tp-cp"])
def test_an_all_to_all_is_as_long_as_the_fullest_link(axis: str, order: str) -> None:
    """Every part of every group's message is put on the links that it crosses, rank by rank."""
    free = {"latency": 0.0}
    settings = {
        "parallel": {"tp": 4, "cp": 2, "pp": 2, "order": order, "allow_tp_across_nodes": True},
        "cluster.intra_node": INTRA | free,
        "cluster.inter_node": INTER | free,
        "cluster.fabric": leaf(8, 4.0),
    }
    found = network(settings)
    topology, links = found.topology, Counter[tuple[str, int]]()
    axes = ("dp", "cp") if axis == "dp_cp" else (axis,)
    for group in topology.groups(*axes):
        for source, target in permutations(group, 2):
            part = 8 * MB / len(group)
            if source // 4 == target // 4:
                links["rank", source] += part / 100e9
            else:
                links["node", source // 4] += part / 40e9
            if source // 8 != target // 8:
                links["leaf", source // 8] += part / (2 * 40e9 / 4)
    expected = pytest.approx(max(links.values()))
    assert found.seconds(Message(axis, "all_to_all", "", 8 * MB)) == expected
