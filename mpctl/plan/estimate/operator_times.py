"""Seconds of one micro batch on one rank in a layer and in a model's ends, operator by operator.

Products come from the operator table, each at its local shape (kernels.py); memory-bound kernels
are passes over tensors that the runtime's profile counts (spec/runtime.py); messages over tp and cp
(layer_messages.py) over the network's routes, less the part that kernels hide
(hidden_messages.py). In 2d and 2.5d a product is one of q steps; 3d computes one product of
gathered parts, 1/l of each side. Recomputation repeats the forward, or the part of it that the
profile says. Only the products of the layers' linear operators run in fp8, mxfp8 and nvfp4; their
operands are cast first.

A product of experts is as many products as this rank has experts, each of an even part of its rows:
tiles of few rows read the matrices at the pace of memory, as products of few rows do. What the
rest of a layer with experts costs is in the profile's table `experts`.

By hand, one product 8 x 8 x 8 forward, dX and dW at 1024 FLOP/s, nothing else: 1, 1 and 1 s.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from math import prod
from typing import NamedTuple

from mpctl.core.axes import CP_GROUPS, EXPERT_UNIONS
from mpctl.core.sharding import AXIS_OF_DIM, DENSE
from mpctl.core.units import PRODUCT_BYTES
from mpctl.model.layout.job_layout import JobLayout
from mpctl.model.operators.grad_flow import GradFlow
from mpctl.model.operators.layer import LayerStack
from mpctl.model.operators.loss import LossChunks
from mpctl.model.operators.matmul import GradNeeds, MatMul, ParameterSpec
from mpctl.plan.estimate.activation_shapes import adds_products
from mpctl.plan.estimate.adapter_times import AdapterTimer
from mpctl.plan.estimate.attention import AttentionTimer, kernels_of, repeats_core
from mpctl.plan.estimate.communication import Message, Sizes, gradient_bytes, local_sizes
from mpctl.plan.estimate.expert_messages import ROWS, routed_layers
from mpctl.plan.estimate.hidden_messages import Hiding
from mpctl.plan.estimate.host_times import layer_host
from mpctl.plan.estimate.kernels import OpTimes, ProductTimes, Rates, Shape, Speed, product_seconds
from mpctl.plan.estimate.layer_messages import (
    LayerMessages,
    is_repeated,
    repeated_products,
    repeats_last_product,
    tiled_products,
)
from mpctl.plan.estimate.loss import loss_chunks, loss_passes, loss_way
from mpctl.plan.estimate.network import Network
from mpctl.plan.estimate.optimizers import update_factor
from mpctl.plan.estimate.routing import expert_load
from mpctl.plan.estimate.system import layer_factor
from mpctl.spec.runtime import MemoryPasses, OperatorCosts, RuntimeProfile

NORM_PASSES = MemoryPasses(forward=2.0, backward=3.0)  # reads x, writes y; reads dy, x, writes dx
# An element of nvfp4 is rotated, rounded at random and scaled twice. On B300 a layer takes 1 / 2971 with its casts and
# 1 / 5094 without (TFLOP/s), in mxfp8 1 / 2134 and 1 / 2677 (Transformer Engine's docs, gemm_profiling): 1.40 to 0.95.
CASTS = {"nvfp4": 1.48}
LEAST_ROWS = 64  # of a tile: an expert's rows are filled up to as many
EXCHANGE_PASSES = 4.0  # a pack and an unpack, each read and written
ENTRY_PASSES = 6.0  # lookup, positions, dropout: reads and writes of hidden states


class LinearTimes(NamedTuple):
    """Seconds of a layer without its attentions, their messages over cp, and recomputation: they
    depend only on the number of rows (samples x positions) that a rank has of a micro batch.
    products: seconds of matrix products forward."""

    work: OpTimes
    products: float


class KnownTimes(NamedTuple):
    """Times cached for each gradient flow of a table, by its id. Layouts for which they are equal
    may share it."""

    linear: dict[int, LinearTimes]
    ends: dict[int, OpTimes]
    blocks: dict[int, OpTimes]


def casts_shared(layout: JobLayout, profile: RuntimeProfile) -> int:
    """Micro batches that share the cast of a weight to a narrow dtype; 0 where each product casts
    its own."""
    how = profile.operators.casts_weights
    is_shared = how == "step" or (how == "held" and layout.holds_fp8_weights)
    return layout.num_microbatches if is_shared else 0


class OperatorTimer:
    """Seconds of a model's operators under one layout. known: times computed before."""

    def __init__(
        self,
        layout: JobLayout,
        speed: Speed,
        network: Network,
        profile: RuntimeProfile,
        known: KnownTimes | None = None,
    ) -> None:
        self.layout, self.speed, self.network, self.profile = layout, speed, network, profile
        self.known = known or KnownTimes({}, {}, {})
        self.job, self.model = layout.job, layout.model

    @cached_property
    def sizes(self) -> Sizes:
        """Elements of one micro batch on one rank between the layers, by dimension."""
        return local_sizes(self.layout)

    @cached_property
    def costs(self) -> OperatorCosts:
        """Memory traffic of the runtime's operations on the job's device."""
        return self.profile.operators.on(self.job.device_kind != "cpu")

    @cached_property
    def loss_passes(self) -> MemoryPasses:
        """Bytes moved for a logit by the job's way to compute the loss."""
        way = loss_way(self.job.training, self.profile)
        return loss_passes(self.costs.logits, way, self.profile.memory.cross_entropy)

    @cached_property
    def loss_chunks(self) -> LossChunks | None:
        """The chunks in which head and loss are computed together, if they are."""
        return loss_chunks(self.job.training, self.profile)

    @cached_property
    def width(self) -> int:
        """Bytes of an element of activations and parameters."""
        return self.job.training.value_bytes

    @cached_property
    def gradient(self) -> int:
        """Bytes of a gradient's element where it is accumulated and reduced."""
        return gradient_bytes(self.job.training, self.profile)

    @cached_property
    def attention(self) -> AttentionTimer:
        """The timer of softmax(Q K^T) V."""
        return AttentionTimer(self.layout, self.speed, self.profile, self.sizes, self.width)

    @cached_property
    def adapters(self) -> AdapterTimer:
        """The timer of what adapters and a frozen base move."""
        return AdapterTimer(self.layout, self.speed, self.profile)

    @cached_property
    def messages(self) -> LayerMessages:
        """The messages of layers and ends over tp and cp."""
        return LayerMessages(self.layout, self.profile)

    @cached_property
    def hiding(self) -> Hiding:
        """The part of those messages that overlaps with kernels."""
        overlap = self.profile.overlap
        if self.speed.waits:  # ranks copy their messages themselves
            overlap = overlap.model_copy(update={"tp": 0.0, "cp": 0.0, "products": 0.0})
        if self.layout.job.parallel.tp_comm_overlap is False:
            overlap = overlap.model_copy(update={"products": 0.0})
        return Hiding(overlap, self.network, self.steps)

    def _own_keys(self, flow: GradFlow) -> float:
        """The share of a layer's attention that needs no key of another rank of cp, and overlaps
        with their messages. Software that passes keys round a ring has some of it all the time;
        mpctl gathers them during the diagonals of plain causal attention, 1/2c of it
        (train/layers/context_parallel.py)."""
        comm, cp = self.job.parallel.stated_cp_comm, self.job.parallel.cp
        if comm in ("p2p", "a2a+p2p"):  # of the ring's last part nothing follows
            ring = cp // self.job.parallel.head_parts
            return (ring - 1) / ring
        if not kernels_of(self.layout).gathers_keys:
            return 0.0 if comm else 1.0
        is_dropped = self.job.training.attention_dropout > 0
        is_split = all(core.is_plain and core.is_causal and not core.latent for core in flow.cores)
        return 0.5 / self.job.parallel.cp if is_split and not is_dropped else 0.0

    @cached_property
    def tp(self) -> int:
        """Tensor-parallel ranks."""
        return self.job.parallel.tp

    @cached_property
    def split(self) -> int:
        """Ranks of tp that share the sequence between the split products."""
        return self.tp if self.job.parallel.sequence_parallel else 1

    def block(self, stack: LayerStack, flow: GradFlow) -> OpTimes:
        """One layer."""
        times = self.known.blocks.get(id(flow))
        if times is None:
            times = self._block(stack, flow)
            if self.factor != 1:
                times = times.times(self.factor)
            self.known.blocks[id(flow)] = times
        return times

    @cached_property
    def factor(self) -> float:
        """Factor on layers of this shape, fitted to own runs."""
        return layer_factor(self.job, self.profile, self.network.system)

    def _block(self, stack: LayerStack, flow: GradFlow) -> OpTimes:
        linear = self.known.linear.get(id(flow))
        if linear is None:
            linear = self.known.linear[id(flow)] = self._linear(stack, flow)
        work, scores, repeated = OpTimes(), OpTimes(), OpTimes()
        work.add(linear.work)
        is_again = is_repeated(self.layout, self.profile, flow)
        sent = list(self.messages.over_cp(flow, is_again=is_again))
        self._send(work, (message for message in sent if message.kind != "all_to_all"))
        for core in flow.cores:
            self.attention.add(scores, core, flow)
            if repeats_core(self.layout, core):
                self.attention.add(repeated, core, flow)
        self.hiding.keys_and_values(work, scores, self._own_keys(flow))
        self._exchanges(work, (message for message in sent if message.kind == "all_to_all"))
        work.add(scores)
        self._host(work, flow)
        self._repeat(work, scores, repeated, linear.products, flow)
        return work

    def _exchanges(self, work: OpTimes, sent: Iterable[Message]) -> None:
        """Add exchanges of sequence for heads, which nothing hides, and the permutations before and behind
        them: each reads and writes the tensor once."""
        for message in sent:
            permuted = message.count * EXCHANGE_PASSES * message.bytes / self.speed.bandwidth
            seconds = self.network.seconds(message) / self._exchange(message)
            if message.phase == "forward":
                work.cp_forward += seconds
                work.forward += permuted
            else:
                work.cp_backward += seconds
                work.dgrad += permuted

    def _linear(self, stack: LayerStack, flow: GradFlow) -> LinearTimes:
        work, messages = OpTimes(), self.messages.over_tp(stack, flow)
        self._send(work, messages)
        self._products(work, flow, messages)
        products = work.forward
        self._hidden(work, stack.seq, flow)
        kernels, launch = self.costs.kernels, self.speed.other.launch
        work.forward += kernels.forward * launch
        work.dgrad += kernels.backward * launch * flow.after
        self._experts(work, flow, is_again=is_repeated(self.layout, self.profile, flow))
        self._accumulate(work, flow.trained)
        return LinearTimes(work, products)

    def _experts(self, work: OpTimes, flow: GradFlow, *, is_again: bool) -> None:
        """Add what brings rows to experts and back: messages and passes over memory."""
        if not flow.part.has_experts:
            return
        costs = self.profile.experts
        sent = {"forward": 0.0, "backward": 0.0, "recompute": 0.0}
        for message in self.messages.of_experts(flow, is_again=is_again):
            sent[message.phase] += self.network.seconds(message) / self._exchange(message)
        if not self.speed.waits:
            beside = [costs.beside * seconds for seconds in self._shared_seconds(flow)]
            for phase, seconds in zip(sent, (*beside, beside[0]), strict=True):
                sent[phase] -= min(costs.beside * sent[phase] / 2, seconds)
                sent[phase] *= 1 - costs.hidden
        work.ep_forward += sent["forward"]
        work.ep_backward += sent["backward"] + sent["recompute"]
        rows = float(self.sizes["routed"] * self.model.hidden * self.width)
        inner = float(self.sizes["routed"] * self.model.expert_width * self.width)
        inner *= (2 if self.model.gated else 1) / self.job.parallel.etp
        for _ in routed_layers(flow):
            self._passes(work, costs.permute, rows, flow)
            self._passes(work, costs.inner, inner, flow)
            if self.model.expert_bias:
                self._passes(work, costs.biased, rows, flow)
        work.forward += self.waits(flow)
        work.dgrad += self.waits(flow) * flow.after

    def waits(self, flow: GradFlow) -> float:
        """Seconds that a layer's forward waits for the numbers of experts' rows, and its backward too."""
        return 0.0 if self.speed.waits else len(routed_layers(flow)) * self.profile.experts.wait

    @cached_property
    def overlapped(self) -> float:
        """The share of exposed rows and waits that another micro batch's kernels hide."""
        return self.profile.experts.overlapped if self.job.training.moe_overlap and not self.speed.waits else 0.0

    def _shared_seconds(self, flow: GradFlow) -> tuple[float, float]:
        """Seconds of the shared experts' products, forward and backward."""
        ahead = back = 0.0
        for product in flow.part.products:
            if "shared_ffn" in product.weight:
                times = self.product_times(product, flow)
                ahead, back = ahead + times.forward, back + times.inputs + times.weights
        return ahead, back

    def _exchange(self, message: Message) -> float:
        """The share of a link's bandwidth for rings that an all-to-all reaches; of rows, which the
        fullest rank has more of, less."""
        if message.kind != "all_to_all":
            return 1.0
        costs = self.profile.experts
        is_once = self.messages.experts.dispatcher in ("deepep", "hybridep")
        reached = costs.once if is_once else costs.exchange
        return reached / self._load if message.what == ROWS else reached

    @cached_property
    def _load(self) -> float:
        """Rows of the fullest rank of experts over the mean."""
        return expert_load(self.layout).load

    def end(self, flow: GradFlow) -> OpTimes:
        """Seconds of an end, before the first or after the last layer of a stack; logits include their loss."""
        times = self.known.ends.get(id(flow))
        if times is None:
            times = self.known.ends[id(flow)] = self._end(flow)
        return times

    def _end(self, flow: GradFlow) -> OpTimes:
        work, messages = OpTimes(), self.messages.end(flow)
        experts = frozenset(EXPERT_UNIONS["etp_ep"]) | EXPERT_UNIONS.keys()
        self._send(work, (message for message in messages if message.axis not in experts))
        self._products(work, flow, messages)
        for product in flow.part.products:
            if product.is_lookup:
                hidden = self._bytes(*product.writes) / self.split
                self._passes(work, MemoryPasses(forward=ENTRY_PASSES, backward=ENTRY_PASSES), hidden, flow)
        work.add(self.loss(flow))
        self._experts(work, flow, is_again=False)
        if flow.cores:
            self._hidden(work, flow.cores[0].queries, flow)
        for core in flow.cores:
            self.attention.add(work, core, flow)
            self._host(work, flow)
        self._accumulate(work, tuple(w for w in flow.trained if len(w.shape) > 1))
        return work

    def loss(self, flow: GradFlow) -> OpTimes:
        """Casts, softmax and its gradient over the logits of an end, where it has any."""
        work, passes = OpTimes(), self.loss_passes
        for product in flow.part.products:
            if product.makes_logits:
                weight = product.matrix
                words = weight.shape[weight.dims.index("vocab")] // self.layout.grid.feature_parts
                logits = words * prod(self.sizes[dim] for dim in product.rows)
                needs = flow.needs[product.name].y
                work.pass_over(passes, logits, self.speed.bandwidth, backward=needs)
        return work

    def branches(self, seq: str, flow: GradFlow) -> OpTimes:
        """Norms, sums and dropout of all residual branches of a layer: its attentions and its MLP.
        seq: dimension of its sequence."""
        work = OpTimes()
        self._hidden(work, seq, flow)
        return work

    def _hidden(self, work: OpTimes, seq: str, flow: GradFlow) -> None:
        branches = sum(len(layer.branches) for layer in flow.part.layers)
        hidden = self._bytes("batch", seq, "hidden") / self.split
        self._passes(work, self.costs.hidden, hidden * branches, flow)
        if self.job.training.dropout:
            self._passes(work, self.costs.dropout, hidden * branches, flow)
        self._passes(work, NORM_PASSES, self._extra_norms(hidden, seq, flow), flow)

    def _extra_norms(self, hidden: float, seq: str, flow: GradFlow) -> float:
        """Bytes read and written by norms that the profile's passes of a branch do not count: a
        norm beyond one a branch, and norms of queries and keys.

        By hand, a layer of two branches with four norms, b 1, s 2, h 4 in bf16: 2 x 16 B.
        """
        model, size = self.model, 0.0
        for layer in flow.part.layers:
            size += max(0, len(layer.norms) - len(layer.branches)) * hidden
            columns = (model.heads + model.kv_heads) * model.head_size
            parts = self.layout.grid.feature_parts
            normed = [core for core in layer.cores if core.has_norms]
            size += len(normed) * self._bytes("batch", seq) * columns / parts
            latents = [core.latent + (model.q_lora_rank or 0) for core in layer.cores if core.latent]
            size += self._bytes("batch", seq) * sum(latents) / self.split
        return size

    def _repeat(self, work: OpTimes, scores: OpTimes, repeated: OpTimes, products: float, flow: GradFlow) -> None:
        training, tiled = self.job.training, OpTimes()
        for product in tiled_products(self.layout, flow):
            self._product(tiled, product, flow, ())
        if is_repeated(self.layout, self.profile, flow):
            work.again(work)
            if not repeats_last_product(self.layout, self.profile, flow):
                last = OpTimes()
                self._product(last, flow.part.products[-1], flow, ())
                work.dgrad -= last.forward
        elif training.recompute == "selective" and flow.after:
            if self.profile.operators.recompute == "core":
                for product in repeated_products(self.layout, self.profile, flow):
                    self._product(repeated, product, flow, ())
                work.again(OpTimes(repeated.forward))
            else:  # every other product, all memory-bound kernels, no attention
                bound = work.forward - products - scores.forward
                work.again(OpTimes(products / 2 + bound, host_forward=work.host_forward / 2))
        work.dgrad += tiled.forward

    def _host(self, work: OpTimes, flow: GradFlow) -> None:
        own = layer_host(self.profile.host, self.tp) + self.adapters.host(flow)
        own += self.profile.host.gather * (self.job.parallel.zero == 3)
        work.host_forward = own
        work.host_backward = 2 * own * flow.after

    @cached_property
    def _held(self) -> int:
        """Experts of a layer that this rank holds."""
        return (self.model.experts or 0) // self.job.parallel.ep

    def _bytes(self, *dims: str) -> float:
        return prod([self.sizes[dim] for dim in dims]) * self.width

    def _passes(self, work: OpTimes, passes: MemoryPasses, size: float, flow: GradFlow) -> None:
        work.pass_over(passes, size, self.speed.bandwidth, backward=flow.after)

    def _accumulate(self, work: OpTimes, trained: Sequence[ParameterSpec]) -> None:
        for weight in trained:
            is_added = adds_products(self.layout) and weight.view == DENSE and len(weight.shape) == 2
            costs = self.costs if is_added else self.profile.operators
            moved = costs.gradient_bytes * weight.local_numel(self.layout.views)
            work.wgrad += moved / self.speed.bandwidth

    def accumulation_seconds(self, parameters: int) -> float:
        """Seconds in which `parameters` gradients of a micro batch are added to those of the
        step."""
        return self.profile.operators.gradient_bytes * parameters / self.speed.bandwidth

    def optimizer_seconds(self, parameters: int) -> float:
        """Seconds in which a step moves gradients, moments and masters of `parameters`
        parameters."""
        moved = self.costs.optimizer_bytes * update_factor(self.job.training, self.profile.memory)
        return moved * parameters / self.speed.bandwidth

    def _products(self, work: OpTimes, flow: GradFlow, messages: Sequence[Message]) -> None:
        for product in flow.part.products:
            if not product.is_lookup:
                self._product(work, product, flow, messages)

    def _product(self, work: OpTimes, product: MatMul, flow: GradFlow, messages: Sequence[Message]) -> None:
        shape = self.shape(product)
        times = self._product_times(product, flow, shape)
        work.forward += self.steps * times.forward
        work.dgrad += self.steps * times.inputs
        work.wgrad += self.steps * times.weights
        self.hiding.product(work, product, messages, times)
        if product.adapts or product.is_stored:
            self.adapters.add(work, product, flow, shape)
        if not product.adapts:
            self._elementwise(work, product, flow, shape)

    def product_times(self, product: MatMul, flow: GradFlow) -> ProductTimes:
        """Each of the `steps` that a product is computed in."""
        return self._product_times(product, flow, self.shape(product))

    def _product_times(self, product: MatMul, flow: GradFlow, shape: Shape) -> ProductTimes:
        """Narrow operands are cast first: inputs and gradients each time, weights once a step or
        in every pass."""
        needs = flow.needs[product.name]
        m, k, n = shape
        if product.makes_logits and self.loss_chunks is not None:
            return self._chunked_times(self.loss_chunks, needs, shape)
        is_own_width = product.is_head or product.is_wide or product.adapts
        narrow = None if is_own_width else PRODUCT_BYTES.get(self.job.training.dtype)
        if product.is_stored and self.adapters.is_narrow:
            narrow = PRODUCT_BYTES["fp8"]
        rates, width = (self.speed.linear, narrow) if narrow else (self.speed.other, self.width)
        if product.is_grouped:
            return self._grouped_times(rates, width, needs, shape)
        casts = self.cast_seconds if narrow else 0.0
        shared = casts_shared(self.layout, self.profile)
        in_forward = casts * k * n / (shared or 1)
        forward = product_seconds(rates, m, k, n, width, self.width) + casts * k * m + in_forward
        inputs = weights = 0.0
        if needs.x:
            again = 0.0 if shared else in_forward
            inputs = product_seconds(rates, m, n, k, width, self.width) + casts * m * n + again
        if needs.w:
            weights = product_seconds(rates, k, m, n, width, self.gradient)
        return ProductTimes(forward, inputs, weights)

    def _chunked_times(self, chunks: LossChunks, needs: GradNeeds, shape: Shape) -> ProductTimes:
        """Seconds of a head whose logits are made chunk by chunk, in backward once more if both passes
        make them."""
        m, k, n = shape
        rows = chunks.rows(m, words=n, hidden=k)
        rates, width, count = self.speed.other, self.width, m / rows
        forward = count * product_seconds(rates, rows, k, n, width, width)
        again = forward * (chunks.repeats and needs.y)
        inputs = count * product_seconds(rates, rows, n, k, width, width) * needs.x
        weights = count * product_seconds(rates, k, rows, n, width, self.gradient) * needs.w
        return ProductTimes(forward, inputs + again, weights)

    def _grouped_times(self, rates: Rates, width: float, needs: GradNeeds, shape: Shape) -> ProductTimes:
        """Seconds of as many products as this rank has experts. shape: of one of them, with its part of the rows."""
        m, k, n = shape
        count = self._held
        speed = self.profile.experts.grouped if count > 1 else 1.0
        is_narrow = width < self.width
        casts = self.cast_seconds * count if is_narrow else 0.0
        shared = casts_shared(self.layout, self.profile)
        weights = casts * k * n / (shared or 1)
        out = self.width

        def seconds(*sides: int, result: float = out) -> float:
            return product_seconds(rates, *sides, width, result, count) / speed

        forward = seconds(m, k, n) + casts * k * m + weights
        inputs = seconds(m, n, k) + casts * m * n + (not shared) * weights if needs.x else 0.0
        of_weights = seconds(k, m, n, result=self.gradient) if needs.w else 0.0
        return ProductTimes(forward, inputs, of_weights)

    @cached_property
    def cast_seconds(self) -> float:
        """Seconds in which an element of a narrow operand is cast; current scaling may read it once
        more."""
        moved = self.profile.operators.cast_bytes * CASTS.get(self.job.training.dtype, 1.0)
        if self.job.training.fp8_recipe == "tensorwise":
            moved += self.profile.operators.tensorwise_passes * self.width
        return moved / self.speed.bandwidth

    def elementwise(self, products: Iterable[MatMul], flow: GradFlow) -> OpTimes:
        """Memory-bound kernels between matrix products: the activation of an MLP, splits of heads
        of an attention."""
        work = OpTimes()
        for product in products:
            self._elementwise(work, product, flow, self.shape(product))
        return work

    def _elementwise(self, work: OpTimes, product: MatMul, flow: GradFlow, shape: Shape) -> None:
        """Passes over the features that a product writes or reads on this rank."""
        operators, (_, k, n) = self.costs, shape
        features = n if "tp" in product.backward_axes else k
        dims = (*product.reads, *product.writes)
        is_inner = "ffn" in dims or "shared_ffn" in dims
        passes = operators.inner if is_inner else operators.width
        if is_inner or "heads" in (*product.reads, *product.writes):
            rows = prod([self.sizes[dim] for dim in product.rows])
            self._passes(work, passes, rows * features * self.width, flow)

    def of_adapters(self, flow: GradFlow) -> tuple[OpTimes, OpTimes]:
        """(products and passes of a layer's adapters, what reads its stored base), without messages."""
        adapters, base = OpTimes(), OpTimes()
        for product in flow.part.products:
            if product.adapts:
                self._product(adapters, product, flow, ())
            elif product.is_stored:
                self.adapters.add(base, product, flow, self.shape(product))
        return adapters, base

    @cached_property
    def steps(self) -> int:
        """Number of products that one matrix product is computed in: q in SUMMA, else one."""
        return self.layout.grid.axes.get("col", 1)

    def shape(self, product: MatMul) -> Shape:
        """Local rows, contraction and columns of each of the `steps`; in 1d rows are split where
        nothing else is."""
        weight, grid = product.matrix, self.layout.grid
        if product.is_grouped:
            return self._grouped_shape(product)
        m, k, n = prod([self.sizes[dim] for dim in product.rows]), 1, 1
        for dim, size in zip(weight.dims, weight.shape, strict=True):
            is_feature = AXIS_OF_DIM.get(dim) == "tp"
            local = size // (grid.feature_parts if is_feature else grid.hidden_parts)
            k, n = (k * local, n) if dim in product.reads else (k, n * local)
        if product.name.endswith("key_value_up") and self.messages.gathers_latents:
            m *= self.job.parallel.cp  # keys and values of the full sequence
        if grid.mode == "3d":
            m *= grid.axes["weight"]  # samples are gathered along one of the two axes that cut them
        return (m if weight.is_split else m // self.split), k, n

    def _grouped_shape(self, product: MatMul) -> Shape:
        """Rows, contraction and columns of the product of one expert."""
        weight, k = product.matrix, 1
        held = weight.local_numel(self.layout.views) // self._held
        for dim, size in zip(weight.dims, weight.shape, strict=True):
            if dim in product.reads:
                k = size // (self.job.parallel.etp if dim == "expert_ffn" else 1)
        rows = -(-self.sizes["routed"] // (self._held * LEAST_ROWS)) * LEAST_ROWS
        return rows, k, held // k

    def _send(self, work: OpTimes, messages: Iterable[Message]) -> None:
        """Add the seconds of messages over tp and cp, by pass; a repeated forward is part of
        backward."""
        for message in messages:
            seconds = self.network.seconds(message)
            is_cp = message.axis in ("cp", *CP_GROUPS)
            if is_cp and message.phase == "forward":
                work.cp_forward += seconds
            elif is_cp:
                work.cp_backward += seconds
            elif message.phase == "forward":
                work.tp_forward += seconds
            else:
                work.tp_backward += seconds
