"""One number of an estimate with the formula that gave it: what `mpctl explain` prints.

By hand, the gradients of 10 parameters: Figure("memory.stage-0.gradients", 40, "B",
"parameters x bytes", "10 x 4").
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from mpctl.core.units import MFU_CONVENTION, PRODUCT_BYTES, bytes_text, count_text, seconds_text
from mpctl.model.layout.job_layout import JobLayout
from mpctl.model.layout.link_levels import shown_levels
from mpctl.model.operators.activation_shapes import ActivationShapes, SavedTensor
from mpctl.model.operators.grad_flow import GradFlow
from mpctl.plan.estimate.activation_shapes import activation_shapes, is_cuda
from mpctl.plan.estimate.activations import ChunkBytes, stage_chunks
from mpctl.plan.estimate.advice import next_measurement
from mpctl.plan.estimate.communication import local_parameters
from mpctl.plan.estimate.expert_messages import ROWS, ExpertMessages
from mpctl.plan.estimate.flops import causal_model_flops
from mpctl.plan.estimate.host_memory import host_memory
from mpctl.plan.estimate.kernels import MissingFigure, OpTimes
from mpctl.plan.estimate.memory import StageMemory, layout_memory
from mpctl.plan.estimate.network import MissingLink
from mpctl.plan.estimate.routing import (
    HELD_LOAD,
    LOADS,
    buffered_layout,
    expert_load,
    largest_of_normals,
    loaded_layout,
    rank_tokens,
)
from mpctl.plan.estimate.saved import layer_activations
from mpctl.plan.estimate.step import PARTS, StepTime
from mpctl.plan.estimate.system import find_system, unknown_parts
from mpctl.plan.estimate.time import StepTimeModel, step_time_model

Unit = Literal["B", "s", "FLOP", "FLOP/s", "B/s", "", "%"]


class Figure(NamedTuple):
    """name: dotted, `memory.stage-0.activations`; formula: in words and letters; numbers: the
    formula with the values of this job; source: the paper, datasheet or fit behind the formula."""

    name: str
    value: float
    unit: Unit
    formula: str
    numbers: str
    source: str = ""


def explain_time(layout: JobLayout) -> list[Figure]:
    """Figures of the step's time; none where no time can be stated."""
    try:
        time_model = step_time_model(layout)
        return list(_figures(time_model, time_model.step()))
    except (MissingFigure, MissingLink):
        return []


def _figures(time_model: StepTimeModel, time: StepTime) -> Iterator[Figure]:
    parts = time.parts()
    numbers = " + ".join(map(seconds_text, parts.values()))
    yield _seconds("time.step", time.total, " + ".join(parts), numbers)
    layout, m = time_model.layout, time_model.layout.num_microbatches
    for part in (part for part in PARTS if part.name in parts):
        value = parts[part.name]
        each = f"{m} x {seconds_text(value / m)}" if part.is_per_microbatch else seconds_text(value)
        yield _seconds(f"time.{part.name}", value, part.formula, each)
    yield from _system(time_model)
    yield from _band(time_model, time)
    yield from _rates(time_model, time)
    for stack, flow in zip(layout.table.stacks, layout.table.flows, strict=True):
        if flow.last is not None:
            work = time_model.operators.block(stack, flow.last)
            cover = "gradients of weights" if layout.grid.mode == "1d" else "their own products"
            yield from _layer(f"time.{stack.figure_name}", work, cover)
            yield from _adapters(f"time.{stack.figure_name}", time_model, flow.last)
    for stage, row in enumerate(time_model.passes):
        for chunk, found in enumerate(row):
            prefix = f"time.stage-{stage}" + (f".chunk-{chunk}" if len(row) > 1 else "")
            for way, seconds in (("forward", found.chunk.forward), ("backward", found.chunk.backward)):
                yield _seconds(f"{prefix}.{way}", seconds, "one micro batch, messages included", seconds_text(seconds))


def _system(time_model: StepTimeModel) -> Iterator[Figure]:
    """Yield the factor on all seconds of the presets' figures, if it is not 1."""
    cluster, profile = time_model.layout.job.cluster, time_model.operators.profile
    system = find_system(cluster, profile)
    if system.factor == 1:
        return
    reasons = "; ".join(unknown_parts(cluster, profile)) or "own runs"
    formula = "cluster.step_factor, else the runtime's shift_apart where nothing was measured"
    source = next_measurement(time_model.layout)
    yield Figure(
        "time.system",
        system.factor,
        "",
        formula,
        f"{system.factor:g} ({reasons})",
        f"narrowed most by {source}" if source else "",
    )


def _band(time_model: StepTimeModel, time: StepTime) -> Iterator[Figure]:
    reasons = "; ".join(time.extrapolates) or "within what was measured"
    source = time_model.operators.profile.source
    for name, sign in (("low", "/"), ("high", "x")):
        numbers = f"{seconds_text(time.total)} {sign} {time.band.factor:.3f} ({reasons})"
        formula = f"step {sign} exp(1.645 x spread of measured errors): 9 of 10 runs lie in between"
        yield _seconds(f"time.{name}", getattr(time, name), formula, numbers, source)


def _rates(time_model: StepTimeModel, time: StepTime) -> Iterator[Figure]:
    device, layout = time_model.layout.job.cluster.device, time_model.layout
    source = device.source if device else ""
    for name, what, flops in (
        ("mfu", f"the model's FLOP a rank ({MFU_CONVENTION})", time.model_flops),
        ("mfu_causal", "the same without the pairs that a causal mask hides", causal_model_flops(layout)),
        ("hfu", f"the hardware's FLOP a rank ({MFU_CONVENTION})", time.hardware_flops),
    ):
        yield Figure(
            f"time.{name}",
            flops / time.total / time.peak,
            "",
            f"{what} / (step time x peak)",
            f"{flops:.4g} / ({seconds_text(time.total)} x {time.peak:.4g})",
            source,
        )


def _layer(prefix: str, times: OpTimes, cover: str) -> Iterator[Figure]:
    """cover: the computation that may hide messages over tp in backward."""
    for name, seconds, formula in (
        ("forward", times.forward, "matrix products, attention, element-wise kernels"),
        ("inputs", times.dgrad, "gradients of inputs, and recomputation"),
        ("weights", times.wgrad, "gradients of weights, and adding them up"),
        ("tp_forward", times.tp_forward, "messages over tp"),
        ("tp_backward", times.tp_backward, f"messages over tp that {cover} do not hide"),
        ("cp_forward", times.cp_forward, "messages over cp"),
        ("cp_backward", times.cp_backward, "messages over cp"),
        ("ep_forward", times.ep_forward, "rows to experts and back that no computation hides"),
        ("ep_backward", times.ep_backward, "rows to experts and back that no computation hides"),
        ("host_forward", times.host_forward, "launching kernels"),
        ("host_backward", times.host_backward, "launching kernels"),
    ):
        if seconds:
            what = f"{formula}, one layer and micro batch"
            yield _seconds(f"{prefix}.{name}", seconds, what, seconds_text(seconds))


def _adapters(prefix: str, time_model: StepTimeModel, flow: GradFlow) -> Iterator[Figure]:
    """Seconds of a layer's adapters and of dequantising its base, of the figures above them."""
    operators, adapter = time_model.operators, time_model.layout.table.adapter
    if adapter is None:
        return
    costs, source = operators.profile.adapters, operators.profile.source
    work, base = operators.of_adapters(flow)
    ranks = f"A and B of rank {adapter.rank}: the bytes of X and Y, or FLOP; sums with the base's result"
    stored = f"{adapter.stored_as} read, training.dtype written / bytes/s of memory"
    for name, seconds, formula in (
        ("adapters.forward", work.forward, ranks),
        ("adapters.backward", work.dgrad + work.wgrad, ranks),
        ("adapters.host_forward", operators.adapters.host(flow), f"adapters x {seconds_text(costs.host)}"),
        ("base.forward", base.forward, stored),
        ("base.backward", base.dgrad, stored),
    ):
        if seconds:
            yield _seconds(
                f"{prefix}.{name}", seconds, f"{formula}, one layer and micro batch", seconds_text(seconds), source
            )


def _seconds(name: str, value: float, formula: str, numbers: str, source: str = "") -> Figure:
    return Figure(name, value, "s", formula, numbers, source)


def explain_experts(layout: JobLayout) -> Iterator[Figure]:
    """Parameters that one token meets, and the load of the ranks; none for dense models."""
    model, table = layout.model, layout.table
    if model.experts is None:
        return
    chosen, sizes = model.experts_per_token, layout.job.expert_sizes
    total, active = table.numel, table.active_numel(chosen)
    yield Figure("parameters.total", total, "", "all parameters, each once", count_text(total))
    yield Figure(
        "parameters.active",
        active,
        "",
        "those that one token meets: of the experts k / E",
        f"{count_text(total)} - those of {model.experts - chosen} of {model.experts} experts",
    )
    found, ep = expert_load(layout), sizes["ep"]
    tokens = rank_tokens(layout) * sizes["etp"] * ep
    yield Figure(
        "routing.random",
        found.random,
        "",
        "1 + z sqrt(ep / (k x tokens)): random routing",
        f"1 + {largest_of_normals(ep):.3g} x sqrt({ep} / ({chosen} x {tokens:g}))",
    )
    yield Figure(
        "routing.largest",
        found.largest,
        "",
        "min(ep, E / k): every token to one rank",
        f"min({ep}, {model.experts} / {chosen})",
    )
    is_stated = layout.job.training.moe_load is not None
    yield Figure(
        "routing.load",
        found.load,
        "",
        "rows of the fullest rank of experts over the mean",
        "training.moe_load" if is_stated else "routing.random",
    )
    yield Figure(
        "routing.held",
        found.held,
        "",
        "the load that memory has to hold",
        "training.moe_load" if is_stated else f"min(max({HELD_LOAD}, routing.random), routing.largest)",
        "" if is_stated else "routing.measured; set training.moe_load to yours",
    )
    for one in LOADS:
        yield Figure(f"routing.measured.{one.name}", one.mean, "", one.what, f"{one.mean} to {one.most}", one.source)
    yield Figure(
        "routing.rows",
        found.rows,
        "",
        "etp x k x positions of a rank x load",
        f"{sizes['etp']} x {chosen} x {rank_tokens(layout):g} x {found.load:.4g}",
    )
    yield from _rows_an_expert(layout, found.rows)
    yield from _exchange(layout)


def _rows_an_expert(layout: JobLayout, rows: int) -> Iterator[Figure]:
    """Rows of one expert, and how many a grouped product needs to be bound by its FLOP."""
    held = (layout.model.experts or 0) // layout.job.expert_sizes["ep"]
    yield Figure("routing.rows_an_expert", rows / held, "", "rows / experts of a rank", f"{rows} / {held}")
    try:
        speed = step_time_model(layout).operators.speed
    except MissingFigure:
        return
    width = PRODUCT_BYTES.get(layout.job.training.dtype) or layout.job.training.value_bytes
    bound = speed.linear.flops * width / (2 * speed.bandwidth)
    yield Figure(
        "routing.weight_bound_below",
        bound,
        "",
        "rows an expert: FLOP/s x bytes of an element / (2 x bytes/s of memory)",
        f"{speed.linear.flops:.4g} x {width} / (2 x {speed.bandwidth:.4g})",
    )


def _exchange(layout: JobLayout) -> Iterator[Figure]:
    """A message of rows to the experts, and the shares of it that leave the rank, the node and each
    network above it."""
    experts = ExpertMessages(layout, layout.profile)
    if experts.ranks == 1:
        return
    flow = next(flow.last for flow in reversed(layout.table.flows) if flow.runs)
    assert flow is not None
    sent = [m for m in experts.of_rows(flow, is_again=False) if m.what == ROWS]
    if not sent:  # the last layer is dense
        return
    one = sent[0]
    yield Figure(
        "routing.message",
        one.bytes,
        "B",
        f"{experts.dispatcher}: {one.kind} over {one.axis}",
        f"{experts.tokens} tokens x {bytes_text(experts.row_bytes)} x "
        f"{one.bytes / (experts.tokens * experts.row_bytes):.4g}",
        "plan/estimate/expert_messages.py",
    )
    if one.outer < 1:
        yield Figure(
            "routing.sent_once",
            100 * one.outer,
            "%",
            "bytes that leave a domain, once for each other one / bytes for the ranks there",
            f"{one.outer:.4g}",
            "plan/estimate/expert_messages.py",
        )
    topology = layout.topology
    levels = [("rank", 1), ("node", topology.gpus_per_node)]
    levels += [(one.name, one.ranks) for one in shown_levels(layout.job.cluster, topology)]
    for name, ranks in levels:
        share = experts.leaving(ranks)
        inside = round(experts.ranks * (1 - share))
        yield Figure(
            f"routing.leaves_{re.sub(r'[^a-z0-9]+', '_', name.lower())}",
            100 * share,
            "%",
            f"(n - ranks of the group in one {name}) / n",
            f"({experts.ranks} - {inside}) / {experts.ranks}",
        )


PAPER, ZERO_PAPER = "arXiv 2205.05198", "arXiv 1910.02054"


def explain_memory(layout: JobLayout) -> Iterator[Figure]:
    """Figures of the last layer of each stack, and of the first where only one of them has experts,
    tensor by tensor, and of every stage."""
    layout = buffered_layout(loaded_layout(layout))
    form = activation_shapes(layout)
    for stack in (stack for stack in layout.table.stacks if stack.layers):
        first, last = stack.block_of(0), stack.block_of(stack.layers - 1)
        blocks = {f"memory.{stack.figure_name}": last}
        if first.has_experts != last.has_experts:
            blocks[f"memory.first-of-{stack.figure_name}"] = first
        for prefix, block in blocks.items():
            layer = layer_activations(form, block)
            yield from _layer_tensors(form, prefix, layer.saved)
            yield from _layer_tensors(form, f"{prefix}.again", layer.recomputed)
    for memory in layout_memory(layout):
        yield from _stage(layout, memory, stage_chunks(layout, memory.stage, form))
    yield from _host(layout)


def _layer_tensors(form: ActivationShapes, prefix: str, kept: Sequence[SavedTensor]) -> Iterator[Figure]:
    """The tensors that one layer saves of a micro batch; `again`: the tensors that are recomputed
    for its backward."""
    found: dict[str, list[SavedTensor]] = {}
    for tensor in kept:
        found.setdefault(re.sub(r"[ ._]", "-", tensor.name), []).append(tensor)
    if kept:
        parts = " + ".join(bytes_text(form.bytes_of(own)) for own in found.values())
        yield _bytes(prefix, form.bytes_of(kept), "sum of the tensors below", parts, PAPER)
    for name, own in found.items():
        numbers = " + ".join(_product(form, tensor) for tensor in own)
        formula = " + ".join(_formula(form, tensor) for tensor in own)
        yield _bytes(f"{prefix}.{name}", form.bytes_of(own), formula, numbers, PAPER)


def _formula(form: ActivationShapes, tensor: SavedTensor) -> str:
    """`batch x seq x hidden x value`; on a grid with the parts that it cuts them into."""
    parts: dict[str, int] = {}
    if form.mode != "1d":
        parts = dict.fromkeys(("inner", "kv", "heads", "ffn"), form.feature_parts)
        parts |= {"batch": form.dims["micro_batch"] // form.dims["batch"], "hidden": form.side}
    dims = (f"{dim} / {parts[dim]}" if dim in parts else dim for dim in tensor.dims)
    is_value = tensor.width == "operand" and form.operand == form.value
    return " x ".join((*dims, "value" if is_value else tensor.width))


def _product(form: ActivationShapes, tensor: SavedTensor) -> str:
    sizes = " x ".join(str(form.dims[dim]) for dim in tensor.dims)
    width = form.bytes_of([SavedTensor("", (), tensor.width)])
    times = "" if tensor.times == 1 else f" x {tensor.times:g}"
    split = f" / {form.tp}" if form.splits and tensor.is_outer else ""
    return f"{sizes} x {width:g} B{times}{split}"


def _stage(layout: JobLayout, stage: StageMemory, chunks: Sequence[ChunkBytes]) -> Iterator[Figure]:
    p, memory = layout.job.parallel, layout.profile.memory
    states = (stage.parameter_bytes, stage.gradient_bytes, stage.optimizer_bytes)
    trains_few, trained = layout.table.adapter is not None, local_parameters(layout, stage.stage, trained_only=True)
    for name, value in zip(("parameters", "gradients", "optimizer"), states, strict=True):
        is_trained = trains_few and name != "parameters"
        count = trained if is_trained else stage.parameters
        numbers = f"{count_text(count)} x {value / count if count else 0.0:.4g} B"
        what = "trained parameters" if is_trained else "parameters"
        formula = f"{what} of the rank x bytes, ZeRO {p.zero} over {layout.dense.zero_size}"
        yield _bytes(f"memory.stage-{stage.stage}.{name}", value, formula, numbers, ZERO_PAPER)
    kept = " and ".join(bytes_text(chunk.saved) for chunk in chunks)
    most = bytes_text(max(chunk.temporary for chunk in chunks))
    weights = "gathered weights" if p.tensor_mode == "1d" else "blocks of products under way"
    parts = (sum(states), stage.activation_bytes, stage.working_bytes, stage.lasting_bytes, stage.workspace_bytes)
    slack = memory.slack if is_cuda(layout.job) else 1
    allocated, reserved, context = map(bytes_text, (stage.allocated_bytes, stage.reserved_bytes, stage.context_bytes))
    for name, value, formula, numbers, source in (
        (
            "activations",
            stage.activation_bytes,
            f"{p.schedule}: micro batches in flight x what one keeps for backward",
            f"{stage.in_flight} x {kept}",
            PAPER,
        ),
        (
            "working",
            stage.working_bytes,
            f"gradients of activations, recomputed tensors, {weights}, messages",
            f"{most} in a backward, and messages under way",
            "",
        ),
        (
            "software",
            stage.lasting_bytes,
            "buffers that the training software keeps",
            bytes_text(stage.lasting_bytes),
            memory.source,
        ),
        (
            "workspaces",
            stage.workspace_bytes,
            "threads that multiply matrices x the library's workspace, out of torch's allocator",
            f"{memory.workspaces} x {bytes_text(stage.workspace_bytes // max(1, memory.workspaces))}",
            "",
        ),
        (
            "allocated",
            stage.allocated_bytes,
            "states + activations + working + software + workspaces; states: parameters, gradients, optimizer",
            " + ".join(map(bytes_text, parts)),
            "",
        ),
        (
            "reserved",
            stage.reserved_bytes,
            "allocated x allocator's reserve",
            f"{allocated} x {slack:g}",
            memory.source,
        ),
        (
            "communicators",
            stage.communicator_bytes,
            "channels x peers that send x buffers, of each process group",
            bytes_text(stage.communicator_bytes),
            memory.source,
        ),
        (
            "device",
            stage.device_bytes,
            "reserved + context of the libraries + communicators",
            f"{reserved} + {context} + {bytes_text(stage.communicator_bytes)}",
            memory.source,
        ),
    ):
        yield _bytes(f"memory.stage-{stage.stage}.{name}", value, formula, numbers, source)


def _host(layout: JobLayout) -> Iterator[Figure]:
    host, cluster = host_memory(layout), layout.job.cluster
    ranks = min(cluster.gpus_per_node or layout.job.world_size, layout.job.world_size)
    offloaded, snapshot = bytes_text(host.offloaded_bytes), bytes_text(host.snapshot_bytes)
    states, kept = bytes_text(host.state_bytes), host.offloaded_bytes + host.state_bytes
    for name, value, formula, numbers in (
        ("states", host.state_bytes, "offloaded and paged states of a rank, of the stage with most", states),
        (
            "offloaded",
            host.offloaded_bytes,
            "inputs of layers and pages of a stash, of micro batches in flight, of a rank",
            offloaded,
        ),
        ("snapshot", host.snapshot_bytes, "copies that a rank writes checkpoints from: values and moments", snapshot),
        (
            "node",
            host.node_bytes,
            "ranks of a node x (offloaded + states) + the part of a checkpoint that its ranks write",
            f"{ranks} x {bytes_text(kept)} + {bytes_text(host.node_bytes - ranks * kept)}",
        ),
    ):
        yield _bytes(f"memory.host.{name}", value, formula, numbers)


def _bytes(name: str, value: float, formula: str, numbers: str, source: str = "") -> Figure:
    return Figure(name, value, "B", formula, numbers, source)
