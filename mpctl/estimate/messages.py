"""Every message that a rank takes part in during one training step, in bytes of whole messages.

What a product sends follows from the contraction law (operators/table.py). Full recomputation runs
a block's forward again in backward, up to the last tensor that backward asks for: with dropout all
of it, without all but the last row product's reduction. Besides the products: the loss (three
all-reduces of one float32 a token), the kv heads that fewer ranks own than need them, keys and
values over cp (arXiv 2205.05198; kernels/context.py), gradients over dp and cp, bucket by bucket
(layout/buckets.py), those that are partial under sequence parallelism over tp after, the square of
the gradient's norm over tp and pp, and a status over the world (loss, stop, memory). Between stages
of a pipeline (pipeline.py) each tensor is one send, counted by its sender, and a parameter that
several stages hold is one all-reduce, counted by all of them.

Of a bucket of N bytes over its replicas, padded, m micro batches (arXiv 1910.02054, section 7):
ZeRO 0 all-reduces N; 1 reduce-scatters N and gathers the parameters; 2 scatters in each micro batch
and gathers once; 3 scatters and gathers twice in each, forward and, where gradients pass, backward.
From 1 on, what follows it is of a slice, and the norm's square is summed over the replicas too.

Where parameters are frozen, backward sends what operators/grad_flow.py leaves of it. A layer that
computes no gradient is not recomputed, and its kept input is not gathered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from math import prod

from mpctl.estimate.communication import local_sizes, message_bytes
from mpctl.estimate.p2p import hand_overs
from mpctl.layout.buckets import Bucket
from mpctl.layout.job_layout import JobLayout
from mpctl.layout.limits import STATUS_FIELDS
from mpctl.operators.grad_flow import GradFlow
from mpctl.operators.matmul import AttentionOp, GradNeeds, LayerStack, MatMul
from mpctl.operators.table import StageSlice
from mpctl.spec.job import JobSpec
from mpctl.units import DTYPE_BYTES

LOSS_ALL_REDUCES = 3  # maximum, target logit, sum of exponentials
STATUS_BYTES = 8  # float64: the gradient norm's square; a step's status, a slot a rank
NOTHING = GradNeeds(False, False, False)
Sent = list[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class Message:
    """`count` equal messages a step, each of `bytes`, by one rank over one axis."""

    axis: str
    kind: str
    what: str
    bytes: int
    count: int


def step_messages(layout: JobLayout) -> list[tuple[Message, ...]]:
    """Messages of one rank of each stage in one step; a group of one rank sends nothing."""
    between = _between_stages(layout)
    return [
        tuple(
            sent(
                layout,
                chain(
                    *(_all_passes(layout, part) for part in layout.stage_slices(stage)),
                    between[stage],
                    _of_buckets(layout, layout.buckets(stage)),
                    _once_a_step(layout),
                ),
            )
        )
        for stage in range(len(layout.stages))
    ]


def sent(layout: JobLayout, messages: Iterable[Message]) -> Iterator[Message]:
    """Those of the messages whose group has more than one rank."""
    sizes = layout.group_sizes
    return (message for message in messages if message.count and sizes[message.axis] > 1)


def _all_passes(layout: JobLayout, part: StageSlice) -> Iterator[Message]:
    """Messages of all micro batches of a step within a part of a stage."""
    return _times(pass_messages(layout, part), layout.num_microbatches)


def pass_messages(
    layout: JobLayout, part: StageSlice, *, forward_only: bool = False
) -> Iterator[Message]:
    """Messages of one micro batch within a part of a stage. A forward alone is a pass in which
    nothing is trained."""
    chosen = _forward if forward_only else _whole
    for layers, flow in part.blocks:
        yield from _times(_block(layout, part.stack, chosen(flow)), layers)
    for end in part.ends:
        yield from _end(layout, chosen(end))


def _whole(flow: GradFlow) -> GradFlow:
    return flow


def _forward(flow: GradFlow) -> GradFlow:
    return GradFlow(flow.part, dict.fromkeys(flow.needs, NOTHING), (), after=False)


def _between_stages(layout: JobLayout) -> list[list[Message]]:
    """What each stage sends to its neighbours in a step."""
    sends: list[Counter[int]] = [Counter() for _ in layout.stages]
    for hand_over in hand_overs(layout):
        sends[hand_over.sender.stage].update(hand_over.sizes)
    m = layout.num_microbatches
    return [
        [Message("pp", "send", "stages", size, m * count) for size, count in sorted(sizes.items())]
        for sizes in sends
    ]


def _times(messages: Iterable[Message], count: int) -> Iterator[Message]:
    return (replace(message, count=message.count * count) for message in messages)


def _block(layout: JobLayout, stack: LayerStack, flow: GradFlow) -> Iterator[Message]:
    """Messages of one block and micro batch."""
    training = layout.job.training
    forward, backward = [], []
    for product in stack.block.products:
        ahead, back = _phases(layout, product, flow.needs[product.name])
        forward += ahead
        backward += back
    again = runs_again(layout, flow)
    sent = forward + backward
    if again:
        sent += forward if _runs_to_its_end(layout) else forward[:-1]
        kept = message_bytes(layout, ("batch", stack.seq, "hidden"))
        sent += [("all_gather", kept)] * training.partition_activations
    yield from _counted(sent, stack.title)
    for core in stack.cores:
        is_trained = flow.needs[core.key_product].y
        yield from _keys_and_values(layout, core, 1 + again, backwards=int(is_trained))


def runs_again(layout: JobLayout, flow: GradFlow) -> bool:
    """Whether backward runs the forward of a block again: where it asks for a tensor of it. The
    last product's own bias asks for none, the mask or the norm after it does."""
    if layout.job.training.recompute != "full":
        return False
    last = flow.needs[flow.part.products[-1].name]
    return flow.after if _runs_to_its_end(layout) else last.x or last.w


def _runs_to_its_end(layout: JobLayout) -> bool:
    """Whether backward asks for the last tensor of a block's forward: a mask, a norm's input."""
    return layout.job.training.dropout > 0 or layout.model.norm_order == "post"


def _phases(layout: JobLayout, product: MatMul, needs: GradNeeds) -> tuple[Sent, Sent]:
    """(kind, bytes) of what it sends over tp, forward and backward."""
    split = layout.job.parallel.sequence_parallel
    phases = product.collectives(sequence_parallel=split, needs=needs)
    if not (phases.forward or phases.backward):
        return [], []
    size = message_bytes(layout, product.message)
    return [(kind, size) for kind in phases.forward], [(kind, size) for kind in phases.backward]


def _counted(sent: Sent, what: str) -> Iterator[Message]:
    for (kind, size), count in sorted(Counter(sent).items()):
        yield Message("tp", kind, what, size, count)


def _keys_and_values(
    layout: JobLayout, core: AttentionOp, forwards: int, *, backwards: int
) -> Iterator[Message]:
    """Gathered forward, summed and scattered backward: over tp where it has more ranks than there
    are kv heads, over cp always."""
    job, model, sizes = layout.job, layout.model, local_sizes(layout)
    tp, cp, width = job.parallel.tp, job.parallel.cp, DTYPE_BYTES[job.training.dtype]
    head = 2 * sizes["batch"] * sizes[core.keys] * cp * model.head_size * width
    if tp > model.kv_heads:
        whole = head * model.kv_heads // cp
        yield Message("tp", "all_gather", "kv heads", whole, forwards)
        yield Message("tp", "reduce_scatter", "kv heads", whole, backwards)
    local = head * max(1, model.kv_heads // tp)
    yield Message("cp", "all_gather", "keys and values", local, forwards)
    yield Message("cp", "reduce_scatter", "keys and values", local, backwards)


def _end(layout: JobLayout, flow: GradFlow) -> Iterator[Message]:
    """One end of a stack and micro batch; logits bring their loss."""
    for product in flow.part.products:
        forward, backward = _phases(layout, product, flow.needs[product.name])
        yield from _counted(forward + backward, product.name)
        if "vocab" in product.writes:
            sizes = local_sizes(layout)
            width = max(4, DTYPE_BYTES[layout.job.training.dtype])  # float32 even for 16-bit logits
            rows = prod(sizes[dim] for dim in product.rows)
            yield Message("tp", "all_reduce", "loss", rows * width, LOSS_ALL_REDUCES)


def _of_buckets(layout: JobLayout, buckets: Iterable[Bucket]) -> Iterator[Message]:
    """What a step sends of a stage's gradients and, in slices, of its parameters; equal ones
    together."""
    found = Counter(part for bucket in buckets for part in _of_bucket(layout, bucket))
    for (axis, kind, what, size), count in found.items():
        yield Message(axis, kind, what, size, count)


def _of_bucket(layout: JobLayout, bucket: Bucket) -> Iterator[tuple[str, str, str, int]]:
    """(axis, kind, what, bytes) of each of its messages."""
    training, zero, parts = layout.job.training, layout.zero_stage, layout.replicas
    width = DTYPE_BYTES[training.reduced_dtype]
    passes = layout.num_microbatches * len(bucket.chunks)
    own = bucket.part(parts) if zero else bucket.numel
    if bucket.is_trained:
        kind, whole = ("reduce_scatter", own * parts) if zero else ("all_reduce", own)
        yield from [("dp", kind, "gradients", whole * width)] * (passes if zero >= 2 else 1)
        if bucket.is_partial:
            yield "tp", "all_reduce", "partial gradients", own * width
        if bucket.is_shared:
            yield "pp", "all_reduce", "shared parameters", own * width
    gathers = passes * (1 + bucket.goes_back) if zero == 3 else int(zero > 0)
    size = own * parts * DTYPE_BYTES[training.dtype]
    yield from [("dp", "all_gather", "parameters", size)] * gathers


def forward_bucket(layout: JobLayout, bucket: Bucket) -> Iterator[Message]:
    """What one micro batch's forward gathers of a bucket's parameters: at ZeRO 3 all of it, once in
    each chunk that uses it, else nothing."""
    if layout.zero_stage == 3:
        size = bucket.padded(layout.replicas) * DTYPE_BYTES[layout.job.training.dtype]
        yield Message("dp", "all_gather", "parameters", size, len(bucket.chunks))


def _once_a_step(layout: JobLayout) -> Iterator[Message]:
    for axis in ("dp", "tp", "pp") if layout.zero_stage else ("tp", "pp"):
        yield Message(axis, "all_reduce", "gradient norm", STATUS_BYTES, 1)
    yield status_message(layout.job)


def status_message(job: JobSpec) -> Message:
    """What all ranks tell each other once a step, and once a validated corpus."""
    slots = STATUS_FIELDS + job.world_size
    return Message("world", "all_reduce", "status", slots * STATUS_BYTES, 1)
