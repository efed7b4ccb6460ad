"""What one layer of a model takes on one rank for one micro batch, forward and backward.

From the same operator table, list of messages and prices as the plan: FLOP, bytes of parameters, of
what forward saves and of what is sent, and how many collectives that is. Bytes sent are those of
rings, on the average rank: of a message of t ranks (t-1)/t for each phase, of which an all-reduce
has two. A collective of t ranks takes t - 1 hops for each phase, one after the other.

By hand, tp 2 in 1d, two all-reduces of 3 MiB forward and two backward: 4 collectives of 2 hops, and
4 x 2 x 1/2 x 3 = 12 MiB sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mpctl.collectives import get_collective, sent_by_rank
from mpctl.estimate.activation_shapes import activation_shapes
from mpctl.estimate.flops import block_flops
from mpctl.estimate.kernels import MissingFigure
from mpctl.estimate.layer_messages import LayerMessages
from mpctl.estimate.message import Message, MessageCount
from mpctl.estimate.network import MissingLink
from mpctl.estimate.saved_activations import layer_activations
from mpctl.estimate.time import get_clock
from mpctl.layout.job_layout import JobLayout
from mpctl.operators.grad_flow import GradFlow
from mpctl.operators.matmul import LayerStack


@dataclass(frozen=True)
class LayerFigures:
    """One layer, micro batch and rank.

    flops: forward and backward, with what is recomputed. parameter_bytes, saved_bytes: of
    parameters, and of what forward leaves for backward. sent_bytes: over rings between the
    tensor-parallel ranks; traffic: bytes of whole messages by group and kind, `col broadcast`.
    collectives: how many; hops: steps of their rings, one after the other. tensor_seconds: of those
    messages, as far as no computation hides them; None where they cannot be timed.
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
    saved = layer_activations(shapes, flow.cores).saved
    messages = LayerMessages(layout, layout.profile).block(stack, flow)
    between = [message for message in messages if message.axis != "cp"]
    numel = sum(weight.local_numel(layout.grid) for weight in flow.part.weights)
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
    message to one other rank is sent whole."""
    return sum(m.count * sent_by_rank(m.kind, m.bytes, ranks[m.axis]) for m in messages)


def _by_kind(messages: Iterable[Message]) -> dict[str, int]:
    sizes: Counter[str] = Counter()
    for message in messages:
        sizes[f"{message.axis} {message.kind}"] += message.bytes * message.count
    return dict(sorted(sizes.items()))


def _tensor_seconds(layout: JobLayout) -> float | None:
    try:
        work = get_clock(layout).operators.block(*_first(layout))
    except (MissingFigure, MissingLink):
        return None
    return work.tp_forward + work.tp_backward
