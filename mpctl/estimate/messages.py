"""Every collective that a rank takes part in during one training step, in bytes of whole messages.

What a product sends follows from the contraction law (families/table.py). Full recomputation runs a
block's forward again in backward, up to the last tensor that backward asks for: with dropout all of
it, without all but the last row product's reduction. Besides the products: the loss (three
all-reduces of one float32 a token), the kv heads that fewer ranks own than need them, keys and
values over cp (arXiv 2205.05198; kernels/context.py), gradients over dp and cp, once a step, those
that are partial under sequence parallelism over tp before, the square of the gradient's norm, and a
status over the world (loss, stop, memory).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from math import prod

from mpctl.estimate.communication import held_by, local_parameters, local_sizes, message_bytes
from mpctl.families.table import Core, Held, OperatorTable, Part, Product
from mpctl.spec.job import JobSpec
from mpctl.spec.model import Model
from mpctl.stages import Span
from mpctl.units import DTYPE_BYTES

LOSS_ALL_REDUCES = 3  # maximum, target logit, sum of exponentials
STATUS_BYTES = 8  # float64: the gradient norm's square; a step's status, a slot a rank
STATUS_FIXED = 2  # of which loss and stop are not a rank's own
Sent = list[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class Message:
    """`count` equal collectives a step, each of `bytes`, by one rank over one axis."""

    axis: str
    kind: str
    what: str
    bytes: int
    count: int


def step_messages(
    job: JobSpec, model: Model, table: OperatorTable, spans: list[Span], *, stage: int
) -> list[Message]:
    """Those of one rank of `stage`; a group of one sends nothing."""
    found = chain(
        *(_stack(job, model, held) for held in held_by(job, table, spans, stage=stage)),
        _once_a_step(job, table, spans, stage),
    )
    sizes = {**job.sizes, "dp": job.sizes["dp"] * job.sizes["cp"], "world": job.world_size}
    return [message for message in found if message.count and sizes[message.axis] > 1]


def _stack(job: JobSpec, model: Model, held: Held) -> Iterator[Message]:
    """Of all micro batches of a step."""
    m = job.num_microbatches
    yield from _times(_block(job, model, held), len(held.layers) * m)
    for part in held.ends:
        yield from _times(_end(job, model, part), m)


def _times(messages: Iterable[Message], count: int) -> Iterator[Message]:
    return (replace(message, count=message.count * count) for message in messages)


def _block(job: JobSpec, model: Model, held: Held) -> Iterator[Message]:
    """One block and micro batch."""
    stack, training = held.stack, job.training
    forward, backward = [], []
    for product in stack.block.products:
        ahead, back = _phases(job, model, product)
        forward += ahead
        backward += back
    again = training.recompute == "full"
    sent = forward + backward
    if again:
        sent += forward if _runs_to_its_end(job, model) else forward[:-1]
        kept = message_bytes(job, model, ("batch", stack.seq, "hidden"))
        sent += [("all_gather", kept)] * training.partition_activations
    yield from _counted(sent, stack.title)
    for core in stack.cores:
        yield from _keys_and_values(job, model, core, forwards=1 + again)


def _runs_to_its_end(job: JobSpec, model: Model) -> bool:
    """Whether backward asks for the last tensor of a block's forward: a mask, a norm's input."""
    return job.training.dropout > 0 or model.norm_order == "post"


def _phases(job: JobSpec, model: Model, product: Product) -> tuple[Sent, Sent]:
    """(kind, bytes) of what it sends over tp, forward and backward."""
    phases = product.collectives(sequence_parallel=job.parallel.sequence_parallel)
    if not (phases.forward or phases.backward):
        return [], []
    size = message_bytes(job, model, product.message)
    return [(kind, size) for kind in phases.forward], [(kind, size) for kind in phases.backward]


def _counted(sent: Sent, what: str) -> Iterator[Message]:
    for (kind, size), count in sorted(Counter(sent).items()):
        yield Message("tp", kind, what, size, count)


def _keys_and_values(job: JobSpec, model: Model, core: Core, *, forwards: int) -> Iterator[Message]:
    """Gathered forward, summed and scattered backward: over tp where it has more ranks than there
    are kv heads, over cp always."""
    tp, cp, width = job.parallel.tp, job.parallel.cp, DTYPE_BYTES[job.training.dtype]
    sizes = local_sizes(job, model)
    head = 2 * sizes["batch"] * sizes[core.keys] * cp * model.head_size * width
    if tp > model.kv_heads:
        whole = head * model.kv_heads // cp
        yield Message("tp", "all_gather", "kv heads", whole, forwards)
        yield Message("tp", "reduce_scatter", "kv heads", whole, 1)
    local = head * max(1, model.kv_heads // tp)
    yield Message("cp", "all_gather", "keys and values", local, forwards)
    yield Message("cp", "reduce_scatter", "keys and values", local, 1)


def _end(job: JobSpec, model: Model, part: Part) -> Iterator[Message]:
    """One end of a stack and micro batch; logits bring their loss."""
    for product in part.products:
        forward, backward = _phases(job, model, product)
        yield from _counted(forward + backward, product.name)
        if "vocab" in product.writes:
            sizes = local_sizes(job, model)
            width = max(4, DTYPE_BYTES[job.training.dtype])  # float32 even for 16-bit logits
            rows = prod(sizes[dim] for dim in product.rows)
            yield Message("tp", "all_reduce", "loss", rows * width, LOSS_ALL_REDUCES)


def _once_a_step(
    job: JobSpec, table: OperatorTable, spans: list[Span], stage: int
) -> Iterator[Message]:
    width = DTYPE_BYTES[job.training.reduced_dtype]
    if job.parallel.sequence_parallel:
        partial = local_parameters(job, table, spans, stage=stage, replicated_only=True)
        yield Message("tp", "all_reduce", "partial gradients", partial * width, 1)
    local = local_parameters(job, table, spans, stage=stage)
    yield Message("dp", "all_reduce", "gradients", local * width, 1)
    yield Message("tp", "all_reduce", "gradient norm", STATUS_BYTES, 1)
    slots = STATUS_FIXED + job.world_size
    yield Message("world", "all_reduce", "status", slots * STATUS_BYTES, 1)
