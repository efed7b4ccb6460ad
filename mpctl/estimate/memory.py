"""What one rank of each stage holds: parameters, gradients, optimizer state, activations.

States are exact counts of the operator table: parameters in the training dtype, gradients in the
reduction dtype, AdamW's two float32 moments and, when parameters are 16-bit, a float32 master copy
(2 + 4 + 4 + 8 bytes a parameter in bf16; a frozen one takes its 2 alone). ZeRO 1, 2, 3 divides
optimizer, gradients, parameters by dp.

Activations per layer, 16-bit, dropout on (Korthikanti et al., arXiv 2205.05198, table 2), in units
of sbh: no tp 34 + 5as/h; tp 10 + 24/t + 5as/(ht); with sequence parallelism all over t; selective
recomputation and flash attention drop the 5as/h term; full recomputation keeps 2. A wider dtype
scales them. A layer that computes no gradient (families/gradients.py) keeps nothing, any other
counts whole. How many micro batches of each chunk a stage holds at once is the schedule's
(schedule/orders.py): min(p - stage, m) under 1F1B, all m under GPipe. Heads, temporaries and
allocator slack are not counted: with nothing frozen the total is a lower bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpctl.estimate.communication import held_by, local_parameters, local_sizes
from mpctl.families.products import Core, Stack
from mpctl.families.table import OperatorTable
from mpctl.schedule.orders import FREES, actions, peak_in_flight
from mpctl.spec.job import JobSpec
from mpctl.spec.model import Model
from mpctl.stages import Span
from mpctl.units import DTYPE_BYTES


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes on one rank of a pipeline stage."""

    stage: int
    parameters: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int

    @property
    def total_bytes(self) -> int:
        states = self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes
        return states + self.activation_bytes


def stage_memory(
    job: JobSpec, model: Model, table: OperatorTable, stages: list[list[Span]]
) -> list[StageMemory]:
    """One entry a stage; the heaviest decides whether the job fits."""
    return [_one_stage(job, model, table, spans, stage) for stage, spans in enumerate(stages)]


def _one_stage(
    job: JobSpec, model: Model, table: OperatorTable, spans: list[Span], stage: int
) -> StageMemory:
    training, dp, zero = job.training, job.sizes["dp"], job.parallel.zero
    count = local_parameters(job, table, spans, stage=stage)
    trained = local_parameters(job, table, spans, stage=stage, trained_only=True)
    width = DTYPE_BYTES[training.dtype]
    moments = 2 * max(4, width)
    master = 4 if width < 4 else 0
    kept = [_chunk_bytes(job, model, table, span, stage) for span in spans]
    return StageMemory(
        stage=stage,
        parameters=count,
        parameter_bytes=_shared(count * width, dp, zero >= 3),
        gradient_bytes=_shared(trained * DTYPE_BYTES[training.reduced_dtype], dp, zero >= 2),
        optimizer_bytes=_shared(trained * (moments + master), dp, zero >= 1),
        activation_bytes=round(held_bytes(job, kept, stage=stage)),
    )


def _shared(amount: int, dp: int, is_shared: bool) -> int:
    return -(-amount // dp) if is_shared else amount


def _chunk_bytes(job: JobSpec, model: Model, table: OperatorTable, span: Span, stage: int) -> float:
    """Of one micro batch in one chunk."""
    return sum(
        layers * layer_activation_bytes(job, model, held.stack)
        for held in held_by(job, table, [span], stage=stage)
        for layers, flow in held.blocks
        if flow.after
    )


def held_bytes(job: JobSpec, chunks: Sequence[float], *, stage: int) -> float:
    """The most that a stage holds at once, by what one micro batch in each of its chunks takes."""
    p = job.parallel
    sizes = {"stage": stage, "stages": p.pp, "microbatches": job.num_microbatches, "chunks": p.vpp}
    if len(set(chunks)) == 1:
        return peak_in_flight(p.schedule, **sizes) * chunks[0]
    held = peak = 0.0
    for kind, _, chunk in actions(p.schedule, **sizes):
        held += chunks[chunk] * ((kind == "forward") - (kind in FREES))
        peak = max(peak, held)
    return peak


def layer_activation_bytes(job: JobSpec, model: Model, stack: Stack) -> float:
    """Saved activations of one layer for one micro batch, bytes on one rank.

    In units of the layer's own sbh: its norms and MLP 4 + 3 + 16/t, each attention 3 + 8/t (input,
    mask; q, k, v and what they give: half of it by its keys' length) and its scores.
    """
    training, p, sizes = job.training, job.parallel, local_sizes(job, model)
    own = sizes["batch"] * sizes[stack.seq] * model.hidden
    scale = DTYPE_BYTES[training.dtype] / 2
    split = p.tp if p.sequence_parallel else 1
    if training.recompute == "full":
        return 2 * own * scale / split
    attentions = sum(_attention_bytes(job, model, core, split) for core in stack.cores)
    norms = 2 * (1 + len(stack.cores))
    return scale * (own * ((norms + 3) / split + 16 / p.tp) + attentions)


def _attention_bytes(job: JobSpec, model: Model, core: Core, split: int) -> float:
    training, tp, sizes = job.training, job.parallel.tp, local_sizes(job, model)
    queries, keys = (sizes["batch"] * sizes[dim] for dim in (core.queries, core.keys))
    products = model.hidden * (3 * queries / split + 4 * (queries + keys) / tp)
    holds_scores = model.attention == "unfused" or training.attention_dropout > 0
    if not holds_scores or training.recompute != "none":
        return products
    return products + 5 * model.heads * queries * sizes[core.keys] * job.parallel.cp / tp
