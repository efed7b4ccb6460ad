"""What the ranks send, derived from the operator table by the contraction law.

Φ is the volume of one phase (reduce-scatter or all-gather) of an all-reduce of the hidden states,
micro batch x seq x hidden x bytes. An all-reduce is 2Φ. A parallel layer (attention, or MLP)
all-reduces once forward and once backward, 4Φ; a block holds two: 8Φ (arXiv 1909.08053, fig. 4).
Cross attention reduces twice backward, for both of its inputs. A ring sends 2(t-1)/t of each
message from every rank.

With sequence parallelism each is split into its two phases, and the inputs of the column products
are gathered once more in backward: 5Φ and 10Φ. Frozen parameters take some of it away
(operators/grad_flow.py). All messages of a step: messages.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

from mpctl.layout.job_layout import JobLayout
from mpctl.operators.grad_flow import GradFlow
from mpctl.operators.matmul import Dims, GradNeeds, LayerStack, ParameterSpec
from mpctl.spec.runtime import RuntimeProfile
from mpctl.spec.training import TrainingSpec
from mpctl.units import DTYPE_BYTES

Sizes = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class PartTraffic:
    """Collectives of one parallel layer over tp, forward and backward, for one micro batch.

    An all-reduce is two phases; an all-gather or a reduce-scatter is one.
    """

    kinds: Counter[str]
    volume_bytes: int
    phi_bytes: int

    @property
    def all_reduces(self) -> int:
        """All-reduces of one micro batch, forward and backward."""
        return self.kinds["all_reduce"]

    @property
    def volume_phi(self) -> int | float:
        """Volume in units of phi, one phase of an all-reduce of the hidden states."""
        return _whole(self.volume_bytes, self.phi_bytes)


@dataclass(frozen=True, slots=True)
class BlockTraffic:
    """Collectives over tp of one block of a stack, for one micro batch, by parallel layer."""

    stack: LayerStack
    phi_bytes: int
    tp: int
    parts: dict[str, PartTraffic]

    @property
    def all_reduces(self) -> int:
        """All-reduces of one micro batch, forward and backward."""
        return sum(part.all_reduces for part in self.parts.values())

    @property
    def volume_phi(self) -> int | float:
        """Volume in units of phi: phases of an all-reduce of the hidden states."""
        return _whole(self.volume_bytes, self.phi_bytes)

    @property
    def volume_bytes(self) -> int:
        """Bytes of all phases of all collectives of one micro batch."""
        return sum(part.volume_bytes for part in self.parts.values())

    @property
    def ring_bytes_per_rank(self) -> int | float:
        """Bytes that each rank sends where every collective is a ring."""
        return ring_bytes(self.volume_bytes, self.tp, phases=1)


def _whole(amount: int, unit: int) -> int | float:
    return amount // unit if amount % unit == 0 else amount / unit


def ring_bytes(message: int, ranks: int, *, phases: int = 2) -> int | float:
    """Bytes that each rank of a ring sends: (t-1)/t of the message in each phase; an all-reduce has
    two, a reduce-scatter or an all-gather one."""
    exact = phases * (ranks - 1) * message
    return exact // ranks if exact % ranks == 0 else exact / ranks


def local_sizes(layout: JobLayout) -> Sizes:
    """Elements of one micro batch on one rank of cp, by dimension; hidden states are whole over
    tp."""
    model, cp = layout.model, layout.job.parallel.cp
    return {
        "batch": layout.job.training.micro_batch_size,
        "seq": model.seq_length // cp,
        "decoder_seq": (model.decoder_seq_length or 0) // cp,
        "hidden": model.hidden,
    }


def value_bytes(training: TrainingSpec) -> int:
    """Bytes of an element of activations and parameters; only operands of products are fp8."""
    return max(2, DTYPE_BYTES[training.dtype])


def gradient_bytes(training: TrainingSpec, profile: RuntimeProfile) -> int:
    """Bytes of a gradient's element where it is accumulated and reduced: the job's choice, else the
    runtime's, in no fewer bytes than the parameter."""
    if training.gradient_dtype is not None:
        return DTYPE_BYTES[training.gradient_dtype]
    return max(value_bytes(training), DTYPE_BYTES[profile.gradient_dtype or training.dtype])


def message_bytes(layout: JobLayout, dims: Dims) -> int:
    """Bytes of a tensor of these dimensions in the training dtype, whole over tp."""
    sizes = local_sizes(layout)
    return prod(sizes[dim] for dim in dims) * value_bytes(layout.job.training)


def phi_bytes(layout: JobLayout, stack: LayerStack) -> int:
    """Bytes of one phase of one all-reduce of the stack's hidden states."""
    return message_bytes(layout, ("batch", stack.seq, "hidden"))


def block_traffic(
    layout: JobLayout, stack: LayerStack, flow: GradFlow | None = None
) -> BlockTraffic:
    """Collectives over tp of one block and micro batch, product by product, without recomputation.

    flow: which gradients the block computes; None is all.
    """
    parallel, phi = layout.job.parallel, phi_bytes(layout, stack)
    kinds: dict[str, Counter[str]] = {}
    volumes: Counter[str] = Counter()
    for product in stack.block.products:
        needs = flow.needs[product.name] if flow else GradNeeds()
        phases = product.collectives(sequence_parallel=parallel.sequence_parallel, needs=needs)
        sent = Counter((*phases.forward, *phases.backward) if parallel.tp > 1 else ())
        kinds.setdefault(product.part, Counter()).update(sent)
        message = message_bytes(layout, product.message)
        volumes[product.part] += message * (sent.total() + sent["all_reduce"])
    parts = {part: PartTraffic(found, volumes[part], phi) for part, found in kinds.items()}
    return BlockTraffic(stack, phi, parallel.tp, parts)


def local_parameters(
    layout: JobLayout, stage: int, *, trained_only: bool = False, whole_only: bool = False
) -> int:
    """Number of parameters that one rank of a stage holds, before ZeRO shares them.

    trained_only: leave frozen parameters out. whole_only: only those that tp does not split.
    """

    def count(weights: Iterable[ParameterSpec]) -> int:
        own = (w for w in weights if not (whole_only and w.is_split))
        return sum(weight.local_numel(layout.grid) for weight in own)

    slices = layout.stage_slices(stage)
    ends = {w.name: w for part in slices for w in part.end_weights(trained_only=trained_only)}
    blocks = sum(
        layers * count(flow.trained if trained_only else flow.part.weights)
        for part in slices
        for layers, flow in part.blocks
    )
    return blocks + count(ends.values())
