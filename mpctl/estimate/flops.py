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

from mpctl.estimate.communication import held_by, local_sizes
from mpctl.estimate.messages import runs_again
from mpctl.operators.grad_flow import GradFlow
from mpctl.operators.matmul import AttentionOp
from mpctl.operators.table import OperatorTable, StageSlice
from mpctl.pipeline.schedule.orders import Kind
from mpctl.pipeline.stages import Span
from mpctl.spec.job import JobSpec
from mpctl.spec.model import ModelSpec

ALL: tuple[Kind, ...] = ("forward", "backward")
FORWARD: tuple[Kind, ...] = ("forward",)


def step_flops(
    job: JobSpec, model: ModelSpec, table: OperatorTable, spans: Sequence[Span], *, stage: int
) -> float:
    """Of one rank of a stage in one step, forward and backward."""
    held = held_by(job, table, spans, stage=stage)
    return pass_flops(job, model, held) * job.num_microbatches


def model_and_hardware_flops(
    job: JobSpec, model: ModelSpec, table: OperatorTable
) -> tuple[float, float]:
    """Of a rank on the average in one step; the second with what recomputation repeats: with
    selective recomputation the scores (arXiv 2205.05198, eq. 7 and 8)."""
    plain = repeated = 0.0
    for stack, flow in zip(table.stacks, table.flows, strict=True):
        for run, kind in flow.runs:
            plain += len(run) * block_flops(job, model, stack.cores, kind, again=0)
            repeated += len(run) * _repeated(job, model, stack.cores, kind)
        plain += sum(end_flops(job, model, end) for end in (flow.entry, flow.exit))
    share = job.num_microbatches / job.parallel.pp
    return plain * share, (plain + repeated) * share


def _repeated(
    job: JobSpec, model: ModelSpec, cores: Sequence[AttentionOp], flow: GradFlow
) -> float:
    if runs_again(job, model, flow):
        return block_flops(job, model, cores, flow, FORWARD, again=0)
    if job.training.recompute != "selective":
        return 0.0
    return sum((_core_flops(job, model, core, flow, 0, FORWARD) for core in cores), 0.0)


def pass_flops(
    job: JobSpec, model: ModelSpec, found: Iterable[StageSlice], kinds: Collection[Kind] = ALL
) -> float:
    """One micro batch through what a stage holds, on one rank."""
    total = 0.0
    for held in found:
        for layers, flow in held.blocks:
            total += layers * block_flops(job, model, held.stack.cores, flow, kinds)
        total += sum(end_flops(job, model, end, kinds) for end in held.ends)
    return total


def block_flops(
    job: JobSpec,
    model: ModelSpec,
    cores: Sequence[AttentionOp],
    flow: GradFlow,
    kinds: Collection[Kind] = ALL,
    again: int | None = None,
) -> float:
    """One layer and micro batch. again: forwards repeated; what the job's recomputation says."""
    again = int(runs_again(job, model, flow)) if again is None else again
    scores = sum(_core_flops(job, model, core, flow, again, kinds) for core in cores)
    return _part_flops(job, model, flow, again, kinds) + scores


def end_flops(
    job: JobSpec, model: ModelSpec, flow: GradFlow, kinds: Collection[Kind] = ALL
) -> float:
    """One end of a stack and micro batch."""
    return _part_flops(job, model, flow, 0, kinds)


def _passes(kinds: Collection[Kind], *, inputs: int, weights: int = 0) -> int:
    """Products of one size in actions of these kinds."""
    counts: dict[Kind, int] = {
        "forward": 1, "backward": inputs + weights,
        "backward_input": inputs, "backward_weight": weights,
    }  # fmt: skip
    return sum(counts[kind] for kind in kinds)


def _core_flops(
    job: JobSpec,
    model: ModelSpec,
    core: AttentionOp,
    flow: GradFlow,
    again: int,
    kinds: Collection[Kind],
) -> float:
    """q k^T and p v of one micro batch on one rank, forward, `again`, and once more for each of
    queries and keys that needs a gradient; keys are of the whole sequence."""
    gradients = flow.needs[core.query_product].y + flow.needs[core.key_product].y
    passes = _passes(kinds, inputs=again + gradients)
    sizes, p = local_sizes(job, model), job.parallel
    pairs = sizes["batch"] * sizes[core.queries] * sizes[core.keys] * p.cp
    return passes * 4 * pairs * model.heads * model.head_size / p.tp


def _part_flops(
    job: JobSpec, model: ModelSpec, flow: GradFlow, again: int, kinds: Collection[Kind]
) -> float:
    """2 x rows x elements of each matrix on one rank, forward, `again`, for dX and for dW: split
    with the matrix, or with the rows under sequence parallelism; a lookup costs nothing."""
    sizes = local_sizes(job, model)
    weights = {weight.name: weight for weight in flow.part.weights}
    total = 0.0
    for product in flow.part.products:
        if not product.is_lookup:
            weight, needs = weights[product.parameter], flow.needs[product.name]
            is_split = weight.is_split or job.parallel.sequence_parallel
            whole = 2 * weight.numel * prod(sizes[dim] for dim in product.rows)
            whole *= _passes(kinds, inputs=again + needs.x, weights=int(needs.w))
            total += whole / job.parallel.tp if is_split else whole
    return total
