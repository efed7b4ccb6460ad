"""What one micro batch sends over tp and cp in a layer, and before and after the layers.

Which collectives a matrix product needs follows from the contraction law (operators/matmul.py).
Full recomputation sends those of the repeated forward again (recompute.py). Besides the products:
the loss (three all-reduces of one float32 a token), keys and values of heads that several tp ranks
share, keys and values over cp (arXiv 2205.05198; kernels/context.py), and the saved input of a
recomputed layer where it is partitioned over tp. What is frozen sends no gradient
(operators/grad_flow.py).

By hand, a GPT layer over tp 2, b 1, s 1024, h 768, float32: two all-reduces of 3 MiB forward and
two backward. Full recomputation without dropout repeats one of the two, that of attention.output.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from mpctl.estimate.communication import Sizes, local_sizes, message_bytes, value_bytes
from mpctl.estimate.message import Cover, Message
from mpctl.estimate.recompute import is_repeated, repeated_products
from mpctl.layout.job_layout import JobLayout
from mpctl.operators.grad_flow import GradFlow
from mpctl.operators.matmul import AttentionOp, GradNeeds, LayerStack, MatMul
from mpctl.spec.runtime import RuntimeProfile

LOSS_ALL_REDUCES = 3  # maximum, target logit, sum of exponentials
NO_GRADIENTS = GradNeeds(False, False, False)


@dataclass(frozen=True)
class LayerMessages:
    """Lists the messages of layers and ends under one layout and runtime profile."""

    layout: JobLayout
    profile: RuntimeProfile

    @cached_property
    def sizes(self) -> Sizes:
        """Elements of one micro batch on one rank, by dimension."""
        return local_sizes(self.layout)

    @cached_property
    def tp(self) -> int:
        """Tensor-parallel ranks."""
        return self.layout.job.parallel.tp

    def block(self, stack: LayerStack, flow: GradFlow) -> list[Message]:
        """Messages of one layer and micro batch: over tp by kind and size, then of each
        attention."""
        over_tp = [*self._products(flow, stack.title), *self._repeated(stack, flow)]
        over_tp.sort(key=lambda message: (message.kind, message.bytes))
        is_again = is_repeated(self.layout, self.profile, flow)
        attention = (
            message
            for core in stack.cores
            for message in self._keys_and_values(core, flow, is_again=is_again)
        )
        return [*over_tp, *attention]

    def end(self, flow: GradFlow) -> list[Message]:
        """Messages of one micro batch before the first or after the last layer of a stack; logits
        bring their loss."""
        messages: list[Message] = []
        for product in flow.part.products:
            own = list(self._product(product, flow, product.name))
            own.sort(key=lambda message: (message.kind, message.bytes))
            messages += own
            if "vocab" in product.writes and self.tp > 1:
                messages.append(self._loss(product))
        return messages

    def _products(self, flow: GradFlow, what: str) -> Iterator[Message]:
        for product in flow.part.products:
            yield from self._product(product, flow, what)

    def _product(self, product: MatMul, flow: GradFlow, what: str) -> Iterator[Message]:
        """Over tp, forward and backward; a column product sends backward beside its own dW."""
        if self.tp == 1:
            return
        needs, split = flow.needs[product.name], self.layout.job.parallel.sequence_parallel
        phases = product.collectives(sequence_parallel=split, needs=needs)
        if not (phases.forward or phases.backward):
            return
        size = message_bytes(self.layout, product.message)
        for kind in phases.forward:
            yield Message("tp", kind, what, size, phase="forward", product=product.name)
        hides = "tp" in product.backward_axes and needs.w
        cover: Cover | None = "weight_gradient" if hides else None
        for kind in phases.backward:
            yield Message("tp", kind, what, size, 1, "backward", cover, product.name)

    def _repeated(self, stack: LayerStack, flow: GradFlow) -> Iterator[Message]:
        """Over tp, in the repeated forward: its products' messages and its partitioned input."""
        if self.tp == 1 or not is_repeated(self.layout, self.profile, flow):
            return
        for product in repeated_products(self.layout, self.profile, flow):
            for message in self._product(product, flow, stack.title):
                if message.phase == "forward":
                    yield replace(message, phase="recompute")
        if self.layout.job.training.partition_activations:
            size = message_bytes(self.layout, ("batch", stack.seq, "hidden"))
            yield Message("tp", "all_gather", stack.title, size, phase="recompute")

    def _keys_and_values(
        self, core: AttentionOp, flow: GradFlow, *, is_again: bool
    ) -> Iterator[Message]:
        """Gathered forward, summed and scattered backward: over tp where it has more ranks than
        there are kv heads, over cp always."""
        model, cp = self.layout.model, self.layout.job.parallel.cp
        head = 2 * self.sizes["batch"] * self.sizes[core.keys] * cp * model.head_size
        head *= value_bytes(self.layout.job.training)
        is_trained = flow.needs[core.key_product].y
        if self.tp > model.kv_heads:
            size = head * model.kv_heads // cp
            yield from _gathered("tp", "kv heads", size, is_again, is_trained)
        if cp > 1:
            size = head * max(1, model.kv_heads // self.tp)
            again = is_again or (flow.after and self._repeats_scores)
            yield from _gathered("cp", "keys and values", size, again, is_trained)

    @cached_property
    def _repeats_scores(self) -> bool:
        """Whether selective recomputation exchanges keys and values again: ours keeps what was
        gathered, others pass it round a ring and keep none of it."""
        is_selective = self.layout.job.training.recompute == "selective"
        repeats_core = self.profile.operators.recompute == "core"
        return is_selective and repeats_core and self.profile.memory.kernels != "mpctl"

    def _loss(self, product: MatMul) -> Message:
        """Sums over the parts of the vocabulary: float32 a token even for 16-bit logits."""
        width = max(4, value_bytes(self.layout.job.training))
        rows = prod(self.sizes[dim] for dim in product.rows)
        return Message("tp", "all_reduce", "loss", rows * width, LOSS_ALL_REDUCES, "forward")


def _gathered(axis: str, what: str, size: int, again: bool, trained: bool) -> Iterator[Message]:
    yield Message(axis, "all_gather", what, size, phase="forward")
    if again:
        yield Message(axis, "all_gather", what, size, phase="recompute")
    if trained:
        yield Message(axis, "reduce_scatter", what, size, phase="backward")


def forward_flow(flow: GradFlow) -> GradFlow:
    """The same part of a model where no gradient is computed: a validation's forward."""
    return GradFlow(flow.part, dict.fromkeys(flow.needs, NO_GRADIENTS), (), after=False)
