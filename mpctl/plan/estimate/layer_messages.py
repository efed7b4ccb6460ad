"""Messages of one micro batch over tp and cp in a layer, and before and after the layers.

What a matrix product, a norm and the loss send between the tensor-parallel ranks is listed in
model/operators/tensor_messages.py for every tensor mode. Full recomputation sends those of the repeated
forward again. Other messages are: keys and values of heads that several tp ranks share, keys and
values over cp (arXiv 2205.05198; train/layers/context_parallel.py), and the saved input of a recomputed
layer where it is partitioned over tp; rows of experts (expert_messages.py). Frozen parameters send
no gradient (model/operators/grad_flow.py). Latent attention sends latents: over tp before the products
that read them, of keys and values once, with their rotary columns, and these over cp
(train/layers/latent_attention.py).

By hand, a GPT layer over tp 2, b 1, s 1024, h 768, float32: two all-reduces of 3 MiB forward and
two backward. Full recomputation without dropout repeats one of the two, that of attention.output.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

from mpctl.core.axes import CP_GROUPS
from mpctl.core.collectives import Kind, get_collective, ring_bytes
from mpctl.core.sharding import overlapped_parts
from mpctl.core.units import PRODUCT_BYTES
from mpctl.model.layout.job_layout import JobLayout
from mpctl.model.operators.activation_shapes import gathers_latents
from mpctl.model.operators.adapters import has_lengths
from mpctl.model.operators.grad_flow import GradFlow
from mpctl.model.operators.layer import AttentionOp, LayerStack
from mpctl.model.operators.matmul import Dims, GradNeeds, MatMul
from mpctl.model.operators.tensor_messages import (
    ProductSize,
    TensorMessage,
    loss_messages,
    norm_messages,
    product_messages,
)
from mpctl.plan.estimate.attention import kernels_of
from mpctl.plan.estimate.communication import Cover, Message, Phase, Sizes, batch_sizes, message_bytes, phi_bytes
from mpctl.plan.estimate.expert_messages import ExpertMessages
from mpctl.spec.runtime import RuntimeProfile
from mpctl.spec.training import CORE

KEYS, QUERIES = "keys and values", "queries, keys and values"


class ExchangedBytes(NamedTuple):
    """Bytes of a rank's own positions and heads: of queries, of keys with values, and of the result."""

    queries: int
    keys: int
    context: int


NO_GRADIENTS = GradNeeds(False, False, False)


@dataclass(frozen=True)
class LayerMessages:
    """Lists the messages of layers and ends under one layout and runtime profile."""

    layout: JobLayout
    profile: RuntimeProfile

    @cached_property
    def sizes(self) -> Sizes:
        """Elements of one micro batch on one rank of cp, by dimension, before tp splits them."""
        return batch_sizes(self.layout)

    @cached_property
    def tp(self) -> int:
        """Tensor-parallel ranks."""
        return self.layout.job.parallel.tp

    @cached_property
    def _widths(self) -> tuple[int, int]:
        """Bytes of an element in the training dtype, and of one in float32 at least."""
        value = self.layout.job.training.value_bytes
        return value, max(4, value)

    def block(self, stack: LayerStack, flow: GradFlow) -> list[Message]:
        """Messages of one layer and micro batch."""
        is_again = is_repeated(self.layout, self.profile, flow)
        return [
            *self.over_tp(stack, flow),
            *self.of_experts(flow, is_again=is_again),
            *self.over_cp(flow, is_again=is_again),
        ]

    @cached_property
    def experts(self) -> ExpertMessages:
        """The messages of layers with experts."""
        return ExpertMessages(self.layout, self.profile)

    def of_experts(self, flow: GradFlow, *, is_again: bool) -> list[Message]:
        """Messages between the ranks that hold experts, none of a dense layer."""
        if not flow.part.has_experts:
            return []
        return list(self.experts.of_rows(flow, is_again=is_again))

    def over_tp(self, stack: LayerStack, flow: GradFlow) -> list[Message]:
        """The layer's messages between the ranks of tp, which depend only on the rows of a micro
        batch, ordered by group, kind and size, then those for heads that several ranks share."""
        sent = [*self._products(flow, stack.title), *self.of_norms(flow, stack.title)]
        sent += list(self._repeated(stack, flow, sent))
        sent.sort(key=lambda message: (message.axis, message.kind, message.bytes))
        is_again = is_repeated(self.layout, self.profile, flow)
        counts = self.experts.of_loss(flow, "tp") if flow.part.has_experts else ()
        return [*sent, *self._shared_heads(flow, is_again=is_again), *counts]

    def end(self, flow: GradFlow) -> list[Message]:
        """Messages of one micro batch before the first or after the last layer of a stack; logits
        bring their loss."""
        messages: list[Message] = list(self.of_norms(flow, "norms"))
        for product in flow.part.products:
            own = list(self.of_product(product, flow, product.name))
            own.sort(key=lambda message: (message.axis, message.kind, message.bytes))
            messages += own
            if product.makes_logits and self.tp > 1:
                sent = loss_messages(self.layout.grid, self._rows(product.rows))
                messages += [self._message(message, "loss") for message in sent]
        shared = self._shared_heads(flow, is_again=False)
        if flow.part.has_experts:
            messages += self.experts.of_loss(flow, "tp")
        return [*messages, *shared, *self.of_experts(flow, is_again=False), *self.over_cp(flow, is_again=False)]

    def _products(self, flow: GradFlow, what: str) -> Iterator[Message]:
        for product in flow.part.products:
            yield from self.of_product(product, flow, what)

    def of_product(self, product: MatMul, flow: GradFlow, what: str) -> Iterator[Message]:
        """Messages of one product, forward and backward, between the ranks of tp."""
        if self.tp == 1 or product.is_grouped or product.adapts in self._positions:
            return
        needs = flow.needs[product.name]
        if product.adapts and self.profile.adapters.shards_rank:
            yield from self._of_cut_rank(product, flow, what)
            return
        size = self._product_size(product, flow)
        if has_lengths(product) and _first(product, flow).matrix.is_split:  # |W + s B A|^2, in float32 at least
            norms = size.outputs * self._widths[1]
            yield Message("tp", "all_reduce", what, norms, phase="forward", product=product.name)
        is_kept = product.name in self._positions
        for message in product_messages(self.layout.grid, product, size, needs):
            if is_kept and (message.kind, message.phase) == ("all_gather", "backward"):
                continue  # the latent of keys and values stays gathered
            cover = _cover(message, product, needs)
            is_input = message.elements == size.rows * size.inputs
            if is_input and self._gathers_in_halves(message, product):
                message = message._replace(elements=message.elements // 2, count=2)
                cover = "product"
            yield self._message(message, what, cover=cover, product=product.name)

    def _of_cut_rank(self, product: MatMul, flow: GradFlow, what: str) -> Iterator[Message]:
        """Messages of a product of an adapter of which no factor is whole (Megatron-Bridge,
        ParallelLinearAdapter): tp cuts A of a column product by rank, and B of a row product by its outputs.

        By hand, T tokens: column: X A gathered [T, r], its gradient summed, dX summed [T, in]; row: X A summed
        [T, r], Y gathered [T, out], and with sequence parallelism dY.
        """
        splits, needs = self.layout.job.parallel.sequence_parallel, flow.needs[product.name]
        is_second = product.reads[-1] == "rank"
        size, is_row = self._product_size(product, flow), _first(product, flow).matrix.is_split
        wide = size.rows * (size.outputs if is_second else size.inputs)
        narrow = size.rows * (size.inputs if is_second else size.outputs)
        sent: list[tuple[Kind, Phase, int]] = []
        if is_second and is_row:
            sent = [("all_gather", "forward", wide), ("all_reduce", "backward", narrow)]
            sent += [("all_gather", "backward", wide)] * splits
        elif not is_second and is_row:
            sent = [("all_reduce", "forward", narrow)]
        elif not is_second:
            sent = [("all_gather", "forward", narrow), ("all_reduce", "backward", narrow)]
            sent += [("reduce_scatter" if splits else "all_reduce", "backward", wide)] * needs.x
        for kind, phase, elements in sent:
            if phase == "forward" or needs.y:
                yield Message("tp", kind, what, elements * self._widths[0], 1, phase, None, product.name)

    def _gathers_in_halves(self, message: TensorMessage, product: MatMul) -> bool:
        """Whether the runtime gathers a product's input by this message, and multiplies its first half
        while the second arrives (parallel.tp_comm_overlap). message: not one of its outputs."""
        job = self.layout.job
        is_gather = message.kind == "all_gather" and message.phase == "forward"
        is_column = "tp" in product.backward_axes and not product.is_head
        if not (job.parallel.tp_comm_overlap and is_gather and is_column):
            return False
        if not self.profile.overlap.gathers_in_halves or product.name in self._positions:
            return False
        samples, positions = (self.sizes[dim] for dim in product.rows)
        is_plain = job.training.dtype not in PRODUCT_BYTES
        return is_plain and overlapped_parts(samples, positions // self.tp) == 2

    def of_norms(self, flow: GradFlow, what: str) -> Iterator[Message]:
        """Messages of the norms of a layer or an end, forward and backward, between the ranks that
        share the hidden states."""
        grid, part = self.layout.grid, flow.part
        for norm in part.norms if grid.hidden_parts > 1 else ():
            rows = self._rows(part.products[0].rows)
            for message in norm_messages(grid, norm.kind, rows, goes_back=flow.after):
                yield self._message(message, what, product=norm.name)
        for norm in part.width_norms:
            rows, needs = self._rows(norm.reads[:-1]), flow.needs[part.cores[0].query_product]
            sent = norm_messages(grid, norm.kind, rows, goes_back=needs.y, dim="heads")
            for message in sent:
                yield self._message(message, what, product=norm.name)

    def _message(self, sent: TensorMessage, what: str, *, cover: Cover | None = None, product: str = "") -> Message:
        size = sent.elements * self._widths[sent.is_float]
        return Message(sent.axis, sent.kind, what, size, sent.count, sent.phase, cover, product)

    def _rows(self, dims: Dims) -> int:
        return prod(self.sizes[dim] for dim in dims)

    def _product_size(self, product: MatMul, flow: GradFlow) -> ProductSize:
        weight = product.matrix
        inputs = outputs = 1
        for dim, size in zip(weight.dims, weight.shape, strict=True):
            if dim in product.reads:
                inputs *= size
            else:
                outputs *= size
        inputs += self._positions.get(product.name, 0)
        return ProductSize(self._rows(product.rows), inputs, outputs)

    @cached_property
    def _positions(self) -> Mapping[str, int]:
        """Columns that come with the latent of keys and values, by the product that reads it."""
        if not self.layout.model.is_mla:
            return {}
        table, rope = self.layout.table, self.layout.model.qk_rope_head_dim or 0
        parts = (part for stack in table.stacks for part in (*stack.kinds, stack.entry, stack.exit))
        return {core.key_product: rope for part in parts for core in part.cores if core.latent}

    def _repeated(self, stack: LayerStack, flow: GradFlow, messages: Sequence[Message]) -> Iterator[Message]:
        """Over tp, in the repeated forward: those of `messages` that its products and norms send
        again, and its partitioned input."""
        products = repeated_products(self.layout, self.profile, flow) if self.tp > 1 else ()
        if not products:
            return
        again = {product.name for product in products}
        if is_repeated(self.layout, self.profile, flow):
            again.update(norm.name for norm in (*flow.part.norms, *flow.part.width_norms))
        for message in messages:
            if message.phase == "forward" and message.product in again:
                yield message._replace(phase="recompute")
        if self.layout.job.training.partition_activations:
            size = message_bytes(self.layout, ("batch", stack.seq, "hidden"))
            yield Message("tp", "all_gather", stack.title, size, phase="recompute")

    def _shared_heads(self, flow: GradFlow, *, is_again: bool) -> Iterator[Message]:
        kv_heads = self.layout.model.kv_heads
        for core in flow.cores if self.layout.grid.feature_parts > kv_heads else ():
            if core.latent:  # every rank computes the keys and values of its heads
                continue
            size = self._head_bytes(core) * kv_heads
            yield from _gathered("tp", "kv heads", size, is_again, flow.needs[core.key_product].y)

    def over_cp(self, flow: GradFlow, *, is_again: bool) -> Iterator[Message]:
        """Keys and values of a rank's heads, for the full sequence, gathered forward, summed and
        scattered backward; of latent attention what they are computed from. is_again: whether the
        forward is repeated."""
        cp = self.layout.job.parallel.cp
        if cp > 1 and flow.part.has_experts:
            yield from self.experts.of_loss(flow, "cp")
        if cp > 1 and not self.gathers_latents:
            for core in flow.cores:
                yield from self._stated(core, flow, is_again=is_again or (flow.after and self._repeats_scores))
            return
        for core in flow.cores if cp > 1 else ():
            size = self._head_bytes(core) * cp * max(1, self.layout.model.kv_heads // self.tp)
            if core.latent:
                width = core.latent * self.layout.job.training.value_bytes
                size = self.sizes["batch"] * self.sizes[core.keys] * width * cp
            again = is_again or (flow.after and self._repeats_scores)
            yield from _gathered("cp", KEYS, size, again, flow.needs[core.key_product].y)

    @cached_property
    def gathers_latents(self) -> bool:
        """Whether cp shares latents of keys and values, and otherwise gathers these once, as before a job
        could say how (parallel.cp_comm); mpctl's all_gather is the same."""
        return gathers_latents(self.layout.job.parallel.stated_cp_comm, kernels_of(self.layout))

    def _stated(self, core: AttentionOp, flow: GradFlow, *, is_again: bool) -> Iterator[Message]:
        """Messages of one attention as parallel.cp_comm says: keys and values in parts around a ring, again
        with their gradients in backward; gathered in each pass; an exchange of queries, keys and values for
        a part of the heads, and of the result back (Transformer Engine, context_parallel.py).

        By hand, cp 2, 8 positions a rank, 4 heads of 16 columns, 2 kv heads, 2 bytes: a ring part 1 KiB,
        1 of them forward and 2 backward; a2a 2 KiB and 1 KiB, half of which each rank sends.
        """
        p, own = self.layout.job.parallel, self._columns(core)
        goes_back = flow.needs[core.key_product].y or flow.needs[core.query_product].y
        inner, ring = p.head_parts, p.cp // p.head_parts
        over = ("cp", "cp") if 1 in (inner, ring) else CP_GROUPS
        sent: list[tuple[str, Kind, str, int, int, bool]] = []  # to be sent again, in the other direction
        if inner > 1:
            sent.append((over[0], "all_to_all", QUERIES, own.queries + own.keys, 1, True))
            sent.append((over[0], "all_to_all", "context", own.context, 1, True))
        if ring > 1 and p.stated_cp_comm == "all_gather":
            sent.append((over[1], "all_gather", KEYS, own.keys * ring, 1, False))
        elif ring > 1:
            sent.append((over[1], "sendrecv", KEYS, own.keys, ring - 1, False))
        for axis, kind, what, size, count, returns in sent:
            yield Message(axis, kind, what, size, count, "forward")
            if is_again:
                yield Message(axis, kind, what, size, count, "recompute")
            if goes_back:
                yield Message(axis, kind, what, size, count, "backward")
            if goes_back and not returns:
                back: Kind = "reduce_scatter" if kind == "all_gather" else kind
                yield Message(axis, back, f"gradients of {KEYS}", size, count, "backward")

    def _columns(self, core: AttentionOp) -> ExchangedBytes:
        model, p = self.layout.model, self.layout.job.parallel
        rows = self.sizes["batch"] * self.layout.job.training.value_bytes
        queries, keys = rows * self.sizes[core.queries], rows * self.sizes[core.keys]
        heads = model.heads // p.tp
        kv = (
            heads * (model.qk_size + model.v_size)
            if core.latent
            else 2 * max(1, model.kv_heads // p.tp) * model.head_size * self.layout.kv_copies
        )
        return ExchangedBytes(queries * heads * model.qk_size, keys * kv, queries * heads * model.v_size)

    def _head_bytes(self, core: AttentionOp) -> int:
        """Bytes of the keys and values of one head, of a rank's part of the sequence."""
        training, size = self.layout.job.training, self.layout.model.head_size
        return 2 * self.sizes["batch"] * self.sizes[core.keys] * size * training.value_bytes

    @cached_property
    def _repeats_scores(self) -> bool:
        """Whether selective recomputation exchanges keys and values again: ours keeps the gathered
        tensors, others pass them round a ring and keep none."""
        is_selective = CORE in self.layout.job.training.repeated_modules
        repeats_core = self.profile.operators.recompute == "core"
        return is_selective and repeats_core and not kernels_of(self.layout).gathers_keys


def _first(product: MatMul, flow: GradFlow) -> MatMul:
    """The first product of an adapter. product: either of them."""
    is_second = product.reads[-1] == "rank"
    return next(one for one in flow.part.products if one.name == product.value) if is_second else product


def _cover(message: TensorMessage, product: MatMul, needs: GradNeeds) -> Cover | None:
    """Find what hides a message. In 1d a column product overlaps its backward message with its own dW;
    in SUMMA a step's product hides the messages of other steps."""
    if message.kind in ("broadcast", "reduce"):
        return "product"
    is_summed = message.axis == "tp" and message.phase == "backward"
    return "weight_gradient" if is_summed and "tp" in product.backward_axes and needs.w else None


def _gathered(axis: str, what: str, size: int, again: bool, trained: bool) -> Iterator[Message]:
    yield Message(axis, "all_gather", what, size, phase="forward")
    if again:
        yield Message(axis, "all_gather", what, size, phase="recompute")
    if trained:
        yield Message(axis, "reduce_scatter", what, size, phase="backward")


def forward_flow(flow: GradFlow) -> GradFlow:
    """The same part of a model where no gradient is computed: a validation's forward."""
    needs = dict.fromkeys(flow.needs, NO_GRADIENTS)
    return GradFlow(flow.part.validated, needs, (), after=False, kept=flow.part.validated)


# ------------------------------------------------------------------------------
# Which part of a layer's forward full recomputation runs again in backward.
#
# Backward asks for every tensor of the forward up to a last one. With dropout, or with a norm
# behind the layer's last product, or with dora there, that is the last tensor of the layer, and all of
# it is run again.
# Without either, a runtime may stop early, before the last product (`operators.stops_early` of its
# profile): backward then needs a second forward only where the last product's input has a gradient
# or its weight is trained. On a grid of tensor-parallel ranks (2d, 2.5d, 3d) a product and its
# messages are one operation, which is repeated in full, the last one included.
#
# By hand, a GPT layer without dropout under a runtime that stops early: attention.qkv,
# attention.output and mlp.up run again, mlp.down does not.


MODULE_PRODUCTS = {
    "mla_up_proj": ("attention.query_up", "attention.key_value_up"),
    "shared_experts": ("mlp.shared.up", "mlp.shared.down"),
    "mlp": ("mlp.up", "mlp.down"),
}
"""Products that selective recomputation of a module (training.recompute_modules) runs again."""


def repeats_last_product(layout: JobLayout, profile: RuntimeProfile, flow: GradFlow) -> bool:
    """Whether full recomputation runs a layer's last product again; of a layer with experts, whose
    results are weighed behind it, always."""
    needs_result = layout.job.training.dropout > 0 or layout.model.norm_order != "pre"
    needs_result |= flow.part.has_experts or has_lengths(flow.part.products[-1])
    needs_result |= layout.grid.mode != "1d"
    return needs_result or not profile.operators.stops_early


def is_repeated(layout: JobLayout, profile: RuntimeProfile, flow: GradFlow) -> bool:
    """Whether full recomputation runs the forward of this layer again in its backward."""
    if layout.job.training.recompute != "full":
        return False
    if repeats_last_product(layout, profile, flow):
        return flow.after
    last = flow.needs[flow.part.products[-1].name]
    return last.x or last.w


def tiled_products(layout: JobLayout, flow: GradFlow) -> tuple[MatMul, ...]:
    """The products of a layer that tiles of its MLP (training.tiled_mlp) run once more in backward, where full
    recomputation has run them again already."""
    names = MODULE_PRODUCTS["mlp"] if layout.job.training.tiled_mlp and flow.after else ()
    return tuple(product for product in flow.part.products if product.name in names)


def repeated_products(layout: JobLayout, profile: RuntimeProfile, flow: GradFlow) -> tuple[MatMul, ...]:
    """The matrix products of a layer that recomputation runs again in its backward, full, or
    selective of modules that have some."""
    products = flow.part.products
    if not is_repeated(layout, profile, flow):
        modules = layout.job.training.repeated_modules if flow.after else ()
        names = {name for module in modules for name in MODULE_PRODUCTS.get(module, ())}
        return tuple(product for product in products if product.name in names)
    return products if repeats_last_product(layout, profile, flow) else products[:-1]


# ------------------------------------------------------------------------------
# What one block of a stack sends between its tensor-parallel ranks for one micro batch.
#
# 1d, in units of phi, the volume of one phase of an all-reduce of the hidden states
# (communication.py): an all-reduce is 2 phi. A parallel layer (attention, or MLP) all-reduces once
# forward and once backward, 4 phi; a block holds two: 8 phi (arXiv 1909.08053, fig. 4). Cross
# attention reduces twice backward, for both of its inputs. With sequence parallelism each is split
# into its two phases, and the inputs of the column products are gathered once more in backward: 5
# phi and 10 phi. Frozen parameters take some of it away (model/operators/grad_flow.py).
#
# In 2d, 2.5d and 3d products send blocks of activations and of weights along the axes of a grid,
# and norms the statistics of rows (model/operators/tensor_messages.py). By hand, forward of a block of
# GPT's shape on a grid of q x q: (7 bsh + 12 h^2) / q elements received by each rank, and
# statistics.


NORMS = "norms"


class PartTraffic(NamedTuple):
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
        """Volume in units of phi, one phase of an all-reduce of the full hidden states."""
        volume, phi = self.volume_bytes, self.phi_bytes
        return volume // phi if volume % phi == 0 else volume / phi

    @property
    def ring_bytes_per_rank(self) -> int | float:
        """Bytes that each rank sends where every collective is a ring, on the average."""
        return sum(ring_bytes(size, self.ranks[axis]) for axis, size in self._volumes.items())

    @property
    def _volumes(self) -> Counter[str]:
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


class BlockTraffic(NamedTuple):
    """Collectives between the ranks of tp in one block of a stack, for one micro batch.

    parts: by parallel layer, and of norms, where these send anything. whole: their sum. mode: the
    tensor mode.
    """

    stack: LayerStack
    mode: str
    tp: int
    parts: dict[str, PartTraffic]
    whole: PartTraffic


def block_traffic(layout: JobLayout, stack: LayerStack, flow: GradFlow | None = None) -> BlockTraffic:
    """Collectives of one block and micro batch, product by product, without recomputation.

    flow: which gradients the block computes; None is all.
    """
    if flow is None:
        block = stack.block_of(0)
        needs = dict.fromkeys((product.name for product in block.products), GradNeeds())
        flow = GradFlow(block, needs, (), after=True, kept=block)
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
