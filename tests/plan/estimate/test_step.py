"""What messages of once a step add to it, what the host takes for a layer, and how links fall with
the ranks of a group."""

from __future__ import annotations

import pytest

from mpctl.model.layout.topology import job_topology
from mpctl.plan.estimate.communication import Message
from mpctl.plan.estimate.host_times import layer_host, pipeline_host
from mpctl.plan.estimate.network import Network
from mpctl.plan.estimate.step import closing_times, part_of_group
from mpctl.spec.runtime import HostCosts, OverlapShares
from tests.jobs import Settings, job_of

LINKS: Settings = {
    "cluster.nodes": 8,
    "cluster.gpus_per_node": 8,
    "cluster.intra_node.bandwidth": 800e9,
    "cluster.inter_node.bandwidth": 100e9,
    "cluster.inter_node.decay": 0.0,
}


def network(**settings: float) -> Network:
    job = job_of({**LINKS, **settings})
    return Network(job.cluster, job_topology(job))


def test_parameters_may_be_hidden_by_another_share_than_gradients() -> None:
    """64 replicas: 64/63 GB take a second to scatter or to gather. Without a separate share
    parameters overlap with the backward too, else with the next forward."""
    size = 64 * 10**11 // 63
    messages = [
        Message("dp_cp", "reduce_scatter", "gradients", size, 3, cover="last_backward"),
        Message("dp_cp", "all_gather", "parameters", size, cover="last_backward"),
    ]
    for gather, backward, forward, left in (
        (None, 5.0, 0.0, 0.8),
        (None, 2.0, 5.0, 2.0),
        (0.0, 5.0, 5.0, 1.6),
        (0.0, 2.0, 5.0, 2.0),
        (0.8, 2.0, 0.5, 1.5),
        (0.8, 2.0, 5.0, 1.2),
        (0.8, 5.0, 0.0, 1.6),
    ):
        shares = OverlapShares(tp=0, pp=0, dp=0.8, gather=gather)
        found = closing_times(messages, network(), shares, backward, forward)
        assert found.dp_cp == pytest.approx(left, rel=1e-6), (gather, backward, forward)


def test_large_groups_reach_less_and_switches_add_up() -> None:
    """64 ranks are four times those of two nodes: half as fast at decay 0.5, 16 are no slower."""
    decay = {"cluster.inter_node.decay": 0.5}
    for cp, times in ((64, 2.0), (16, 1.0)):
        plain, falls = (
            network(**{**more, "parallel.cp": cp, "parallel.dp": 64 // cp}).route("cp") for more in ({}, decay)
        )
        before, after = (r.collective("all_gather", 1e9) for r in (plain, falls))
        assert after == pytest.approx(times * before), cp
    fast = network(**{"cluster.inter_node.all_reduce": 2.0}).route("dp_cp")
    assert fast.collective("all_reduce", 1e9) == pytest.approx(fast.collective("all_gather", 1e9))


def test_the_host_s_time_of_a_layer_by_hand() -> None:
    host = HostCosts(layer=1e-3, split=0.5e-3, rank_in_pipeline=0.7e-3)
    assert (layer_host(host, 1), layer_host(host, 8)) == pytest.approx((1e-3, 1.5e-3))
    for tp, pp, more in ((8, 2, 5.6e-3), (1, 2, 0.0), (8, 1, 0.0), (4, 2, 2.8e-3)):
        settings = {**LINKS, "parallel.tp": tp, "parallel.pp": pp}
        job = job_of(settings)
        found = pipeline_host(host, job.parallel, Network(job.cluster, job_topology(job)))
        assert found == pytest.approx(more), (tp, pp)
    job = job_of({**LINKS, "cluster.nodes": 1, "parallel.tp": 4, "parallel.pp": 2})
    assert not pipeline_host(host, job.parallel, Network(job.cluster, job_topology(job)))


def test_messages_belong_to_the_part_of_their_group() -> None:
    """Experts' gradients to those over replicas, what their shards sum to ep, a grid's to tp."""
    parts = {
        "edp": "dp_cp",
        "edp_zero": "dp_cp",
        "edp_zero_replicas": "dp_cp",
        "zero": "dp_cp",
        "etp_ep": "ep",
        "ep": "ep",
        "etp": "tp",
        "row": "tp",
        "row-depth": "tp",
        "world": "world",
    }
    assert {group: part_of_group(group) for group in parts} == parts
    with pytest.raises(ValueError, match="group mine"):
        part_of_group("mine")
