"""Bytes that ranks send: in one layer, and from each rank to each other rank in a step.

Bytes sent are those of rings, averaged over ranks: (t-1)/t of a message among t ranks for each
phase, of which an all-reduce has two; a library may choose a tree for small messages. A collective
of t ranks takes t - 1 hops for each phase, one after the other. An all-to-all sends 1/t to every
other rank.

By hand, tp 2 in 1d, two all-reduces of 3 MiB forward and two backward: 4 collectives of 2 hops, and
4 x 2 x 1/2 x 3 = 12 MiB sent.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from mpctl.core.axes import AXIS_NAMES, CP_GROUPS, MESSAGE_GROUPS, zero_groups
from mpctl.core.collectives import get_collective, sent_by_rank
from mpctl.core.topology import Topology
from mpctl.model.layout.job_layout import JobLayout
from mpctl.model.layout.link_levels import shown_levels
from mpctl.model.operators.grad_flow import GradFlow
from mpctl.model.operators.layer import LayerStack
from mpctl.plan.estimate.activation_shapes import activation_shapes
from mpctl.plan.estimate.communication import Message, MessageCount
from mpctl.plan.estimate.flops import block_flops
from mpctl.plan.estimate.job import Estimate
from mpctl.plan.estimate.kernels import MissingFigure
from mpctl.plan.estimate.layer_messages import LayerMessages
from mpctl.plan.estimate.network import MissingLink
from mpctl.plan.estimate.saved import layer_activations
from mpctl.plan.estimate.time import step_time_model
from mpctl.plan.estimate.timeline import handed_over
from mpctl.spec.cluster import ClusterSpec


class LayerFigures(NamedTuple):
    """One layer, micro batch and rank.

    flops: forward and backward, recomputation included. parameter_bytes, saved_bytes: of
    parameters, and of activations that forward saves for backward. sent_bytes: over rings between
    the tensor-parallel ranks; traffic: bytes of full messages by group and kind, `col broadcast`.
    collectives: their number; hops: steps of their rings, one after the other. tensor_seconds:
    exposed seconds of those messages; None where they cannot be timed.
    """

    flops: float
    parameter_bytes: int
    saved_bytes: int
    sent_bytes: float
    traffic: Mapping[str, int]
    collectives: int
    hops: int
    tensor_seconds: float | None


def layer_figures(layout: JobLayout) -> LayerFigures:
    """The figures of the first layer of the model."""
    stack, flow = _first(layout)
    shapes = activation_shapes(layout)
    saved = layer_activations(shapes, flow.part).saved
    messages = LayerMessages(layout, layout.profile).block(stack, flow)
    between = [message for message in messages if message.axis not in ("cp", *CP_GROUPS)]
    numel = sum(weight.local_numel(layout.views) for weight in flow.part.weights)
    ranks = layout.group_sizes
    return LayerFigures(
        flops=block_flops(layout, flow),
        parameter_bytes=numel * layout.job.training.value_bytes,
        saved_bytes=round(shapes.bytes_of(saved)),
        sent_bytes=sent_bytes(between, ranks),
        traffic=_by_kind(between),
        collectives=sum(message.count for message in between),
        hops=sum(m.count * get_collective(m.kind).phases * (ranks[m.axis] - 1) for m in between),
        tensor_seconds=_tensor_seconds(layout),
    )


def _first(layout: JobLayout) -> tuple[LayerStack, GradFlow]:
    """The model's first stack, and which gradients its first layer computes."""
    table = layout.table
    return table.stacks[0], table.flows[0].runs[0][1]


def sent_bytes(messages: Iterable[Message | MessageCount], ranks: Mapping[str, int]) -> float:
    """Bytes that a rank sends, on the average, where collectives are rings of so many ranks; a
    message to one other rank is sent in full."""
    return sum(m.count * sent_by_rank(m.kind, m.bytes, ranks[m.axis]) for m in messages)


def _by_kind(messages: Iterable[Message]) -> dict[str, int]:
    sizes: Counter[str] = Counter()
    for message in messages:
        sizes[f"{message.axis} {message.kind}"] += message.bytes * message.count
    return dict(sorted(sizes.items()))


def _tensor_seconds(layout: JobLayout) -> float | None:
    try:
        work = step_time_model(layout).operators.block(*_first(layout))
    except (MissingFigure, MissingLink):
        return None
    return work.tp_forward + work.tp_backward


AXES = (*MESSAGE_GROUPS, "world")  # messages over a group of tp's grid count as tp's
COUNTED_AS = {
    **dict.fromkeys(CP_GROUPS, "cp"),
    **{"etp": "ep", "ep": "ep", "etp_ep": "ep", "edp": "edp"},
    **{name: replicas for replicas in ("dp_cp", "edp") for name in zero_groups(replicas)},
}
"""Messages of experts count as of ep, in which tokens are sent to them, or of edp; those of groups
that replicas are cut into as of the replicas."""
RankTraffic = dict[tuple[int, int], dict[str, float]]  # (sender, receiver) -> bytes by axis


def traffic_axes(estimate: Estimate) -> tuple[str, ...]:
    """The axes by which the bytes of a step are counted: those of experts where there are some."""
    return (*AXES, "ep", "edp") if estimate.layout.job.has_experts else AXES


def axis_of(message: MessageCount) -> str:
    """The axis that a message counts for."""
    return message.axis if message.axis in AXES else COUNTED_AS.get(message.axis, "tp")


MOST_GROUPS = 256  # whose placement is counted; those of a large world repeat


class LevelBytes(NamedTuple):
    """Tokens sent to experts on ranks that are joined at this level of links, but not at a lower one.
    share: of all; bytes: per step, of one rank of the stage that sends most."""

    name: str
    share: float
    bytes: float


def dispatch_levels(estimate: Estimate, cluster: ClusterSpec, topology: Topology) -> list[LevelBytes]:
    """Bytes that are dispatched to experts and combined, forward and backward, by the level that
    they cross: those that stay on the rank, on its node, in its NVLink domain, in each network of
    the fabric, and the rest. Routing is taken as random: every rank of the group gets an equal
    part. Empty where no tokens are sent.

    By hand, groups of 16 ranks on nodes of 8: 1/16 stays on the rank, 7/16 on the node.
    """
    kind = "etp_ep" if estimate.layout.job.parallel.etp > 1 else "ep"
    sent = max(
        sum(m.bytes * m.count for m in messages if m.kind == "all_to_all" and m.axis == kind)
        for messages in estimate.messages
    )
    if not sent:
        return []
    levels = [("rank", 1), ("node", topology.gpus_per_node)]
    levels += [(level.name, level.ranks) for level in shown_levels(cluster, topology)]
    levels.append(("network", topology.world_size))
    counts: Counter[str] = Counter()
    for group in islice(topology.groups(kind), MOST_GROUPS):
        for name, ranks in levels:
            held = Counter(rank // ranks for rank in group)
            counts[name] += sum(count * count for count in held.values())
    found, below = list[LevelBytes](), 0
    for name, _ in levels:
        share = (counts[name] - below) / counts["network"]
        below = counts[name]
        if share:
            found.append(LevelBytes(name, share, share * sent))
    return found


def rank_traffic(estimate: Estimate, topology: Topology) -> RankTraffic:
    """Bytes of one step by sender and receiver, and by axis, of the pairs that send anything."""
    traffic: RankTraffic = defaultdict(lambda: defaultdict(float))
    for rank in range(topology.world_size):
        stage = topology.coords(rank)["pp"]
        for message in estimate.messages[stage]:
            if message.kind != "send":
                axis = axis_of(message)
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


def _group(estimate: Estimate, topology: Topology, rank: int, message: MessageCount) -> Sequence[int]:
    group = topology.group(rank, message.axis)
    if message.what == "shared parameters":
        holders = [s for s, messages in enumerate(estimate.messages) if message in messages]
        return [group[stage] for stage in holders]
    return group


def _add_pipeline(traffic: RankTraffic, estimate: Estimate, topology: Topology) -> None:
    """Add the messages between pipeline stages: hidden states and their gradients."""
    first_stage = topology.group(0, *(axis for axis in AXIS_NAMES if axis != "pp"))
    stride = topology.strides["pp"]
    for (sender, receiver), size in handed_over(estimate.layout).items():
        for rank in first_stage if size else ():
            pair = rank + sender.stage * stride, rank + receiver.stage * stride
            traffic[pair]["pp"] += estimate.layout.num_microbatches * size
