"""A floor under the step time: every matrix product at its device's rate, nothing overlapped.

Compute: 2mnk FLOP forward and twice that backward for every product of the operator table and for
attention's two score products (causal ones count whole, as kernels without flash skipping do),
with full recomputation one more forward (Narayanan et al., arXiv 2104.04473, eq. 3: 72 or 96 per
B s L h^2). Where parameters are frozen, a product lacks the passes of the gradients that it does
not compute. The pipeline adds its bubble (p-1)/(v m). Communication: ring all-reduces over the link
a group spans. It is a floor and is called one: real kernels run below the peak of a datasheet. For
the cpu device, whose figure is a measured matmul rate, it is close.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from mpctl.estimate.communication import held_by, local_sizes, ring_bytes
from mpctl.estimate.messages import Message, runs_again, step_messages
from mpctl.families.gradients import Flow
from mpctl.families.products import Core
from mpctl.families.table import OperatorTable
from mpctl.spec.cluster import Link
from mpctl.spec.job import JobSpec
from mpctl.spec.model import Model
from mpctl.stages import Span
from mpctl.topology import Topology


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step of the slowest stage, by part."""

    compute: float
    bubble: float
    tp: float
    cp: float
    dp: float
    flops_per_rank: float

    @property
    def total(self) -> float:
        return self.compute + self.bubble + self.tp + self.cp + self.dp


def find_step_time(
    job: JobSpec, model: Model, table: OperatorTable, stages: list[list[Span]], topology: Topology
) -> StepTime | str:
    """The floor, or in words what is missing to state one."""
    device = job.cluster.device
    if device is None:
        return "no cluster.device is named"
    rate = device.peak_flops.get(job.training.dtype)
    if rate is None:
        return f"{device.name} has no {job.training.dtype} rate in its preset"
    times = [
        _stage_time(job, model, table, spans, stage, topology, rate)
        for stage, spans in enumerate(stages)
    ]
    reasons = [time for time in times if isinstance(time, str)]
    if reasons:
        return reasons[0]
    return max((time for time in times if isinstance(time, StepTime)), key=lambda t: t.total)


def _stage_time(
    job: JobSpec,
    model: Model,
    table: OperatorTable,
    spans: list[Span],
    stage: int,
    topology: Topology,
    rate: float,
) -> StepTime | str:
    flops = step_flops(job, model, table, spans, stage=stage)
    compute = flops / rate
    bubble = compute * (job.parallel.pp - 1) / (job.parallel.vpp * job.num_microbatches)
    seconds = {"tp": 0.0, "cp": 0.0, "dp": 0.0}
    for message in step_messages(job, model, table, spans, stage=stage):
        if message.axis not in seconds:
            continue
        crosses = topology.straddling(message.axis)[1] > 0
        link = job.cluster.inter_node if crosses else job.cluster.intra_node
        if link is None:
            level = "inter_node" if crosses else "intra_node"
            return f"cluster.{level} has no bandwidth, and {message.axis} needs it"
        seconds[message.axis] += _message_seconds(message, topology, link, crosses)
    return StepTime(compute, bubble, seconds["tp"], seconds["cp"], seconds["dp"], flops)


def _message_seconds(message: Message, topology: Topology, link: Link, crosses: bool) -> float:
    ranks = topology.sizes[message.axis] * (topology.sizes["cp"] if message.axis == "dp" else 1)
    phases = 2 if message.kind == "all_reduce" else 1
    sharing = min(topology.gpus_per_node, topology.world_size) if crosses else 1
    transfer = ring_bytes(message.bytes, ranks, phases=phases) / (link.bandwidth / sharing)
    return message.count * (transfer + phases * (ranks - 1) * link.latency)


def step_flops(
    job: JobSpec, model: Model, table: OperatorTable, spans: list[Span], *, stage: int
) -> float:
    """FLOP of one rank of a stage in one step, forward and backward."""
    total = 0.0
    for held in held_by(job, table, spans, stage=stage):
        for layers, flow in held.blocks:
            again = int(runs_again(job, model, flow))
            scores = sum(_core_flops(job, model, core, flow, again) for core in held.stack.cores)
            total += layers * (_part_flops(job, model, flow, again) + scores)
        total += sum(_part_flops(job, model, end, 0) for end in held.ends)
    return total * job.num_microbatches


def _core_flops(job: JobSpec, model: Model, core: Core, flow: Flow, again: int) -> float:
    """q k^T and p v of one micro batch on one rank, forward, `again`, and once more for each of
    queries and keys that needs a gradient; keys are of the whole sequence."""
    passes = 1 + again + flow.needs[core.query_product].y + flow.needs[core.key_product].y
    sizes, p = local_sizes(job, model), job.parallel
    pairs = sizes["batch"] * sizes[core.queries] * sizes[core.keys] * p.cp
    return passes * 4 * pairs * model.heads * model.head_size / p.tp


def _part_flops(job: JobSpec, model: Model, flow: Flow, again: int) -> float:
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
            whole *= 1 + again + needs.x + needs.w
            total += whole / job.parallel.tp if is_split else whole
    return total
