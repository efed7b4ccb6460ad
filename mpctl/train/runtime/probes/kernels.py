"""Times kernels on the ranks of a mesh, in rounds of all cases, each on several numbers of ranks.

In a round the operands of a case are made, and each number of ranks n runs it once: ranks 0 to n-1
at the same time, while the others wait at a barrier. The first run of each copy of the operands is
a warm-up; in round 0 a further run determines how often the kernel is repeated, so that a timing
takes `least_seconds`.

Kernels are called as training calls them. Products are torch's own, in the three layouts of a
linear layer (train/layers/linear.py); products of experts (train/kernels/grouped.py), attention, norms,
activations, cross entropy, AdamW and the layer are this project's. A backward runs through
autograd, from a graph that is made once and kept.

Letters: m rows, k in, n out; b batch, a heads, k key-value heads, q queries, s keys, d head size,
h hidden, v words.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

import torch
import torch.nn.functional as F
from torch import Tensor

from mpctl.records.rundir.requests import KernelCase, KernelName, KernelRequest, KernelTiming, sized_layer
from mpctl.spec.job import JobSpec
from mpctl.spec.model import ModelSpec
from mpctl.train.families.parts import layer_config
from mpctl.train.kernels.backend import KernelBackend
from mpctl.train.kernels.counter_rng import CounterRNG
from mpctl.train.kernels.grouped import RowGroups, grouped_input_gradient, grouped_output, grouped_weight_gradient
from mpctl.train.layers.attention import AttentionConfig, AttentionCore
from mpctl.train.layers.cross_entropy import vocab_parallel_cross_entropy
from mpctl.train.layers.linear import ALONE
from mpctl.train.layers.parameters import initialise
from mpctl.train.layers.shard_context import ShardContext
from mpctl.train.runtime.kernel_choice import machine_kernels
from mpctl.train.runtime.mesh import Mesh
from mpctl.train.runtime.optimizer import TORCH_DTYPES, ParameterGroup, UpdateRule
from mpctl.train.runtime.probes.layers import ProbedLayer
from mpctl.train.runtime.probes.measure import agreed_rounds, time_runs
from mpctl.train.runtime.step_record import TrafficCounter
from mpctl.train.runtime.zero.gradients import squared_norm

Work = Callable[[], object]
"""One run of a kernel, which may be repeated."""
SITE = "bench"  # names random numbers


@dataclass(frozen=True)
class Bench:
    """Setup of a kernel's benchmark. job: its model gives details missing from the case's shape
    (norm, activation, dropout, biases of scores); kernels: those of a training on `device`."""

    case: KernelCase
    job: JobSpec
    device: torch.device
    kernels: KernelBackend

    @property
    def shape(self) -> dict[str, int]:
        """Sizes by name."""
        return self.case["shape"]

    @property
    def dtype(self) -> torch.dtype:
        """The data type of the operands."""
        return TORCH_DTYPES[self.case["dtype"]]

    @property
    def model(self) -> ModelSpec:
        """The job's model."""
        assert self.job.model is not None, "kernels are of a model"
        return self.job.model

    @property
    def context(self) -> ShardContext:
        """The context of a single rank in the case's dtype."""
        return ShardContext(dtype=self.dtype, device=self.device, backend=self.kernels)

    def random(self, *sizes: int, grad: bool = False) -> Tensor:
        """Normally distributed numbers; grad: requires_grad."""
        return torch.randn(sizes, dtype=self.dtype, device=self.device).requires_grad_(grad)

    def rng(self, samples: int) -> CounterRNG:
        """The dropout masks of this number of samples."""
        return CounterRNG(0, 0, torch.arange(samples, device=self.device))

    def passes(self, forward: Callable[[], Tensor | Sequence[Tensor]], inputs: Sequence[Tensor]) -> Work:
        """The forward, or the backward of one forward to these inputs, as the case says."""
        if self.case["part"] == "forward":
            return forward
        made = forward()
        results = [made] if isinstance(made, Tensor) else made
        gradients = [torch.randn_like(result) for result in results]
        return lambda: torch.autograd.grad(results, inputs, gradients, retain_graph=True)


def _matmul(bench: Bench) -> Work:
    m, k, n = (bench.shape[name] for name in "mkn")
    part, weight = bench.case["part"], bench.random(n, k)
    if part == "forward":
        x = bench.random(m, k)
        return lambda: F.linear(x, weight)
    gradient = bench.random(m, n)
    if part == "backward_input":
        return lambda: gradient @ weight
    x = bench.random(m, k)
    return lambda: gradient.T @ x


def _grouped_matmul(bench: Bench) -> Work:
    """The matrices of all experts with m rows each."""
    experts, m, k, n = (bench.shape[name] for name in ("experts", *"mkn"))
    part, weight = bench.case["part"], bench.random(experts, n, k)
    groups = RowGroups(torch.full((experts,), m, device=bench.device), [m] * experts)
    if part == "forward":
        rows = bench.random(experts * m, k)
        return lambda: grouped_output(rows, weight, groups)
    gradient = bench.random(experts * m, n)
    if part == "backward_input":
        return lambda: grouped_input_gradient(gradient, weight, groups)
    rows = bench.random(experts * m, k)
    return lambda: grouped_weight_gradient(gradient, rows, groups)


def _attention(bench: Bench) -> Work:
    """Memory is laid out [b, s, heads, d], as a projection writes it. Under context parallelism a
    causal rank has a block at the start of the sequence and one at its end, which attend to
    different prefixes of the keys (train/layers/context_parallel.py)."""
    b, a, k, q, s, d = (bench.shape[name] for name in ("batch", "heads", "kv_heads", "queries", "keys", "head_dim"))
    v = bench.shape.get("value_dim", d)
    query, key, value = (
        bench.random(b, rows, heads, width).transpose(1, 2).requires_grad_()
        for heads, rows, width in ((a, q, d), (k, s, d), (k, s, v))
    )
    core, rng, half = _core(bench), bench.rng(b), q // 2
    bias = bench.random(1, a, q, s, grad=True) if bench.shape["bias"] else None
    mask = None
    if bench.shape["sample_mask"]:
        mask = torch.ones(b, 1, q, s, dtype=torch.bool, device=bench.device).tril()

    def forward() -> Tensor:
        if not core.config.causal or q == s:
            return core(query, key, value, rng, mask=mask, bias=bias)
        first = core(query[..., :half, :], key[..., :half, :], value[..., :half, :], rng)
        last = core(query[..., half:, :], key, value, rng, rows=range(s - q + half, s))
        return torch.cat([first, last], dim=-2)

    return bench.passes(forward, [query, key, value, *([] if bias is None else [bias])])


def _core(bench: Bench) -> AttentionCore:
    model, shape = bench.model, bench.shape
    config = AttentionConfig(
        shape["heads"] * shape["head_dim"],
        shape["heads"],
        kv_heads=shape["kv_heads"],
        head_dim=shape["head_dim"],
        causal=bool(shape["causal"]),
        scale=model.attention_scale,
        dropout=bench.job.training.attention_dropout,
        window=shape["window"] or None,
        alibi=model.position == "alibi",
    )
    return AttentionCore(config, bench.context, SITE)


def _heads(bench: Bench) -> Work:
    b, s, a, k, d = (bench.shape[name] for name in ("batch", "positions", "heads", "kv_heads", "head_dim"))
    fused = bench.random(b, s, (a + 2 * k) * d, grad=True)
    attended = bench.random(b, s, a, d).transpose(1, 2).requires_grad_()
    config = layer_config(bench.model, bench.job.training, causal=True)
    rotary = config.attention.rotary
    turns = None if rotary is None else rotary.table(range(s), fused)

    def forward() -> list[Tensor]:
        # [b, s, (a+2k)*d] -> [b, a, s, d] and 2 of [b, k, s, d]
        parts = fused.unflatten(-1, (-1, d)).transpose(1, 2).split((a, k, k), dim=1)
        query, key, value = parts
        if turns is not None:
            query, key = (bench.kernels.rotate(x, *turns) for x in (query, key))
        # [b, a, s, d] -> [b, s, a*d]
        return [query, key, value, attended.transpose(1, 2).flatten(2)]

    return bench.passes(forward, [fused, attended])


def _branch(bench: Bench) -> Work:
    """x + drop(norm(x)), with a second norm if the branch also normalises its result."""
    model, context = bench.model, bench.context
    rows, hidden = bench.shape["rows"], bench.shape["hidden"]
    norms = [
        context.norm(model.norm, hidden, eps=model.norm_epsilon) for _ in range(1 + (model.norm_order == "sandwich"))
    ]
    for norm in norms:
        initialise(norm, 0)
    x, rng = bench.random(1, rows, hidden, grad=True), bench.rng(1)
    weights = [p for norm in norms for p in norm.parameters()]

    def forward() -> Tensor:
        result = x
        for norm in norms:
            result = norm(result)
        p = bench.job.training.dropout
        return context.dropout_add(result, rng, p, x, rng_site=SITE)

    return bench.passes(forward, [x, *weights])


def _activation(bench: Bench) -> Work:
    x = bench.random(bench.shape["rows"], bench.shape["columns"], grad=True)
    return bench.passes(lambda: bench.kernels.activation(x, bench.model.activation), [x])


def _cross_entropy(bench: Bench) -> Work:
    rows, words = bench.shape["rows"], bench.shape["words"]
    logits = bench.random(1, rows, words, grad=True)
    targets = torch.randint(words, (1, rows), device=bench.device)
    return bench.passes(
        lambda: vocab_parallel_cross_entropy(logits, targets, group=ALONE, first=0, backend=bench.kernels), [logits]
    )


def _optimizer(bench: Bench) -> Work:
    """Norm, clipping and AdamW of float32 (float64) values, the copy to 16-bit parameters, zeroing.
    The tensor that is zeroed is a separate one: gradients of 0 would make the moments subnormal."""
    count, wide = bench.shape["elements"], torch.promote_types(bench.dtype, torch.float32)
    value, gradient, other = bench.random(3, count).to(wide).unbind()
    value.grad = gradient
    parameter = None if wide == bench.dtype else value.to(bench.dtype)
    adam = UpdateRule([ParameterGroup([value], 0.01)], 0.9, 0.95, 1e-8)

    def step() -> None:
        float(squared_norm([gradient], bench.device).sqrt())
        gradient.mul_(1.0)
        adam.step(1e-4)
        if parameter is not None:
            parameter.copy_(value)
        other.zero_()

    return step


def _accumulate(bench: Bench) -> Work:
    gradient = bench.random(bench.shape["elements"])
    total = torch.zeros_like(gradient, dtype=torch.promote_types(bench.dtype, torch.float32))
    return lambda: total.add_(gradient)


def _triad(bench: Bench) -> Work:
    a, b, c = _arrays(bench, 3)
    return lambda: torch.add(b, c, alpha=3.0, out=a)


def _copy(bench: Bench) -> Work:
    a, b = _arrays(bench, 2)
    return lambda: a.copy_(b)


def _arrays(bench: Bench, count: int) -> list[Tensor]:
    size = bench.shape["elements"]
    return [torch.full((size,), i + 1.0, dtype=bench.dtype, device=bench.device) for i in range(count)]


def _layer(bench: Bench) -> Work:
    shape = bench.shape
    training = bench.job.training.model_copy(update={"micro_batch_size": shape["micro_batch_size"]})
    parts = {"model": sized_layer(bench.model, shape), "training": training}
    job = bench.job.model_copy(update=parts)
    layer = ProbedLayer.of(job, bench.context, TrafficCounter(), causal=bool(shape["causal"]))
    return layer.run if bench.case["part"] == "both" else lambda: layer.module(layer.hidden)


_MAKERS: dict[KernelName, Callable[[Bench], Work]] = {
    "matmul": _matmul,
    "grouped_matmul": _grouped_matmul,
    "attention": _attention,
    "unfused_attention": _attention,
    "heads": _heads,
    "branch": _branch,
    "activation": _activation,
    "cross_entropy": _cross_entropy,
    "optimizer": _optimizer,
    "accumulate": _accumulate,
    "triad": _triad,
    "copy": _copy,
    "layer": _layer,
}


def make_kernel(bench: Bench) -> Work:
    """One kernel with its operands, to be run any number of times."""
    return _MAKERS[bench.case["kernel"]](bench)


MOST_REPEATS, TRIALS = 10_000, 3


def probe_kernels(request: KernelRequest, job: JobSpec, mesh: Mesh) -> Iterator[KernelTiming]:
    """The answers to a request, the same on every rank of `mesh`, which all call it. job: its model
    and training give the details that the shapes do not (norm, activation, dropout)."""
    dropout = {name: request[name] for name in ("dropout", "attention_dropout")}
    job = job.model_copy(update={"training": job.training.model_copy(update=dropout)})
    kernels, repeats = machine_kernels(mesh.device, mesh.world), dict[int, int]()
    for number in agreed_rounds(mesh, request["rounds"], request["seconds"]):
        for place, case in enumerate(request["cases"]):
            bench = Bench(case, job, mesh.device, kernels)
            works = [make_kernel(bench) for _ in range(case["copies"])]
            for work in works:
                work()
            if place not in repeats:
                repeats[place] = _repeats(works, request["least_seconds"], mesh)
            runs = list(islice(cycle(works), repeats[place]))
            for ranks in request["ranks"]:
                seconds, cpu = time_runs(mesh, runs, ranks)
                yield {
                    "event": "kernel",
                    "round": number,
                    "case": place,
                    "ranks": ranks,
                    "seconds": seconds,
                    "cpu_seconds": cpu,
                    "repeats": repeats[place],
                }


def _repeats(works: Sequence[Work], least: float, mesh: Mesh) -> int:
    """Return the number of runs of a kernel in a timing, the same on all ranks. It follows from the
    shortest of several runs, since an interrupted run would give too small a number."""
    seconds = min(time_runs(mesh, works[:1], 1)[0] for _ in range(TRIALS))
    return min(MOST_REPEATS, max(1, math.ceil(least / max(seconds, 1e-9))))
