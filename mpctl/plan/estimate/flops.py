"""FLOP of a step: every product of the operator table and of attention (model/operators/flops.py).

Forward, for dX and for dW; with full recomputation one more forward (Narayanan et al., arXiv
2104.04473, eq. 3: 72 or 96 per B s L h^2). Where parameters are frozen, a product lacks
the passes of the gradients that it does not compute. A schedule that runs the backward in two takes
dW alone for its second part: what is run again and the scores belong to the first.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from pydantic import ValidationError

from mpctl.core.errors import InputError
from mpctl.model.layout.job_layout import JobLayout
from mpctl.model.operators.flops import FlopCounter
from mpctl.model.operators.grad_flow import GradFlow
from mpctl.model.operators.layer import AttentionOp
from mpctl.model.operators.matmul import GradNeeds
from mpctl.model.pipeline.schedule.orders import Kind
from mpctl.plan.estimate.attention import repeats_core
from mpctl.plan.estimate.communication import batch_sizes
from mpctl.plan.estimate.layer_messages import is_repeated, repeated_products, tiled_products
from mpctl.plan.estimate.loss import loss_chunks
from mpctl.spec.cluster import DeviceSpec
from mpctl.spec.job import JobSpec
from mpctl.spec.launch import LAUNCHED_AS
from mpctl.spec.presets import find_preset, preset_names

ALL: tuple[Kind, ...] = ("forward", "backward")
FORWARD: tuple[Kind, ...] = ("forward",)


def step_flops(layout: JobLayout, stage: int) -> float:
    """FLOP of one rank of a stage in one step, forward and backward."""
    total = 0.0
    for part in layout.stage_slices(stage):
        for layers, flow in part.blocks:
            total += layers * block_flops(layout, flow)
        total += sum(part_flops(layout, end) + _logits_again(layout, end) for end in part.ends)
    return total * layout.num_microbatches


def model_and_hardware_flops(layout: JobLayout) -> tuple[float, float]:
    """(model FLOP, hardware FLOP) of a rank on the average in one step; the second includes what
    recomputation repeats, with selective recomputation the scores (arXiv 2205.05198, eq. 7, 8)."""
    table, plain, repeated = layout.table, 0.0, 0.0
    for flow in table.flows:
        for run, kind in flow.runs:
            plain += len(run) * part_flops(layout, kind)
            again = _repeated(layout, kind) + _of_tiles(layout, kind)
            repeated += len(run) * (again + _of_norms(layout, kind))
        plain += sum(part_flops(layout, end) for end in flow.ends)
        repeated += sum(_logits_again(layout, end) for end in flow.ends)
    share = layout.num_microbatches / layout.job.parallel.pp
    return plain * share, (plain + repeated) * share


def causal_model_flops(layout: JobLayout) -> float:
    """Model FLOP of a rank on the average in one step, without the pairs that a causal mask hides.

    By hand, Llama 3 70B at 8,192 tokens: products of 69.5e9 parameters and scores are 6 x 69.5e9 +
    12 x 80 x 8192 x 8192 = 481.4e9 FLOP a token in full, 449.2e9 without the hidden half of the scores.
    """
    hidden = 0.0
    for table in layout.table.flows:
        runs = [(len(run), kind) for run, kind in table.runs] + [(1, end) for end in table.ends]
        for count, flow in runs:
            hidden += count * sum(_core_flops(layout, core, flow, ALL) for core in flow.cores if core.is_causal) / 2
    share = layout.num_microbatches / layout.job.parallel.pp
    return model_and_hardware_flops(layout)[0] - hidden * share


def _repeated(layout: JobLayout, flow: GradFlow) -> float:
    if is_repeated(layout, layout.profile, flow):
        return part_flops(layout, flow, FORWARD)
    cores = [core for core in flow.cores if repeats_core(layout, core)]
    products = repeated_products(layout, layout.profile, flow)
    again = sum(map(_counter(layout).product, products)) / layout.job.parallel.tp
    return again + sum((_core_flops(layout, core, flow, FORWARD) for core in cores), 0.0)


def _of_tiles(layout: JobLayout, flow: GradFlow) -> float:
    """FLOP of an MLP in tiles, which backward computes again."""
    return sum(map(_counter(layout).product, tiled_products(layout, flow))) / layout.job.parallel.tp


def _logits_again(layout: JobLayout, flow: GradFlow) -> float:
    """FLOP of an end's logits, where backward makes them chunk by chunk once more (training.cross_entropy
    linear)."""
    chunks = loss_chunks(layout.job.training, layout.profile)
    if chunks is None or not chunks.repeats:
        return 0.0
    heads = (one for one in flow.part.products if one.makes_logits and flow.needs[one.name].y)
    return sum(map(_counter(layout).product, heads)) / layout.job.parallel.tp


def _of_norms(layout: JobLayout, flow: GradFlow) -> float:
    """FLOP with which dora finds the norms of the rows of W + BA, in every forward, and a second product
    with W where inputs are dropped; no model needs them.

    By hand, rank 2, in 4, out 8: 2 x 2 x 4 x 8 = 128 FLOP, or 2 x 2 x 4 x (4 + 8) = 192 by B A I.
    """
    adapter, costs = layout.table.adapter, layout.profile.adapters
    if adapter is None or adapter.kind != "dora":
        return 0.0
    by_name = {product.name: product for product in flow.part.products}
    passes, total = 1 + is_repeated(layout, layout.profile, flow), 0.0
    for second in (product for product in flow.part.products if product.adapts and product.reads[-1] == "rank"):
        first = by_name[second.value]
        inputs, outputs = first.matrix.shape[-1], second.matrix.numel // adapter.rank
        total += passes * 2 * adapter.rank * inputs * (outputs + inputs * costs.dora_base)
        if adapter.dropout:
            each = _counter(layout).product(second) / adapter.rank * inputs
            total += (passes + flow.needs[first.name].x) * each
    return total / layout.job.parallel.tp


def block_flops(layout: JobLayout, flow: GradFlow, kinds: Collection[Kind] = ALL) -> float:
    """FLOP of one layer and micro batch on one rank, with what the job's recomputation repeats."""
    again = int(is_repeated(layout, layout.profile, flow))
    tiled = _of_tiles(layout, flow) if "backward" in kinds else 0.0
    return part_flops(layout, flow, kinds, again=again) + tiled


def part_flops(layout: JobLayout, flow: GradFlow, kinds: Collection[Kind] = ALL, *, again: int = 0) -> float:
    """FLOP of a layer or an end, one micro batch and rank: its matrix products and attentions
    forward, `again` in the backward, and for the gradients that are needed."""

    def passes(needs: GradNeeds) -> int:
        return _passes(kinds, inputs=again + needs.x, weights=int(needs.w))

    products = _counter(layout).products(flow, passes) / layout.job.parallel.tp
    cores = (_core_flops(layout, core, flow, kinds, again) for core in flow.cores)
    return products + sum(cores, 0.0)


def _core_flops(layout: JobLayout, core: AttentionOp, flow: GradFlow, kinds: Collection[Kind], again: int = 0) -> float:
    """FLOP of one attention: forward, `again`, and once more for each of queries and keys that
    needs a gradient."""
    gradients = flow.needs[core.query_product].y + flow.needs[core.key_product].y
    passes = _passes(kinds, inputs=again + gradients)
    return _counter(layout).scores(core, passes) / layout.job.parallel.tp


def _passes(kinds: Collection[Kind], *, inputs: int, weights: int = 0) -> int:
    """Number of equal products in actions of these kinds."""
    counts: dict[Kind, int] = {
        "forward": 1,
        "backward": inputs + weights,
        "backward_input": inputs,
        "backward_weight": weights,
    }
    return sum(counts[kind] for kind in kinds)


def _counter(layout: JobLayout) -> FlopCounter:
    return FlopCounter.of(layout.model, layout.job.parallel, batch_sizes(layout))


class Utilization(NamedTuple):
    """FLOP of a rank on the average in one step: those that the model needs (Chowdhery et al.,
    arXiv 2204.02311, appendix B), and those that are computed, with what recomputation repeats.
    peak: dense FLOP/s of its device at the job's data type, None where it is not known. Plans,
    benches and runs use the same count and differ in the seconds alone.

    >>> Utilization(300e12, 400e12, 1000e12).mfu(0.5), Utilization(300e12, 400e12, 1000e12).hfu(0.5)
    (0.6, 0.8)
    """

    model_flops: float
    hardware_flops: float
    peak: float | None

    def mfu(self, seconds: float) -> float | None:
        """Model FLOP utilization of a step that took so many seconds; None without a peak."""
        return self.model_flops / seconds / self.peak if self.peak else None

    def hfu(self, seconds: float) -> float | None:
        """Hardware FLOP utilization of a step that took so many seconds; None without a peak."""
        return self.hardware_flops / seconds / self.peak if self.peak else None


def run_utilization(layout: JobLayout, reported: str | None = None) -> Utilization:
    """The FLOP that measured steps of a launched job are compared with. reported: the name of the
    GPU that a rank runs on, as its driver reports it; None on a CPU."""
    return Utilization(*model_and_hardware_flops(layout), device_peak(layout.job, reported))


def device_peak(job: JobSpec, reported: str | None = None) -> float | None:
    """FLOP/s of the device of a launched job at its data type: the cluster's, where ranks run on
    that kind of device, else that of the preset with this name. None where neither is known, and
    for ranks of several threads, as a CPU's peak is one core's."""
    device, kind = job.cluster.device, job.launch.device
    if device is None or LAUNCHED_AS.get(device.kind) != kind:
        device = find_device(reported) if reported else None
    if device is None or (device.is_cpu and job.launch.threads_per_rank != 1):
        return None
    return device.peak_flops.get(job.training.chosen_dtype)


def find_device(reported: str) -> DeviceSpec | None:
    """The device of the preset whose driver reports this name; None without one."""
    name = find_device_preset(reported)
    if name is None:
        return None
    try:
        return DeviceSpec.model_validate(find_preset("devices", name))
    except (ValidationError, InputError):  # a user's preset that is invalid
        return None


def find_device_preset(reported: str) -> str | None:
    """The name of that preset."""
    tables = ((name, find_preset("devices", name)) for name in preset_names("devices"))
    return next((name for name, t in tables if t and reported in t.get("reported_as", ())), None)
