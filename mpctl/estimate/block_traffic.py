"""What one block of a stack sends between its tensor-parallel ranks for one micro batch.

1d, in units of phi, the volume of one phase of an all-reduce of the hidden states
(communication.py): an all-reduce is 2 phi. A parallel layer (attention, or MLP) all-reduces once
forward and once backward, 4 phi; a block holds two: 8 phi (arXiv 1909.08053, fig. 4). Cross
attention reduces twice backward, for both of its inputs. With sequence parallelism each is split
into its two phases, and the inputs of the column products are gathered once more in backward: 5 phi
and 10 phi. Frozen parameters take some of it away (operators/grad_flow.py).

In 2d, 2.5d and 3d products send blocks of activations and of weights along the axes of a grid, and
norms the statistics of rows (operators/tensor_messages.py). By hand, forward of a block of GPT's
shape on a grid of q x q: (7 bsh + 12 h^2) / q elements received by each rank, and statistics.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mpctl.collectives import get_collective, ring_bytes
from mpctl.estimate.communication import phi_bytes
from mpctl.estimate.layer_messages import LayerMessages
from mpctl.estimate.message import Message
from mpctl.layout.job_layout import JobLayout
from mpctl.operators.grad_flow import GradFlow
from mpctl.operators.layer import LayerStack
from mpctl.operators.matmul import GradNeeds

NORMS = "norms"


@dataclass(frozen=True, slots=True)
class PartTraffic:
    """Collectives of one parallel layer between the ranks of tp, forward and backward, for one
    micro batch; an all-reduce is two phases, any other collective one.

    messages: each of them. ranks: of the groups that they go over, by axis.
    """

    messages: tuple[Message, ...]
    ranks: Mapping[str, int]
    phi_bytes: int

    @property
    def all_reduces(self) -> int:
        """All-reduces of one micro batch, forward and backward."""
        return sum(m.count for m in self.messages if m.kind == "all_reduce")

    @property
    def volume_bytes(self) -> int:
        """Bytes of all phases of all collectives of one micro batch."""
        return sum(self._volumes.values())

    @property
    def volume_phi(self) -> int | float:
        """Volume in units of phi, one phase of an all-reduce of the whole hidden states."""
        volume, phi = self.volume_bytes, self.phi_bytes
        return volume // phi if volume % phi == 0 else volume / phi

    @property
    def ring_bytes_per_rank(self) -> int | float:
        """Bytes that each rank sends where every collective is a ring, on the average."""
        return sum(ring_bytes(size, self.ranks[axis]) for axis, size in self._volumes.items())

    @property
    def _volumes(self) -> Counter[str]:
        """Bytes of all phases by axis."""
        volumes: Counter[str] = Counter()
        for message in self.messages:
            phases = get_collective(message.kind).phases
            volumes[message.axis] += phases * message.bytes * message.count
        return volumes

    def by_kind(self) -> Iterator[PartTraffic]:
        """The same traffic split by axis and kind of collective."""
        kinds = dict.fromkeys((m.axis, m.kind) for m in self.messages)
        for kind in kinds:
            own = tuple(m for m in self.messages if (m.axis, m.kind) == kind)
            yield PartTraffic(own, self.ranks, self.phi_bytes)


@dataclass(frozen=True, slots=True)
class BlockTraffic:
    """Collectives between the ranks of tp in one block of a stack, for one micro batch.

    parts: by parallel layer, and of norms, where these send anything. whole: all of them. mode: the
    tensor mode.
    """

    stack: LayerStack
    mode: str
    tp: int
    parts: dict[str, PartTraffic]
    whole: PartTraffic


def block_traffic(
    layout: JobLayout, stack: LayerStack, flow: GradFlow | None = None
) -> BlockTraffic:
    """Collectives of one block and micro batch, product by product, without recomputation.

    flow: which gradients the block computes; None is all.
    """
    if flow is None:
        block = stack.block_of(0)
        needs = dict.fromkeys((product.name for product in block.products), GradNeeds())
        flow = GradFlow(block, needs, (), after=True)
    layers, phi = LayerMessages(layout, layout.profile), phi_bytes(layout, stack)
    sent: dict[str, list[Message]] = {}
    for product in flow.part.products:
        found = layers.of_product(product, flow, stack.title)
        sent.setdefault(product.part, []).extend(found)
    if norms := list(layers.of_norms(flow, stack.title)):
        sent[NORMS] = norms

    def traffic(messages: Sequence[Message]) -> PartTraffic:
        return PartTraffic(tuple(messages), layout.group_sizes, phi)

    every = [message for messages in sent.values() for message in messages]
    parallel = layout.job.parallel
    parts = {part: traffic(messages) for part, messages in sent.items()}
    return BlockTraffic(stack, parallel.tensor_mode, parallel.tp, parts, traffic(every))
