"""Bytes that each rank sends to each other rank in a step, by axis.

Every collective counts as a ring of its t ranks: each sends the next 2 (t-1)/t of an all-reduce and
(t-1)/t of any other, of a broadcast or a reduction on the average; a library may choose a tree for
small messages.

By hand, an all-reduce of 8 MiB by 2 ranks: each sends the other 8 MiB.
"""

from __future__ import annotations

from collections import defaultdict

from mpctl.axes import AXIS_NAMES
from mpctl.estimate.job import Estimate
from mpctl.estimate.message import MessageCount, ring_phases
from mpctl.estimate.timeline import handed_over
from mpctl.topology import Topology

AXES = (*AXIS_NAMES, "world")  # messages over a group of tp's grid count as tp's
RankTraffic = dict[tuple[int, int], dict[str, float]]  # (sender, receiver) -> bytes by axis


def rank_traffic(estimate: Estimate, topology: Topology) -> RankTraffic:
    """Bytes of one step by sender and receiver, and by axis, of the pairs that send anything."""
    traffic: RankTraffic = defaultdict(lambda: defaultdict(float))
    for rank in range(topology.world_size):
        stage = topology.coords(rank)["pp"]
        for message in estimate.messages[stage]:
            if message.kind != "send":
                receiver, sent = _ring(estimate, topology, rank, message)
                axis = message.axis if message.axis in AXES else "tp"
                traffic[rank, receiver][axis] += sent
    _add_pipeline(traffic, estimate, topology)
    return traffic


def _ring(
    estimate: Estimate, topology: Topology, rank: int, message: MessageCount
) -> tuple[int, float]:  # fmt: skip
    """The next rank of the group, and the bytes that go there."""
    axes = {"dp": ("dp", "cp"), "world": AXIS_NAMES}.get(message.axis, (message.axis,))
    group = list(topology.group(rank, *axes))
    if message.what == "shared parameters":
        holders = [s for s, messages in enumerate(estimate.messages) if message in messages]
        group = [group[stage] for stage in holders]
    share = ring_phases(message.kind) * (len(group) - 1) / len(group)
    receiver = group[(group.index(rank) + 1) % len(group)]
    return receiver, share * message.bytes * message.count


def _add_pipeline(traffic: RankTraffic, estimate: Estimate, topology: Topology) -> None:
    """Add what pipeline stages send each other: hidden states and their gradients."""
    first_stage = topology.group(0, *(axis for axis in AXIS_NAMES if axis != "pp"))
    stride = topology.strides["pp"]
    for (sender, receiver), size in handed_over(estimate.layout).items():
        for rank in first_stage if size else ():
            pair = rank + sender.stage * stride, rank + receiver.stage * stride
            traffic[pair]["pp"] += estimate.layout.num_microbatches * size
