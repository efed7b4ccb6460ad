"""The plan as data: the JSON of `mpctl plan`, schemas mpctl.plan/2 and mpctl.rank/1.

Sizes are in bytes, times in seconds, layers in half-open spans [first, last + 1]. Group lists are
in Megatron's order. Up to 4,096 ranks everything is listed unless asked otherwise; beyond, groups
are counted, with the first and the last as examples.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal, NotRequired

from typing_extensions import TypedDict  # pydantic needs it to validate them before Python 3.12

from mpctl.core.axes import expert_order
from mpctl.core.errors import InputError
from mpctl.core.records import Json, json_value, to_json
from mpctl.core.topology import Topology
from mpctl.core.units import plural
from mpctl.model.layout.topology import expert_homes, job_grid
from mpctl.model.pipeline.stages import Span, stack_spans
from mpctl.plan.estimate.routing import expert_load
from mpctl.plan.estimate.system import find_system
from mpctl.plan.planning.adapters import adapter_entry
from mpctl.plan.planning.layout_settings import layout_of
from mpctl.plan.planning.plan import Plan
from mpctl.plan.planning.summary import (
    TrainingEntry,
    find_holder_name,
    link_entries,
    plan_summary,
    training_settings,
    verdict,
)
from mpctl.spec.figure_sources import FigureSource

if TYPE_CHECKING:
    from mpctl.model.layout.job_layout import JobLayout
    from mpctl.plan.estimate.job import Estimate
    from mpctl.plan.estimate.layer_messages import BlockTraffic, PartTraffic
    from mpctl.plan.estimate.step import StepTime
    from mpctl.plan.planning.runtimes import UnderRuntime
    from mpctl.plan.planning.whole_run import WholeRun


Spans = list[list[int]]  # of layers: [[0, 6], [12, 18]]


class StackSpans(TypedDict):
    """The layers of an encoder-decoder, by each stack's own numbers."""

    encoder: Spans
    decoder: Spans


class GroupSummary(TypedDict):
    """The groups of one kind, where there are too many to list: first and last as examples."""

    count: int
    size: int
    first: list[int]
    last: list[int]


class RankEntry(TypedDict):
    """Placement of one rank: its coordinate along each axis of every view, and its layers; none without
    a model. stacks: the layers of an encoder-decoder. experts: its experts of each layer, half-open;
    only if the model has some."""

    rank: int
    node: int
    local_rank: int
    coords: dict[str, int]
    layers: NotRequired[Spans]
    stacks: NotRequired[StackSpans]
    experts: NotRequired[list[int]]


class RankDocument(RankEntry):
    """Schema mpctl.rank/1: one rank with every group that it is in. tensor_blocks: the blocks of a
    layer's product Y = X W that a rank of a tensor-parallel grid holds, by tensor and dimension,
    half-open; not in 1d, and not without a model."""

    schema: Literal["mpctl.rank/1"]
    world_size: int
    groups: dict[str, list[int]]
    tensor_blocks: NotRequired[dict[str, dict[str, list[int]]]]


class PlanDocument(TypedDict):
    """Schema mpctl.plan/2: what `mpctl plan --json` prints.

    figures_from: the user's presets behind the figures, empty where all are bundled.
    links: levels of links, the node first: ranks of the job under one network of a level, how many
    networks there are, and the bandwidth that leaves one. within: for each kind of group, the name
    of the innermost level that contains all groups of the kind; None where none does. tensor_grid:
    ranks along each axis of the grid of tp ranks, the fastest-varying first; {"tp": t} in 1d.
    tensor_depth: that of 2.5d, else None. expert_sizes, expert_order: the axes along which the same
    ranks are numbered for experts; absent where there are none. ranks: in a small world, or on
    request. runtimes: the same layout under those of `--runtimes`. run: a run of `--tokens`
    (WholeRun).

    A plan with a model also has: stages, the layers of each; summary (PlanSummary); communication,
    with `layer`, a block of the first stack and one micro batch, `step_by_stage`, the messages of
    one rank of each stage (MessageCount), and `validation_by_stage`, those of one validation of the
    first replica; memory by stage (StageMemory), and the bytes of one checkpoint; time by part; of
    a model with adapters these (AdapterEntry); of
    a model with experts the parameters that one token meets, the load of the ranks (ExpertLoad),
    and bytes and seconds at balanced routing and at the load that memory has to hold, which decides
    `fits`: memory.balanced, memory.loaded, time.balanced, time.loaded. memory.stages is at the
    second, time.step_seconds at training.moe_load, else at the first.
    """

    schema: Literal["mpctl.plan/2"]
    fits: bool | None
    verdict: str
    training: TrainingEntry
    figures_from: list[FigureSource]
    world_size: int
    nodes: int
    gpus_per_node: int
    links: list[Json]
    within: dict[str, str | None]
    sizes: dict[str, int]
    order: str
    tensor_mode: str
    tensor_depth: int | None
    tensor_grid: dict[str, int]
    expert_sizes: NotRequired[dict[str, int]]
    expert_order: NotRequired[str]
    groups: dict[str, list[list[int]] | GroupSummary]
    ranks: NotRequired[list[RankEntry]]
    checks: list[Json]
    stages: NotRequired[list[Spans]]
    stage_stacks: NotRequired[list[StackSpans]]
    nearest_that_fit: NotRequired[list[Json]]
    runtimes: NotRequired[list[Json]]
    run: NotRequired[Json]
    summary: NotRequired[Json]
    communication: NotRequired[Json]
    parameters: NotRequired[int]
    adapter: NotRequired[Json]
    active_parameters: NotRequired[int]
    expert_load: NotRequired[Json]
    memory: NotRequired[Json]
    time: NotRequired[Json]


LISTED_RANKS = 4096


def plan_document(
    plan: Plan,
    topology: Topology,
    *,
    kinds: tuple[str, ...] | None,
    ranks: bool,
    runtimes: Sequence[UnderRuntime] = (),
    run: WholeRun | None = None,
) -> PlanDocument:
    """The plan as JSON. kinds: kinds of groups to list in full; ranks: list every rank; runtimes:
    the same layout under other runtimes, if requested; run: the run of `--tokens`.

    With kinds None, everything of a small world is listed and a summary of a large one.
    """
    is_small = topology.world_size <= LISTED_RANKS
    lists_groups = is_small or kinds is not None
    layout, estimate = plan.layout, plan.estimate
    document: PlanDocument = {
        "schema": "mpctl.plan/2",
        "fits": plan.fits,
        "verdict": verdict(plan),
        "training": training_settings(plan.job),
        "figures_from": plan.figures_from,
        "world_size": topology.world_size,
        "nodes": topology.nodes,
        "gpus_per_node": topology.gpus_per_node,
        "links": link_entries(plan, topology),
        "within": {kind: find_holder_name(plan, topology, kind) for kind in topology.kinds},
        "sizes": topology.whole_sizes,
        "order": "-".join(topology.whole_order),
        "tensor_mode": plan.job.parallel.tensor_mode,
        "tensor_depth": layout_of(plan.job).tensor_depth,
        "tensor_grid": dict(job_grid(plan.job).axes),
        "groups": {
            kind: [list(group) for group in topology.kind_groups(kind)]
            if lists_groups
            else group_summary(topology, kind)
            for kind in (tuple(topology.kinds) if kinds is None else kinds)
        },
        "checks": [{"status": c.status, **c.issue.as_dict()} for c in plan.checks],
    }
    if plan.job.has_experts:
        document["expert_sizes"] = plan.job.expert_sizes
        document["expert_order"] = "-".join(expert_order(plan.job.parallel.order))
    if ranks or (kinds is None and is_small):
        document["ranks"] = [rank_entry(plan, topology, r) for r in range(topology.world_size)]
    if layout is not None:
        document["stages"] = [_as_lists(spans) for spans in layout.stages]
        stacks = [parts for spans in layout.stages if (parts := stack_layers(layout, spans))]
        if stacks:
            document["stage_stacks"] = stacks
    if plan.nearest:
        document["nearest_that_fit"] = json_value(plan.nearest)
    if runtimes:
        document["runtimes"] = [under.as_dict() for under in runtimes]
    if run is not None:
        document["run"] = to_json(run)
    if estimate is not None:
        document["summary"] = to_json(plan_summary(plan))
        document["communication"] = communication_entry(estimate)
        document["parameters"] = estimate.parameters
        if (adapter := adapter_entry(estimate.layout)) is not None:
            document["adapter"] = to_json(adapter)
        if estimate.layout.model.experts is not None:
            document["active_parameters"] = estimate.active_parameters
            document["expert_load"] = to_json(expert_load(estimate.layout))
        at_loads = estimate.at_loads()
        document["memory"] = {
            "stages": json_value(estimate.memory),
            "checkpoint_bytes": estimate.checkpoint_bytes,
            "snapshot_bytes": estimate.snapshot_bytes,
            "host": to_json(estimate.host_memory),
            **{
                name: {"load": one.load, "device_bytes": one.device_bytes, "fits": one.fits}
                for name, one in at_loads.items()
            },
        }
        document["time"] = time_entry(estimate.time)
        system = find_system(estimate.layout.job.cluster, estimate.layout.profile)
        document["time"] |= {
            "is_measured": system.is_measured,
            "step_factor": system.factor,
            "measure_next": estimate.measure_next,
            **{name: {"load": one.load, "step_seconds": one.step_seconds} for name, one in at_loads.items()},
        }
    return document


def group_summary(topology: Topology, kind: str) -> GroupSummary:
    """Count, size, first and last group of a kind, by arithmetic."""
    bases = topology.kinds[kind]
    first = topology.find_group(kind, 0) or ()
    last_rank = max(topology.group(topology.world_size - 1, *bases)) - (
        0 if kind != "position_embedding" else topology.strides["pp"] * (topology.sizes["pp"] - 1)
    )
    return {
        "count": topology.world_size // topology.group_size(*bases),
        "size": len(first),
        "first": list(first),
        "last": list(topology.find_group(kind, last_rank) or ()),
    }


def rank_entry(plan: Plan, topology: Topology, rank: int) -> RankEntry:
    """One rank: node, number on its node, coordinate along each axis, and its layers."""
    entry: RankEntry = {
        "rank": rank,
        "node": topology.node(rank),
        "local_rank": topology.local_rank(rank),
        "coords": topology.whole_coords(rank),
    }
    if (layout := plan.layout) is not None:
        spans = layout.stages[layout.topology.coords(rank)["pp"]]
        entry["layers"] = _as_lists(spans)
        if stacks := stack_layers(layout, spans):
            entry["stacks"] = stacks
    if homes := expert_homes(plan.job):
        held = homes[entry["coords"]["ep"]]
        entry["experts"] = [held.start, held.stop]
    return entry


def _as_lists(spans: Iterable[Span]) -> Spans:
    return [list(span) for span in spans]


def stack_layers(layout: JobLayout, spans: Iterable[Span]) -> StackSpans | None:
    """Return the layers of the encoder and of the decoder in these spans, numbered within each stack;
    None for models of one stack.

    By hand, layers 4 to 9 of 6 + 6 are 4 and 5 of the encoder and 0 to 3 of the decoder.
    """
    model = layout.model
    if model.decoder_layers is None:
        return None
    encoder, decoder = stack_spans(spans, (model.layers, model.decoder_layers))
    return {"encoder": _as_lists(encoder), "decoder": _as_lists(decoder)}


def rank_document(plan: Plan, topology: Topology, rank: int) -> RankDocument:
    """One rank: its place, its layers and every group that it is in.

    Raises InputError where there is no such rank.
    """
    last = topology.world_size - 1
    if not 0 <= rank <= last:
        raise InputError.of(
            "no-such-rank",
            "--rank",
            f"{rank} is not a rank of this world of {plural(topology.world_size, 'rank')}",
            f"use 0 to {last}",
        )
    groups = {kind: topology.find_group(kind, rank) for kind in topology.kinds}
    document: RankDocument = {
        "schema": "mpctl.rank/1",
        "world_size": topology.world_size,
        **rank_entry(plan, topology, rank),  # type: ignore[typeddict-item]  # no tensor_blocks
        "groups": {kind: list(group) for kind, group in groups.items() if group is not None},
    }
    from mpctl.plan.planning.tensor_modes import rank_blocks  # a plan without `--rank` does not need it

    if blocks := rank_blocks(plan, topology, rank):
        document["tensor_blocks"] = {
            held.tensor: {part.dim: [part.block.start, part.block.stop] for part in (held.rows, held.columns)}
            for held in blocks
        }
    return document


def communication_entry(estimate: Estimate) -> Json:
    """The messages of a block, of a step and of a validation."""
    first, *others = estimate.blocks
    samples = estimate.layout.job.training.eval_samples
    stages = range(len(estimate.layout.stages) if samples else 0)
    return {
        "phi_bytes": first.whole.phi_bytes,
        "layer": _block_entry(first),
        **({"decoder_layer": _block_entry(others[0])} if others else {}),
        "step_by_stage": json_value(estimate.messages),
        "validation_by_stage": [
            json_value(estimate.validation(stage, replica=0, samples=[samples])) for stage in stages
        ],
    }


def _block_entry(block: BlockTraffic) -> Json:
    """Collectives over tp of one block: an entry for each parallel layer, such as `attention`, one
    for `norms` where these send anything (2d, 2.5d, 3d), then the totals."""
    parts = {name: _traffic_entry(part) for name, part in block.parts.items()}
    if block.mode != "1d":
        for name, part in block.parts.items():
            parts[name]["sent"] = list(map(_sent_entry, part.by_kind()))
    whole = block.whole
    return {**parts, **_traffic_entry(whole), "ring_bytes_per_rank": whole.ring_bytes_per_rank}


def _traffic_entry(part: PartTraffic) -> Json:
    """volume_phi: in all-gathers of hidden states."""
    return {name: getattr(part, name) for name in ("all_reduces", "volume_phi", "volume_bytes")}


def _sent_entry(sent: PartTraffic) -> Json:
    first = sent.messages[0]
    return {
        "axis": first.axis,
        "kind": first.kind,
        "count": sum(message.count for message in sent.messages),
        "volume_bytes": sent.volume_bytes,
        "ring_bytes_per_rank": sent.ring_bytes_per_rank,
    }


def time_entry(time: StepTime | str) -> Json:
    """The step's time by part, with the band that contains 9 of 10 measured steps, or why it cannot
    be stated."""
    if isinstance(time, str):
        return {"step_seconds": None, "reason": time}
    return {
        "step_seconds": time.total,
        "low_seconds": time.low,
        "high_seconds": time.high,
        "extrapolates": list(time.extrapolates),
        "breakdown": time.parts(),
        "flops_per_rank": time.hardware_flops,
        "model_flops_per_rank": time.model_flops,
        "mfu": time.mfu,
        "hfu": time.hfu,
    }
