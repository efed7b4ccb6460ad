"""What the ranks send, derived from the operator table by the contraction law.

Φ is the volume of one phase (reduce-scatter or all-gather) of an all-reduce of the hidden states,
micro batch x seq x hidden x bytes. An all-reduce is 2Φ. A parallel layer (attention, or MLP)
all-reduces once forward and once backward, 4Φ; a block holds two: 8Φ (arXiv 1909.08053, fig. 4).
A ring sends 2(t-1)/t of each message from every rank.

Loss: three all-reduces of one float32 a token (maximum, target logit, sum of exponentials), never
the logits. Gradients: one all-reduce of a rank's parameters over dp, once a step. Besides, once a
step: the square of the gradient's norm over tp, and a status over the world (loss, stop, memory).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from mpctl.families.table import OperatorTable, Product
from mpctl.spec.job import JobSpec
from mpctl.spec.model import Model
from mpctl.stages import Span
from mpctl.units import DTYPE_BYTES

LOSS_ALL_REDUCES = 3  # maximum, target logit, sum of exponentials
LOSS_BYTES = 4  # each in float32
STATUS_BYTES = 8  # float64: the gradient norm's square; a step's status, a slot a rank
STATUS_FIXED = 2  # of which loss and stop are not a rank's own


@dataclass(frozen=True, slots=True)
class PartTraffic:
    """All-reduces of one parallel layer, forward and backward, for one micro batch."""

    all_reduces: int
    phi_bytes: int

    @property
    def volume_phi(self) -> int:
        return 2 * self.all_reduces

    @property
    def volume_bytes(self) -> int:
        return self.volume_phi * self.phi_bytes


@dataclass(frozen=True, slots=True)
class BlockTraffic:
    """One transformer block, one micro batch."""

    phi_bytes: int
    tp: int
    parts: dict[str, PartTraffic]

    @property
    def all_reduces(self) -> int:
        return sum(part.all_reduces for part in self.parts.values())

    @property
    def volume_phi(self) -> int:
        return sum(part.volume_phi for part in self.parts.values())

    @property
    def volume_bytes(self) -> int:
        return sum(part.volume_bytes for part in self.parts.values())

    @property
    def ring_bytes_per_rank(self) -> int | float:
        return ring_bytes(self.all_reduces * self.phi_bytes, self.tp)


@dataclass(frozen=True, slots=True)
class Message:
    """`count` equal collectives a step, each of `bytes`, by one rank over one axis."""

    axis: str
    kind: str
    what: str
    bytes: int
    count: int


def ring_bytes(message: int, ranks: int) -> int | float:
    """Bytes that each rank sends in a ring all-reduce: 2(t-1)/t of the message."""
    exact = 2 * (ranks - 1) * message
    return exact // ranks if exact % ranks == 0 else exact / ranks


def phi_bytes(job: JobSpec, model: Model) -> int:
    """One phase of one all-reduce of the hidden states, bytes."""
    seq = model.seq_length // job.parallel.cp
    batch = job.training.micro_batch_size
    return batch * seq * model.hidden * DTYPE_BYTES[job.training.dtype]


def block_traffic(job: JobSpec, model: Model, block: Iterable[Product]) -> BlockTraffic:
    """All-reduces over tp of one block, counted product by product."""
    tp, phi = job.parallel.tp, phi_bytes(job, model)
    counts: Counter[str] = Counter()
    for product in block:
        counts[product.part] += _tp_reductions(product) if tp > 1 else 0
    return BlockTraffic(phi, tp, {part: PartTraffic(n, phi) for part, n in counts.items()})


def _tp_reductions(product: Product) -> int:
    return [*product.forward_axes, *product.backward_axes].count("tp")


def step_messages(
    job: JobSpec, model: Model, table: OperatorTable, spans: list[Span], *, stage: int
) -> list[Message]:
    """Every collective that a rank of `stage` takes part in during one training step."""
    is_first, is_last = stage == 0, stage == job.parallel.pp - 1
    phi, m = phi_bytes(job, model), job.num_microbatches
    layers = sum(stop - start for start, stop in spans)
    blocks = block_traffic(job, model, table.block).all_reduces
    messages = [Message("tp", "all_reduce", "hidden states of blocks", phi, m * layers * blocks)]
    for held, products in ((is_first, table.first), (is_last, table.last)):
        for product in products if held and job.parallel.tp > 1 else ():
            count = m * _tp_reductions(product)
            messages.append(Message("tp", "all_reduce", product.name, phi, count))
    if is_last and job.parallel.tp > 1:
        tokens = job.training.micro_batch_size * model.seq_length // job.parallel.cp
        count = m * LOSS_ALL_REDUCES
        messages.append(Message("tp", "all_reduce", "loss", tokens * LOSS_BYTES, count))
    if job.parallel.tp > 1:
        messages.append(Message("tp", "all_reduce", "gradient norm", STATUS_BYTES, 1))
    if job.world_size > 1:
        slots = STATUS_FIXED + job.world_size
        messages.append(Message("world", "all_reduce", "status", slots * STATUS_BYTES, 1))
    if job.sizes["dp"] > 1:
        local = local_parameters(job, table, spans, stage=stage)
        size = local * DTYPE_BYTES[job.training.reduced_dtype]
        messages.append(Message("dp", "all_reduce", "gradients", size, 1))
    return [message for message in messages if message.count]


def local_parameters(job: JobSpec, table: OperatorTable, spans: list[Span], *, stage: int) -> int:
    """Parameters that one rank of a stage holds: those of its equal blocks and of its ends."""
    is_first, is_last = stage == 0, stage == job.parallel.pp - 1
    ends = table.stage_weights([], is_first=is_first, is_last=is_last)
    layers = sum(stop - start for start, stop in spans)
    own = [weight.local_numel(job.parallel.tp) for weight in table.block_weights]
    return layers * sum(own) + sum(weight.local_numel(job.parallel.tp) for weight in ends)
