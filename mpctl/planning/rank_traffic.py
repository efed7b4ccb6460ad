"""Bytes that each rank sends to each other rank in a step, by axis.

A collective counts as a ring of its t ranks: each sends the next 2 (t-1)/t of an all-reduce and
(t-1)/t of any other, of a broadcast or a reduction on average; a library may choose a tree for
small messages. An all-to-all sends 1/t to every other rank.

By hand, an all-reduce of 8 MiB by 2 ranks: each sends the other 8 MiB.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from mpctl.axes import AXIS_NAMES
from mpctl.collectives import get_collective, sent_by_rank
from mpctl.estimate.job import Estimate
from mpctl.estimate.message import MessageCount
from mpctl.estimate.network import GROUP_AXES
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
                axis = message.axis if message.axis in AXES else "tp"
                group = _group(estimate, topology, rank, message)
                for receiver, sent in sent_to(message.kind, message.bytes, group, rank):
                    traffic[rank, receiver][axis] += message.count * sent
    _add_pipeline(traffic, estimate, topology)
    return traffic


def sent_to(kind: str, size: int, group: Sequence[int], rank: int) -> Iterator[tuple[int, float]]:
    """The ranks of a group to which `rank` sends parts of a collective's message of `size` bytes,
    with the bytes. Raises ValueError for an unknown kind.

    >>> list(sent_to("all_to_all", 8, [0, 4, 8, 12], 4)), list(sent_to("all_gather", 8, [0, 4], 4))
    ([(0, 2.0), (8, 2.0), (12, 2.0)], [(0, 4)])
    """
    if get_collective(kind).pattern == "peers":
        yield from ((peer, size / len(group)) for peer in group if peer != rank)
    else:
        following = group[(group.index(rank) + 1) % len(group)]
        yield following, sent_by_rank(kind, size, len(group))


def _group(
    estimate: Estimate, topology: Topology, rank: int, message: MessageCount
) -> Sequence[int]:  # fmt: skip
    """The ranks that the message is sent between."""
    group = topology.group(rank, *GROUP_AXES.get(message.axis, (message.axis,)))
    if message.what == "shared parameters":
        holders = [s for s, messages in enumerate(estimate.messages) if message in messages]
        return [group[stage] for stage in holders]
    return group


def _add_pipeline(traffic: RankTraffic, estimate: Estimate, topology: Topology) -> None:
    """Add what pipeline stages send each other: hidden states and their gradients."""
    first_stage = topology.group(0, *(axis for axis in AXIS_NAMES if axis != "pp"))
    stride = topology.strides["pp"]
    for (sender, receiver), size in handed_over(estimate.layout).items():
        for rank in first_stage if size else ():
            pair = rank + sender.stage * stride, rank + receiver.stage * stride
            traffic[pair]["pp"] += estimate.layout.num_microbatches * size
