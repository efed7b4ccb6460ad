"""FLOP of matrix products: 2mnk forward, as many again for dX and for dW.

Of every product of the operator table and of attention's two score products (causal ones count
whole, as kernels without flash skipping do), with full recomputation one more forward (Narayanan et
al., arXiv 2104.04473, eq. 3: 72 or 96 per B s L h^2). Where parameters are frozen, a product lacks
the passes of the gradients that it does not compute. A schedule that runs the backward in two takes
dW alone for its second part: what is run again and the scores belong to the first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from math import prod

from mpctl.estimate.communication import local_sizes
from mpctl.estimate.recompute import is_repeated
from mpctl.layout.job_layout import JobLayout
from mpctl.operators.grad_flow import GradFlow
from mpctl.operators.matmul import AttentionOp
from mpctl.operators.table import StageSlice
from mpctl.pipeline.schedule.orders import Kind
from mpctl.spec.runtime import get_profile

ALL: tuple[Kind, ...] = ("forward", "backward")
FORWARD: tuple[Kind, ...] = ("forward",)


def step_flops(layout: JobLayout, stage: int) -> float:
    """FLOP of one rank of a stage in one step, forward and backward."""
    return pass_flops(layout, layout.stage_slices(stage)) * layout.num_microbatches


def model_and_hardware_flops(layout: JobLayout) -> tuple[float, float]:
    """Of a rank on the average in one step; the second with what recomputation repeats: with
    selective recomputation the scores (arXiv 2205.05198, eq. 7 and 8)."""
    table, plain, repeated = layout.table, 0.0, 0.0
    for stack, flow in zip(table.stacks, table.flows, strict=True):
        for run, kind in flow.runs:
            plain += len(run) * block_flops(layout, stack.cores, kind, again=0)
            repeated += len(run) * _repeated(layout, stack.cores, kind)
        plain += sum(end_flops(layout, end) for end in (flow.entry, flow.exit))
    share = layout.num_microbatches / layout.job.parallel.pp
    return plain * share, (plain + repeated) * share


def _repeated(layout: JobLayout, cores: Sequence[AttentionOp], flow: GradFlow) -> float:
    if is_repeated(layout, get_profile(layout.job.training.runtime), flow):
        return block_flops(layout, cores, flow, FORWARD, again=0)
    if layout.job.training.recompute != "selective":
        return 0.0
    return sum((_core_flops(layout, core, flow, 0, FORWARD) for core in cores), 0.0)


def pass_flops(
    layout: JobLayout, slices: Iterable[StageSlice], kinds: Collection[Kind] = ALL
) -> float:
    """FLOP of one micro batch through these slices, on one rank."""
    total = 0.0
    for part in slices:
        for layers, flow in part.blocks:
            total += layers * block_flops(layout, part.stack.cores, flow, kinds)
        total += sum(end_flops(layout, end, kinds) for end in part.ends)
    return total


def block_flops(
    layout: JobLayout,
    cores: Sequence[AttentionOp],
    flow: GradFlow,
    kinds: Collection[Kind] = ALL,
    again: int | None = None,
) -> float:
    """One layer and micro batch. again: forwards repeated; what the job's recomputation says."""
    if again is None:
        again = int(is_repeated(layout, get_profile(layout.job.training.runtime), flow))
    scores = sum(_core_flops(layout, core, flow, again, kinds) for core in cores)
    return _part_flops(layout, flow, again, kinds) + scores


def end_flops(layout: JobLayout, flow: GradFlow, kinds: Collection[Kind] = ALL) -> float:
    """One end of a stack and micro batch."""
    return _part_flops(layout, flow, 0, kinds)


def _passes(kinds: Collection[Kind], *, inputs: int, weights: int = 0) -> int:
    """Products of one size in actions of these kinds."""
    counts: dict[Kind, int] = {
        "forward": 1, "backward": inputs + weights,
        "backward_input": inputs, "backward_weight": weights,
    }  # fmt: skip
    return sum(counts[kind] for kind in kinds)


def _core_flops(
    layout: JobLayout,
    core: AttentionOp,
    flow: GradFlow,
    again: int,
    kinds: Collection[Kind],
) -> float:
    """q k^T and p v of one micro batch on one rank, forward, `again`, and once more for each of
    queries and keys that needs a gradient; keys are of the whole sequence."""
    gradients = flow.needs[core.query_product].y + flow.needs[core.key_product].y
    passes = _passes(kinds, inputs=again + gradients)
    sizes, p = local_sizes(layout), layout.job.parallel
    pairs = sizes["batch"] * sizes[core.queries] * sizes[core.keys] * p.cp
    return passes * 4 * pairs * layout.model.heads * layout.model.head_size / p.tp


def _part_flops(layout: JobLayout, flow: GradFlow, again: int, kinds: Collection[Kind]) -> float:
    """2 x rows x elements of each matrix on one rank, forward, `again`, for dX and for dW: split
    with the matrix, or with the rows under sequence parallelism; a lookup costs nothing."""
    sizes, parallel = local_sizes(layout), layout.job.parallel
    weights = {weight.name: weight for weight in flow.part.weights}
    total = 0.0
    for product in flow.part.products:
        if not product.is_lookup:
            weight, needs = weights[product.parameter], flow.needs[product.name]
            is_split = weight.is_split or parallel.sequence_parallel
            whole = 2 * weight.numel * prod(sizes[dim] for dim in product.rows)
            whole *= _passes(kinds, inputs=again + needs.x, weights=int(needs.w))
            total += whole / parallel.tp if is_split else whole
    return total
