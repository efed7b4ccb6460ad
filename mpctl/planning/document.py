"""The plan as data: the JSON of `mpctl plan`, schemas mpctl.plan/2 and mpctl.rank/1.

Sizes are in bytes, times in seconds, layers in half-open spans [first, last + 1]. Group lists are
in Megatron's order. Up to 4,096 ranks everything is listed unless asked otherwise; beyond, groups
are counted, with the first and the last as examples.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Literal, TypedDict

from mpctl.errors import InputError, IssueEntry, Status
from mpctl.pipeline.stages import Span, stack_spans
from mpctl.planning.layout_settings import NearbyEntry
from mpctl.planning.plan import Plan
from mpctl.planning.summary import (
    LinkEntry,
    SummaryEntry,
    TrainingEntry,
    find_holder_name,
    link_entries,
    plan_summary,
    training_settings,
    verdict,
)
from mpctl.planning.tensor_modes import TensorBlocksPart, TensorGridPart, blocks_entry, grid_entry
from mpctl.topology import Topology
from mpctl.units import plural

if TYPE_CHECKING:
    from mpctl.estimate.block_traffic import BlockTraffic, PartTraffic
    from mpctl.estimate.job import Estimate
    from mpctl.estimate.memory import StageMemory
    from mpctl.estimate.message import MessageCount
    from mpctl.estimate.step import StepTime
    from mpctl.layout.job_layout import JobLayout
    from mpctl.planning.runtimes import RuntimeEntry, UnderRuntime


Spans = list[list[int]]  # of layers: [[0, 6], [12, 18]]


class StackSpans(TypedDict):
    """The layers of an encoder-decoder, by each stack's own numbers."""

    encoder: Spans
    decoder: Spans


class CheckEntry(IssueEntry):
    """A rule's answer."""

    status: Status


class GroupSummary(TypedDict):
    """The groups of one kind, where there are too many to list: first and last as examples."""

    count: int
    size: int
    first: list[int]
    last: list[int]


class HeldLayers(TypedDict, total=False):
    """The layers of a rank; stacks: of an encoder-decoder. Empty without a model."""

    layers: Spans
    stacks: StackSpans


class RankEntry(HeldLayers):
    """Where one rank sits, its coordinate along each axis, and the layers that it holds."""

    rank: int
    node: int
    local_rank: int
    coords: dict[str, int]


class RankDocument(RankEntry, TensorBlocksPart):
    """Schema mpctl.rank/1: one rank with every group that it is in."""

    schema: Literal["mpctl.rank/1"]
    world_size: int
    groups: dict[str, list[int]]


class SentEntry(TypedDict):
    """Collectives of one kind over the groups of one axis of tp's grid; ring_bytes_per_rank: what a
    rank sends on the average where every collective is a ring."""

    axis: str
    kind: str
    count: int
    volume_bytes: int
    ring_bytes_per_rank: int | float


class SentByKind(TypedDict, total=False):
    """In 2d, 2.5d and 3d, collectives by axis and kind."""

    sent: list[SentEntry]


class PartTrafficEntry(SentByKind):
    """Collectives over tp of one parallel layer; volume_phi: in all-gathers of hidden states."""

    all_reduces: int
    volume_phi: int | float
    volume_bytes: int


# Collectives over tp of one block: an entry a parallel layer, `attention`, one of `norms` where
# these send anything (2d, 2.5d, 3d), then the totals
# all_reduces, volume_phi, volume_bytes and ring_bytes_per_rank.
BlockTrafficEntry = dict[str, PartTrafficEntry | int | float]


class MessageEntry(TypedDict):
    """count equal messages of `bytes` each, which one rank takes part in; kind: of collective."""

    axis: str
    kind: str
    what: str
    bytes: int
    count: int


class DecoderTraffic(TypedDict, total=False):
    """A block of an encoder-decoder's second stack."""

    decoder_layer: BlockTrafficEntry


class CommunicationEntry(DecoderTraffic):
    """Messages. layer: a block of the first stack, one micro batch; step_by_stage: messages of a
    step of one rank of each stage; validation_by_stage: those of one validation of
    `training.eval_samples`, of the first replica."""

    phi_bytes: int
    layer: BlockTrafficEntry
    step_by_stage: list[list[MessageEntry]]
    validation_by_stage: list[list[MessageEntry]]


class StageMemoryEntry(TypedDict):
    """Bytes on one rank of a stage; `allocated_bytes` by tensors, `device_bytes` in all."""

    stage: int
    parameters: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    working_bytes: int
    lasting_bytes: int
    slack_bytes: int
    context_bytes: int
    total_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int
    in_flight: int


class MemoryEntry(TypedDict):
    """Memory by stage, and the tensors of one checkpoint."""

    stages: list[StageMemoryEntry]
    checkpoint_bytes: int
    is_lower_bound: bool


class NoTimeEntry(TypedDict):
    """Why the step's time cannot be stated."""

    step_seconds: None
    reason: str


class TimeEntry(TypedDict):
    """The step's time: 9 of 10 measured steps lie between low and high; breakdown: by part."""

    step_seconds: float
    low_seconds: float
    high_seconds: float
    extrapolates: list[str]
    is_lower_bound: bool
    breakdown: dict[str, float]
    flops_per_rank: float
    model_flops_per_rank: float
    mfu: float
    hfu: float


class RanksPart(TypedDict, total=False):
    """Every rank, of a small world or where they are wanted."""

    ranks: list[RankEntry]


class StagesPart(TypedDict, total=False):
    """What only a plan with a model has: the layers of each stage."""

    stages: list[Spans]
    stage_stacks: list[StackSpans]


class RuntimesPart(TypedDict, total=False):
    """The same layout under each of the runtimes of `--runtimes`."""

    runtimes: list[RuntimeEntry]


class NearestPart(TypedDict, total=False):
    """Layouts near one that does not fit, which do."""

    nearest_that_fit: list[NearbyEntry]


class EstimatePart(TypedDict, total=False):
    """What only a plan with a model has: its estimates."""

    summary: SummaryEntry
    communication: CommunicationEntry
    parameters: int
    memory: MemoryEntry
    time: TimeEntry | NoTimeEntry


class PlanDocument(
    TensorGridPart, RanksPart, StagesPart, NearestPart, RuntimesPart, EstimatePart
):  # fmt: skip
    """Schema mpctl.plan/2: what `mpctl plan --json` prints. within: of each kind of groups, the
    name of the innermost level of links that holds all of them; None where none does."""

    schema: Literal["mpctl.plan/2"]
    fits: bool | None
    verdict: str
    training: TrainingEntry
    world_size: int
    nodes: int
    gpus_per_node: int
    links: list[LinkEntry]
    within: dict[str, str | None]
    sizes: dict[str, int]
    order: str
    groups: dict[str, list[list[int]] | GroupSummary]
    checks: list[CheckEntry]


LISTED_RANKS = 4096


def wanted_kinds(groups: str | None, known: Collection[str]) -> tuple[str, ...] | None:
    """`"tp,dp"`, `"all"` or `"none"` -> group kinds; None when nothing was asked.

    known: the kinds of the topology. Raises InputError for a name that is none of them.
    """
    if groups is None:
        return None
    if groups in ("all", "none"):
        return tuple(known) if groups == "all" else ()
    kinds = tuple(dict.fromkeys(groups.split(",")))
    unknown = [kind for kind in kinds if kind not in known]
    if unknown:
        raise InputError.of(
            "unknown-group",
            "--groups",
            f"no group is called {unknown[0]!r}",
            f"use {', '.join(known)}, all or none",
        )
    return kinds


def plan_document(
    plan: Plan, topology: Topology, *, kinds: tuple[str, ...] | None, ranks: bool,
    runtimes: Sequence[UnderRuntime] = (),
) -> PlanDocument:  # fmt: skip
    """The plan as JSON. kinds: of groups, to be listed whole; ranks: list every rank; runtimes: the
    same layout under other runtimes, where that was asked for.

    With kinds None, everything of a small world is listed and a summary of a large one.
    """
    is_small = topology.world_size <= LISTED_RANKS
    lists_groups = is_small or kinds is not None
    return {
        "schema": "mpctl.plan/2",
        "fits": plan.fits,
        "verdict": verdict(plan),
        "training": training_settings(plan.job),
        "world_size": topology.world_size,
        "nodes": topology.nodes,
        "gpus_per_node": topology.gpus_per_node,
        "links": link_entries(plan, topology),
        "within": {kind: find_holder_name(plan, topology, kind) for kind in topology.kinds},
        "sizes": topology.whole_sizes,
        "order": "-".join(topology.whole_order),
        **grid_entry(plan.job),
        "groups": {
            kind: list_groups(topology, kind) if lists_groups else group_summary(topology, kind)
            for kind in (tuple(topology.kinds) if kinds is None else kinds)
        },
        **_ranks_part(plan, topology, is_listed=ranks or (kinds is None and is_small)),
        "checks": [{"status": c.status, **c.issue.as_dict()} for c in plan.checks],
        **_stages_part(plan.layout),
        **nearest_part(plan),
        **_runtimes_part(runtimes),
        **_estimate_part(plan),
    }


def list_groups(topology: Topology, kind: str) -> list[list[int]]:
    """Every group of a kind, in Megatron's order."""
    return [list(group) for group in topology.kind_groups(kind)]


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


def _ranks_part(plan: Plan, topology: Topology, *, is_listed: bool) -> RanksPart:
    if not is_listed:
        return {}
    return {"ranks": [rank_entry(plan, topology, r) for r in range(topology.world_size)]}


def rank_entry(plan: Plan, topology: Topology, rank: int) -> RankEntry:
    """One rank: node, number on its node, coordinate along each axis, and its layers."""
    coords = topology.whole_coords(rank)
    return {
        "rank": rank,
        "node": topology.node(rank),
        "local_rank": topology.local_rank(rank),
        "coords": coords,
        **_held_layers(plan, rank),
    }


def _held_layers(plan: Plan, rank: int) -> HeldLayers:
    layout = plan.layout
    if layout is None:
        return {}
    spans = layout.stages[layout.topology.coords(rank)["pp"]]
    layers: HeldLayers = {"layers": _as_lists(spans)}
    if stacks := stack_layers(layout, spans):
        layers["stacks"] = stacks
    return layers


def _as_lists(spans: Iterable[Span]) -> Spans:
    return [list(span) for span in spans]


def stack_layers(layout: JobLayout, spans: Iterable[Span]) -> StackSpans | None:
    """Which layers of its encoder and of its decoder a model has in these spans, by each stack's
    own numbers; None for models of one stack.

    By hand, layers 4 to 9 of 6 + 6 are 4 and 5 of the encoder and 0 to 3 of the decoder.
    """
    model = layout.model
    if model.decoder_layers is None:
        return None
    encoder, decoder = stack_spans(spans, (model.layers, model.decoder_layers))
    return {"encoder": _as_lists(encoder), "decoder": _as_lists(decoder)}


def rank_document(plan: Plan, topology: Topology, rank: int) -> RankDocument:
    """One rank: where it sits, what it holds and every group that it is in.

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
    return {
        "schema": "mpctl.rank/1",
        "world_size": topology.world_size,
        **rank_entry(plan, topology, rank),
        "groups": {kind: list(group) for kind, group in groups.items() if group is not None},
        **blocks_entry(plan, topology, rank),
    }


def _stages_part(layout: JobLayout | None) -> StagesPart:
    if layout is None:
        return {}
    part: StagesPart = {"stages": [_as_lists(spans) for spans in layout.stages]}
    stacks = [parts for spans in layout.stages if (parts := stack_layers(layout, spans))]
    return {**part, "stage_stacks": stacks} if stacks else part


def nearest_part(plan: Plan) -> NearestPart:
    """The layouts that fit, near a plan that does not; empty where it fits."""
    if not plan.nearest:
        return {}
    return {"nearest_that_fit": [near.as_dict() for near in plan.nearest]}


def _runtimes_part(runtimes: Sequence[UnderRuntime]) -> RuntimesPart:
    return {"runtimes": [under.as_dict() for under in runtimes]} if runtimes else {}


def _estimate_part(plan: Plan) -> EstimatePart:
    estimate = plan.estimate
    if estimate is None:
        return {}
    return {
        "summary": plan_summary(plan).as_dict(),
        "communication": communication_entry(estimate),
        "parameters": estimate.parameters,
        "memory": memory_entry(estimate),
        "time": time_entry(estimate.time),
    }


def communication_entry(estimate: Estimate) -> CommunicationEntry:
    """The messages of a block, of a step and of a validation."""
    first, *others = estimate.blocks
    decoder: DecoderTraffic = {"decoder_layer": _block_entry(others[0])} if others else {}
    samples = estimate.layout.job.training.eval_samples
    return {
        "phi_bytes": first.whole.phi_bytes,
        "layer": _block_entry(first),
        **decoder,
        "step_by_stage": [[_message_entry(m) for m in stage] for stage in estimate.messages],
        "validation_by_stage": [
            [_message_entry(m) for m in estimate.validation(stage, replica=0, samples=[samples])]
            for stage in range(len(estimate.layout.stages) if samples else 0)
        ],
    }


def _block_entry(block: BlockTraffic) -> BlockTrafficEntry:
    whole = block.whole
    parts: BlockTrafficEntry = {
        name: _part_entry(part, block.mode) for name, part in block.parts.items()
    }
    return {
        **parts,
        "all_reduces": whole.all_reduces,
        "volume_phi": whole.volume_phi,
        "volume_bytes": whole.volume_bytes,
        "ring_bytes_per_rank": whole.ring_bytes_per_rank,
    }


def _part_entry(part: PartTraffic, mode: str) -> PartTrafficEntry:
    entry: PartTrafficEntry = {
        "all_reduces": part.all_reduces,
        "volume_phi": part.volume_phi,
        "volume_bytes": part.volume_bytes,
    }
    if mode != "1d":
        entry["sent"] = list(map(_sent_entry, part.by_kind()))
    return entry


def _sent_entry(sent: PartTraffic) -> SentEntry:
    first = sent.messages[0]
    return {
        "axis": first.axis,
        "kind": first.kind,
        "count": sum(message.count for message in sent.messages),
        "volume_bytes": sent.volume_bytes,
        "ring_bytes_per_rank": sent.ring_bytes_per_rank,
    }


def _message_entry(message: MessageCount) -> MessageEntry:
    return {
        "axis": message.axis,
        "kind": message.kind,
        "what": message.what,
        "bytes": message.bytes,
        "count": message.count,
    }


def memory_entry(estimate: Estimate) -> MemoryEntry:
    """The memory of one rank of each stage."""
    return {
        "stages": [_stage_entry(stage) for stage in estimate.memory],
        "checkpoint_bytes": estimate.checkpoint_bytes,
        "is_lower_bound": False,
    }


def _stage_entry(stage: StageMemory) -> StageMemoryEntry:
    return {
        "stage": stage.stage,
        "parameters": stage.parameters,
        "parameter_bytes": stage.parameter_bytes,
        "gradient_bytes": stage.gradient_bytes,
        "optimizer_bytes": stage.optimizer_bytes,
        "activation_bytes": stage.activation_bytes,
        "working_bytes": stage.working_bytes,
        "lasting_bytes": stage.lasting_bytes,
        "slack_bytes": stage.slack_bytes,
        "context_bytes": stage.context_bytes,
        "total_bytes": stage.total_bytes,
        "allocated_bytes": stage.allocated_bytes,
        "reserved_bytes": stage.reserved_bytes,
        "device_bytes": stage.device_bytes,
        "in_flight": stage.in_flight,
    }


def time_entry(time: StepTime | str) -> TimeEntry | NoTimeEntry:
    """The step's time by part, or why it cannot be stated."""
    if isinstance(time, str):
        return {"step_seconds": None, "reason": time}
    return {
        "step_seconds": time.total,
        "low_seconds": time.low,
        "high_seconds": time.high,
        "extrapolates": list(time.extrapolates),
        "is_lower_bound": False,
        "breakdown": time.parts(),
        "flops_per_rank": time.hardware_flops,
        "model_flops_per_rank": time.model_flops,
        "mfu": time.mfu,
        "hfu": time.hfu,
    }
