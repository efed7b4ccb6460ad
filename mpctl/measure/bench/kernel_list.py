"""The kernels that a rank of a layout runs: shape, work, and the planner's estimate of each.

All come from the sources of a plan: products and attentions from the operator table at their local
shapes, seconds from the estimate's functions. Equal kernels of one dtype are measured once, under
the name of the first.

`flops` are those that a kernel computes, `bytes` the least that must be read and written, each
tensor once: X [512, 256] W [256, 1024] in fp32 are 2 x 512 x 256 x 1024 = 268 MFLOP and 4 (512 x
256 + 256 x 1024 + 512 x 1024) = 3.67 MB. A fused attention's backward computes 2.5 times its
forward's FLOP; STREAM's triad moves three arrays, its copy two (J. McCalpin, STREAM, 1995). In
training other tensors pass through the caches before a kernel runs again, so that it is timed with
several copies of its operands in turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import ceil, prod

from mpctl.model.layout.job_layout import JobLayout
from mpctl.model.operators.grad_flow import GradFlow
from mpctl.model.operators.layer import AttentionOp, LayerStack
from mpctl.model.operators.matmul import MatMul
from mpctl.plan.estimate.attention import fused_pairs, keeps_no_scores
from mpctl.plan.estimate.flops import ALL, FORWARD, block_flops
from mpctl.plan.estimate.host_times import layer_host
from mpctl.plan.estimate.kernels import BACKWARD, OpTimes, pace
from mpctl.plan.estimate.system import MEASURED
from mpctl.plan.estimate.time import StepTimeModel, step_time_model
from mpctl.records.rundir.requests import LAYER_SIZES, KernelCase, KernelName, KernelPart, sized_layer
from mpctl.spec.base import DType
from mpctl.spec.model import ModelSpec

CACHE_BYTES, MOST_COPIES = 2**25, 8  # more than the cache of a core holds
FLAGS = ("causal", "window", "bias", "sample_mask")  # of a shape, no part of a name


@dataclass(frozen=True)
class PlannedKernel:
    """A kernel before it is timed. site: where the model has it, such as `layers.mlp.up`. flops,
    bytes: computed, and read or written at least. predicted_seconds: None where the cluster does
    not describe the device. is_compute: whether its share of the peak is of FLOP/s, else of the
    memory's bytes/s."""

    site: str
    case: KernelCase
    flops: float
    bytes: float
    predicted_seconds: float | None
    is_compute: bool = False

    @property
    def is_layer(self) -> bool:
        return self.case["kernel"] == "layer"

    @property
    def name(self) -> str:
        """`matmul layers.mlp.up forward 512x256x1024 fp32`, the same in every run."""
        case = self.case
        sizes = case_sizes(case["shape"])
        return f"{case['kernel']} {self.site} {case['part']} {sizes} {case['dtype']}"


def case_copies(moved: float) -> int:
    """Number of copies, used in turn, of operands of `moved` bytes.

    >>> case_copies(3.67e6), case_copies(2**24), case_copies(2**30)
    (8, 2, 1)
    """
    return min(MOST_COPIES, max(1, ceil(CACHE_BYTES / moved)))


def case_sizes(shape: Mapping[str, int]) -> str:
    """The sizes of a case in its name, without flags.

    >>> case_sizes({"batch": 8, "queries": 64, "causal": 1})
    '8x64'
    """
    return "x".join(str(size) for name, size in shape.items() if name not in FLAGS)


TINY = {"hidden": 64, "heads": 4, "kv_heads": 4, "head_dim": 16, "ffn": 128, "seq_length": 8}
"""Sizes of a layer whose kernels take next to no time, so that only the host's time is left."""
MOST_PARAMETERS = 2**24  # of a layer, to step: more take as long each


@dataclass(frozen=True)
class KernelLister:
    """The kernels of a layout. time_model: of the job's layout; alone: of the same layer on one
    rank, without dropout, recomputation and freezing; array: bytes of one of the streams' arrays."""

    time_model: StepTimeModel
    alone: StepTimeModel
    array: int

    @property
    def layout(self) -> JobLayout:
        return self.time_model.layout

    @cached_property
    def dtype(self) -> DType:
        return self.layout.job.training.chosen_dtype

    @property
    def width(self) -> int:
        """Bytes of an element."""
        return self.time_model.operators.width

    def kernels(self) -> list[PlannedKernel]:
        """Every kernel once, in execution order."""
        found: dict[tuple[object, ...], PlannedKernel] = {}
        for kernel in self._all():
            case = kernel.case
            found.setdefault((case["kernel"], case["part"], *sorted(case["shape"].items())), kernel)
        return list(found.values())

    def _all(self) -> Iterator[PlannedKernel]:
        for stack, flows in zip(self.layout.table.stacks, self.layout.table.flows, strict=True):
            yield from self._end(flows.entry)
            if flows.last is not None:
                yield from self._block(stack, flows.last)
            yield from self._end(flows.exit)
        yield from self._layer("layers", self.alone)
        yield from self._layer("tiny", self._tiny)
        yield from self._streams()

    def _block(self, stack: LayerStack, flow: GradFlow) -> Iterator[PlannedKernel]:
        for product in flow.part.products:
            yield from self._product(f"{stack.prefix}.{product.name}", product, flow)
        for core in flow.cores:
            yield from self._attention(f"{stack.prefix}.{core.part}", core, flow)
            yield from self._heads(f"{stack.prefix}.{core.part}", core, flow)
        yield from self._branch(stack, flow)
        yield from self._activation(stack, flow)
        yield from self._update(stack.prefix, flow)

    def _end(self, flow: GradFlow) -> Iterator[PlannedKernel]:
        for product in flow.part.products:
            yield from self._product(product.name, product, flow)
            if product.makes_logits:
                rows, _, words = self.time_model.operators.shape(product)
                yield from self._cross_entropy(product.name, flow, rows, words)

    def _product(self, site: str, product: MatMul, flow: GradFlow) -> Iterator[PlannedKernel]:
        if product.is_lookup:
            return
        operators = self.time_model.operators
        m, k, n = operators.shape(product)
        shape, moved = {"m": m, "k": k, "n": n}, self.width * (m * k + k * n + m * n)
        times, flops = operators.product_times(product, flow), 2.0 * m * k * n
        name: KernelName = "matmul"
        if product.is_grouped:  # rows are those of one expert
            name, held = "grouped_matmul", self._experts
            shape, moved, flops = {"experts": held, **shape}, held * moved, held * flops
        parts: tuple[KernelPart, ...] = ("forward", "backward_input", "backward_weight")
        for part, seconds in zip(parts, times, strict=True):
            if seconds:
                yield self._kernel(name, site, part, shape, seconds, moved, flops)

    @property
    def _experts(self) -> int:
        """Experts of a layer on each rank."""
        return (self.layout.model.experts or 0) // self.layout.job.parallel.ep

    def _attention(self, site: str, core: AttentionOp, flow: GradFlow) -> Iterator[PlannedKernel]:
        timer, model, grid = self.time_model.operators.attention, self.layout.model, self.layout.grid
        batch, queries = timer.sizes["batch"], timer.sizes[core.queries]
        keys = timer.sizes[core.keys] * self.layout.job.parallel.cp
        heads, kv_heads = (n // grid.feature_parts for n in (model.heads, model.kv_heads))
        shape = {
            "batch": batch,
            "heads": heads,
            "kv_heads": max(1, kv_heads),
            "queries": queries,
            "keys": keys,
            "head_dim": model.qk_size,
            "causal": int(core.is_causal),
            "window": core.window,
            "bias": int(core.has_bias),
            "sample_mask": int(core.has_sample_mask),
        }
        if model.v_size != model.qk_size:
            shape["value_dim"] = model.v_size
        is_fused, sizes = keeps_no_scores(self.layout), model.qk_size + model.v_size
        pairs = fused_pairs(self.layout, core, queries, keys) if is_fused else queries * keys
        flops, work = 2.0 * batch * pairs * heads * sizes, OpTimes()
        timer.add(work, core, flow)
        name: KernelName = "attention" if is_fused else "unfused_attention"
        rows = queries * heads + keys * shape["kv_heads"]  # Q and O; K and V
        moved = self.width * batch * rows * sizes
        more = BACKWARD if is_fused else 2.0
        yield from self._both(name, site, shape, work, (moved, 2 * moved), (flops, more * flops))

    def _heads(self, site: str, core: AttentionOp, flow: GradFlow) -> Iterator[PlannedKernel]:
        """Head kernels of self-attention: rotary positions read and write queries and keys,
        backward also concatenates the three gradients. Without rotary positions forward moves
        nothing: heads are views."""
        if core.query_product != core.key_product:
            return
        operators, model, grid = self.time_model.operators, self.layout.model, self.layout.grid
        own = [p for p in flow.part.products if p.part == core.part]
        work, sizes = operators.elementwise(own, flow), operators.sizes
        heads, kv_heads = (max(1, n // grid.feature_parts) for n in (model.heads, model.kv_heads))
        shape = {
            "batch": sizes["batch"],
            "positions": sizes[core.queries],
            "heads": heads,
            "kv_heads": kv_heads,
            "head_dim": model.head_size,
        }
        head = 2.0 * self.width * sizes["batch"] * sizes[core.queries] * model.head_size
        turned = head * (heads + kv_heads) * (model.position == "rotary")
        back = head * (heads + 2 * kv_heads) + turned
        yield from self._both("heads", site, shape, work, (turned, back))

    def _branch(self, stack: LayerStack, flow: GradFlow) -> Iterator[PlannedKernel]:
        """A norm reads and writes, a sum reads two tensors and writes one, dropout reads and
        writes; backward a norm reads two and writes one."""
        operators, count = self.time_model.operators, len(flow.part.branches)
        work, sizes = operators.branches(stack.seq, flow), operators.sizes
        rows = sizes["batch"] * sizes[stack.seq] // operators.split
        shape = {"rows": rows, "hidden": sizes["hidden"]}
        more = 2 * bool(self.layout.job.training.dropout)
        norms = int(self.layout.model.norm_order == "sandwich")
        size = self.width * prod(shape.values())
        moved = (5 + more + 2 * norms) * size, (6 + more + 3 * norms) * size
        each = OpTimes(work.forward / count, work.dgrad / count)
        yield from self._both("branch", stack.prefix, shape, each, moved)

    def _activation(self, stack: LayerStack, flow: GradFlow) -> Iterator[PlannedKernel]:
        products = [p for p in flow.part.products if "ffn" in (*p.reads, *p.writes)]
        up = next((p for p in products if "ffn" in p.writes), None)
        if up is None:
            return
        operators = self.time_model.operators
        rows, _, columns = operators.shape(up)
        work, shape = operators.elementwise(products, flow), {"rows": rows, "columns": columns}
        results = columns // 2 if self.layout.model.gated else columns
        read, written = self.width * rows * columns, self.width * rows * results
        site = f"{stack.prefix}.{up.part}"
        moved = read + written, 2 * read + written
        yield from self._both("activation", site, shape, work, moved)

    def _cross_entropy(self, site: str, flow: GradFlow, rows: int, words: int) -> Iterator[PlannedKernel]:
        work, shape = self.time_model.operators.loss(flow), {"rows": rows, "words": words}
        size = self.width * rows * words
        yield from self._both("cross_entropy", site, shape, work, (size, 2 * size))

    def _update(self, site: str, flow: GradFlow) -> Iterator[PlannedKernel]:
        """AdamW reads and writes a value and two moments and reads a gradient, all of float32; the
        norm reads the gradient, clipping reads and writes it, zeroing writes it."""
        own = sum(weight.local_numel(self.layout.views) for weight in flow.trained)
        count = min(own, MOST_PARAMETERS)
        if not count:
            return
        operators, shape = self.time_model.operators, {"elements": count}
        least = max(4, self.width)
        seconds = operators.optimizer_seconds(count)
        yield self._kernel("optimizer", site, "update", shape, seconds, 11 * least * count)
        seconds, wide = operators.accumulation_seconds(count), operators.gradient
        moved = (self.width + 2 * wide) * count
        yield self._kernel("accumulate", site, "update", shape, seconds, moved)

    def _layer(self, site: str, time_model: StepTimeModel) -> Iterator[PlannedKernel]:
        layout, (ahead, back) = time_model.layout, layer_seconds(time_model)
        flow, model = layout.table.flows[0].runs[0][1], layout.model
        batch = layout.job.training.micro_batch_size
        shape = {"micro_batch_size": batch, **{name: _size(model, name) for name in LAYER_SIZES}}
        shape["causal"] = int(layout.table.stacks[0].block_of(0).cores[0].is_causal)
        weights = self.width * sum(weight.numel for weight in flow.part.weights)
        hidden = self.width * batch * model.seq_length * model.hidden
        flops = block_flops(layout, flow, FORWARD), block_flops(layout, flow, ALL)
        moved = weights + 2.0 * hidden, 3 * weights + 4.0 * hidden
        yield self._kernel("layer", site, "forward", shape, ahead, moved[0], flops[0])
        yield self._kernel("layer", site, "both", shape, ahead + back, moved[1], flops[1])

    @cached_property
    def _tiny(self) -> StepTimeModel:
        job = self.alone.layout.job
        training = job.training.model_copy(update={"micro_batch_size": 1})
        parts = {"model": sized_layer(self.layout.model, TINY), "training": training}
        return step_time_model(JobLayout.of(job.model_copy(update=parts)), system=MEASURED)

    def _streams(self) -> Iterator[PlannedKernel]:
        shape = {"elements": self.array // self.width}
        size, bandwidth = self.width * shape["elements"], self.time_model.operators.speed.bandwidth
        yield self._kernel("triad", "memory", "update", shape, 3 * size / bandwidth, 3 * size)
        yield self._kernel("copy", "memory", "update", shape, 2 * size / bandwidth, 2 * size)

    def _both(
        self,
        kernel: KernelName,
        site: str,
        shape: Mapping[str, int],
        work: OpTimes,
        moved: tuple[float, float],
        flops: tuple[float, float] = (0.0, 0.0),
    ) -> Iterator[PlannedKernel]:
        """Forward, where it moves anything, and backward, where it is computed."""
        if moved[0]:
            yield self._kernel(kernel, site, "forward", shape, work.forward, moved[0], flops[0])
        if work.dgrad:
            yield self._kernel(kernel, site, "backward", shape, work.dgrad, moved[1], flops[1])

    def _kernel(
        self,
        kernel: KernelName,
        site: str,
        part: KernelPart,
        shape: Mapping[str, int],
        seconds: float,
        moved: float,
        flops: float = 0.0,
    ) -> PlannedKernel:
        own = 1 if kernel == "layer" else case_copies(moved)
        case: KernelCase = {"kernel": kernel, "part": part, "dtype": self.dtype, "shape": dict(shape), "copies": own}
        return PlannedKernel(site, case, flops, moved, seconds, flops > 0)


def layer_seconds(time_model: StepTimeModel) -> tuple[float, float]:
    """Seconds of forward and of backward of one layer, its kernels paced by their host thread as in
    a plan: one after the other where the host waits for each kernel, as on a CPU."""
    kernels, speed = time_model.layer(), time_model.operators.speed
    host = speed.host * layer_host(time_model.operators.profile.host, time_model.job.parallel.tp)
    paced = sum if speed.waits else pace
    return paced((kernels.forward, host)), paced((kernels.backward, 2 * host))


def _size(model: ModelSpec, name: str) -> int:
    size: int = model.head_size if name == "head_dim" else getattr(model, name)
    return size
