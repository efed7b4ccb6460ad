"""A floor under the step time: every matrix product at its device's rate, nothing overlapped.

Compute: 2mnk FLOP forward and twice that backward for every product of the operator table and for
attention's two score products (causal ones count whole, as kernels without flash skipping do),
with full recomputation one more forward (Narayanan et al., arXiv 2104.04473, eq. 3: 72 or 96 per
B s L h^2). The pipeline adds its bubble (p-1)/(v m). Communication: ring all-reduces over the link
a group spans. It is a floor and is called one: real kernels run below the peak of a datasheet. For
the cpu device, whose figure is a measured matmul rate, it is close.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpctl.estimate.communication import ring_bytes
from mpctl.estimate.messages import Message, step_messages
from mpctl.families.table import OperatorTable, Product
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
    tokens = job.training.micro_batch_size * model.seq_length / job.parallel.cp
    layers = sum(stop - start for start, stop in spans)
    block = sum(_product_flops(p, table, model) for p in table.block)
    scores = 4 * model.seq_length * model.heads * model.head_size  # q k^T and p v
    passes = 4 if job.training.recompute == "full" else 3
    forward = layers * (block + scores) * passes
    if stage == job.parallel.pp - 1:
        forward += sum(_product_flops(p, table, model) for p in table.last) * 3
    return forward * tokens * job.num_microbatches / job.parallel.tp


def _product_flops(product: Product, table: OperatorTable, model: Model) -> float:
    """2 x the elements of its matrix, for one token, before splitting over tp."""
    if product.is_lookup:
        return 0.0
    names = {f"{product.name}.weight", "embedding.word.weight" if product.name == "head" else ""}
    held = (*table.block_weights, *table.first_weights, *table.last_weights)
    return 2.0 * next(weight.numel for weight in held if weight.name in names)
