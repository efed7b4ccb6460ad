"""The plan as data: the JSON of `mpctl plan`, schema mpctl.plan/1.

Group lists are in Megatron's order. Up to 4,096 ranks everything is listed unless asked otherwise;
beyond, groups are counted, with the first and the last as examples.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from mpctl.errors import InputError
from mpctl.pipeline.stages import Span, stack_spans
from mpctl.planning.estimate_document import communication_entry, memory_entry, time_entry
from mpctl.planning.links import find_holder_name, link_entries
from mpctl.planning.plan import Plan
from mpctl.planning.summary import plan_summary, verdict
from mpctl.planning.tensor_blocks import blocks_entry, grid_entry
from mpctl.planning.training import training_settings
from mpctl.topology import Topology
from mpctl.units import plural

if TYPE_CHECKING:
    from mpctl.layout.job_layout import JobLayout
    from mpctl.planning.runtimes import UnderRuntime
    from mpctl.planning.schemas import (
        EstimatePart,
        GroupSummary,
        HeldLayers,
        NearestPart,
        PlanDocument,
        RankDocument,
        RankEntry,
        RanksPart,
        RuntimesPart,
        Spans,
        StackSpans,
        StagesPart,
    )

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
        "schema": "mpctl.plan/1",
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
