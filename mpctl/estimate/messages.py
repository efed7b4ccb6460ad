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

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

from mpctl.estimate.communication import local_parameters, phi_bytes
from mpctl.families.table import OperatorTable, Product
from mpctl.spec.job import JobSpec
from mpctl.spec.model import Model
from mpctl.stages import Span
from mpctl.units import DTYPE_BYTES

LOSS_ALL_REDUCES = 3  # maximum, target logit, sum of exponentials
STATUS_BYTES = 8  # float64: the gradient norm's square; a step's status, a slot a rank
STATUS_FIXED = 2  # of which loss and stop are not a rank's own


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
    is_first, is_last = stage == 0, stage == job.parallel.pp - 1
    layers, m = sum(stop - start for start, stop in spans), job.num_microbatches
    found = chain(
        _times(_block(job, model, table), layers * m),
        _times(_ends(job, model, table.first if is_first else ()), m),
        _times(_ends(job, model, table.last if is_last else ()), m),
        _times(_loss(job, model), m if is_last else 0),
        _once_a_step(job, model, table, spans, stage),
    )
    sizes = {**job.sizes, "dp": job.sizes["dp"] * job.sizes["cp"], "world": job.world_size}
    return [message for message in found if message.count and sizes[message.axis] > 1]


def _times(messages: Iterable[Message], count: int) -> Iterator[Message]:
    return (replace(message, count=message.count * count) for message in messages)


def _block(job: JobSpec, model: Model, table: OperatorTable) -> Iterator[Message]:
    """One block and micro batch."""
    phi, training = phi_bytes(job, model), job.training
    phases = [_phases(job, product) for product in table.block]
    forward = [kind for forward, _ in phases for kind in forward]
    kinds = forward + [kind for _, backward in phases for kind in backward]
    again = training.recompute == "full"
    if again:
        kinds += forward if training.dropout else forward[:-1]
        kinds += ["all_gather"] * training.partition_activations
    yield from (Message("tp", kind, "blocks", phi, kinds.count(kind)) for kind in sorted({*kinds}))
    yield from _keys_and_values(job, model, forwards=1 + again)


def _phases(job: JobSpec, product: Product) -> tuple[tuple[str, ...], tuple[str, ...]]:
    phases = product.collectives(sequence_parallel=job.parallel.sequence_parallel)
    return phases.forward, phases.backward


def _keys_and_values(job: JobSpec, model: Model, *, forwards: int) -> Iterator[Message]:
    """Gathered forward, summed and scattered backward: over tp where it has more ranks than there
    are kv heads, over cp always."""
    tp, width = job.parallel.tp, DTYPE_BYTES[job.training.dtype]
    head = 2 * job.training.micro_batch_size * model.seq_length * model.head_size * width
    if tp > model.kv_heads:
        whole = head * model.kv_heads // job.parallel.cp
        yield Message("tp", "all_gather", "kv heads", whole, forwards)
        yield Message("tp", "reduce_scatter", "kv heads", whole, 1)
    local = head * max(1, model.kv_heads // tp)
    yield Message("cp", "all_gather", "keys and values", local, forwards)
    yield Message("cp", "reduce_scatter", "keys and values", local, 1)


def _ends(job: JobSpec, model: Model, products: Iterable[Product]) -> Iterator[Message]:
    phi = phi_bytes(job, model)
    for product in products:
        kinds = [kind for phase in _phases(job, product) for kind in phase]
        yield from (
            Message("tp", kind, product.name, phi, kinds.count(kind)) for kind in sorted({*kinds})
        )


def _loss(job: JobSpec, model: Model) -> Iterator[Message]:
    tokens = job.training.micro_batch_size * model.seq_length // job.parallel.cp
    width = max(4, DTYPE_BYTES[job.training.dtype])  # float32 even for 16-bit logits
    yield Message("tp", "all_reduce", "loss", tokens * width, LOSS_ALL_REDUCES)


def _once_a_step(
    job: JobSpec, model: Model, table: OperatorTable, spans: list[Span], stage: int
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
