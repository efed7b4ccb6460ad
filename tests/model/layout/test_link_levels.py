"""NVLink domains over several nodes, and the networks above them: which ranks are in which."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpctl.core.topology import Topology
from mpctl.model.layout.link_levels import Span, domain_name, domain_nodes, find_span, link_levels
from mpctl.spec.cluster import ClusterSpec
from mpctl.spec.load import load_job

POD = {"name": "pod", "gpus": 576, "oversubscription": 4.0, "latency": 2e-6}


@given(nodes=st.integers(1, 600), most=st.integers(1, 40))
def test_a_job_takes_as_many_nodes_of_each_domain_where_more_than_half_of_one_divides_it(nodes: int, most: int) -> None:
    taken = domain_nodes(nodes, most)
    assert 1 <= taken <= most
    even = [n for n in range(1, most + 1) if nodes % n == 0 and (2 * n > most or n == nodes)]
    assert taken == (max(even) if even else most)


def test_levels_of_racks_of_72() -> None:
    """64 nodes of 4: 16 of the 18 nodes of each rack, four racks; 8 racks of 64 under a pod."""
    cluster = ClusterSpec.model_validate({"nvlink_domain": 72, "fabric": [POD]})
    domain, pod = link_levels(cluster, 64, 4)
    assert (domain.ranks, pod.ranks) == (64, 512)
    assert (pod.oversubscription, pod.latency) == (4.0, 2e-6)
    assert [level.ranks for level in link_levels(cluster, 16, 4)] == [64, 512]  # one rack
    assert [level.ranks for level in link_levels(ClusterSpec(), 4, 8)] == [8]


@pytest.mark.parametrize(
    ("cluster", "name"),
    [
        ("dgx-gb200", "NVLink domain"),
        ("dgx-h100", "NVLink domain"),
        ("l4-node", "node"),
        ("mi300x-node", "node"),
        ("this-machine", "node"),
        (None, "node"),
    ],
)
def test_a_domain_is_called_a_node_where_no_nvlink_joins_it(cluster: str | None, name: str) -> None:
    job = load_job(None, {"cluster": cluster} if cluster else {})
    assert domain_name(job.cluster) == name


@given(
    tp=st.sampled_from([1, 2, 4, 6]),
    cp=st.sampled_from([1, 2]),
    dp=st.sampled_from([1, 2, 3, 8]),
    pp=st.sampled_from([1, 2, 4]),
    ranks=st.sampled_from([1, 4, 8, 12, 64]),
    axes=st.sampled_from([("tp",), ("dp",), ("dp", "cp"), ("pp",), ("tp", "cp", "dp", "pp")]),
)
def test_a_span_is_that_of_the_ranks(tp: int, cp: int, dp: int, pp: int, ranks: int, axes: tuple[str, ...]) -> None:
    """Against every group, rank by rank; groups of one rank are in one network."""
    topology = Topology.of({"tp": tp, "cp": cp, "dp": dp, "pp": pp}, gpus_per_node=4)
    groups = topology.groups(*axes)
    found = find_span(topology, axes, ranks)
    networks = [len({rank // ranks for rank in group}) for group in groups]
    assert (found.networks > 1) == (max(networks) > 1)
    assert found.networks <= max(networks)
    assert found == Span(found.networks, -(-len(groups[0]) // found.networks))
