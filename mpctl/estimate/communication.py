"""What the ranks send, derived from the operator table by the contraction law.

Φ is the volume of one phase (reduce-scatter or all-gather) of an all-reduce of the hidden states,
micro batch x seq x hidden x bytes. An all-reduce is 2Φ. A parallel layer (attention, or MLP)
all-reduces once forward and once backward, 4Φ; a block holds two: 8Φ (arXiv 1909.08053, fig. 4).
A ring sends 2(t-1)/t of each message from every rank.

With sequence parallelism each is split into its two phases, and the inputs of the column products
are gathered once more in backward: 5Φ and 10Φ. All messages of a step: messages.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from mpctl.families.table import OperatorTable, Product, Weight
from mpctl.spec.job import JobSpec
from mpctl.spec.model import Model
from mpctl.stages import Span
from mpctl.units import DTYPE_BYTES


@dataclass(frozen=True, slots=True)
class PartTraffic:
    """Collectives of one parallel layer over tp, forward and backward, for one micro batch."""

    kinds: Counter[str]
    phi_bytes: int

    @property
    def all_reduces(self) -> int:
        return self.kinds["all_reduce"]

    @property
    def volume_phi(self) -> int:
        """An all-reduce is two phases; an all-gather or a reduce-scatter is one."""
        return self.kinds.total() + self.all_reduces

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
        return ring_bytes(self.volume_bytes, self.tp, phases=1)


def ring_bytes(message: int, ranks: int, *, phases: int = 2) -> int | float:
    """Bytes that each rank of a ring sends: (t-1)/t of the message in each phase; an all-reduce has
    two, a reduce-scatter or an all-gather one."""
    exact = phases * (ranks - 1) * message
    return exact // ranks if exact % ranks == 0 else exact / ranks


def phi_bytes(job: JobSpec, model: Model) -> int:
    """One phase of one all-reduce of the hidden states, bytes."""
    seq = model.seq_length // job.parallel.cp
    batch = job.training.micro_batch_size
    return batch * seq * model.hidden * DTYPE_BYTES[job.training.dtype]


def block_traffic(job: JobSpec, model: Model, block: Iterable[Product]) -> BlockTraffic:
    """Collectives over tp of one block, counted product by product, recomputation left out."""
    tp, phi = job.parallel.tp, phi_bytes(job, model)
    counts: dict[str, Counter[str]] = {}
    for product in block:
        phases = product.collectives(sequence_parallel=job.parallel.sequence_parallel)
        kinds = counts.setdefault(product.part, Counter())
        kinds.update((*phases.forward, *phases.backward) if tp > 1 else ())
    return BlockTraffic(phi, tp, {part: PartTraffic(n, phi) for part, n in counts.items()})


def local_parameters(
    job: JobSpec, table: OperatorTable, spans: list[Span], *, stage: int,
    replicated_only: bool = False,
) -> int:  # fmt: skip
    """Parameters that one rank of a stage holds: those of its equal blocks and of its ends.

    replicated_only: just those that every rank of tp holds whole.
    """
    is_first, is_last = stage == 0, stage == job.parallel.pp - 1
    ends = table.stage_weights([], is_first=is_first, is_last=is_last)
    layers = sum(stop - start for start, stop in spans)

    def held(weights: Iterable[Weight]) -> int:
        kept = (w for w in weights if not (replicated_only and "tp" in w.axes()))
        return sum(weight.local_numel(job.parallel.tp) for weight in kept)

    return layers * held(table.block_weights) + held(ends)
