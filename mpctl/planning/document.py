"""The plan as data: the JSON of `mpctl plan`, schema mpctl.plan/1.

Group lists are in Megatron's order. Up to 4,096 ranks everything is listed unless asked otherwise;
beyond, groups are counted, with the first and the last as examples.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from mpctl.axes import AXIS_NAMES, GROUP_KINDS
from mpctl.errors import InputError
from mpctl.pipeline.stages import Span, stack_spans
from mpctl.planning.plan import Plan
from mpctl.planning.summary import plan_summary, training_settings, verdict
from mpctl.topology import Topology
from mpctl.units import plural

if TYPE_CHECKING:
    from mpctl.estimate.communication import BlockTraffic
    from mpctl.estimate.job import Estimate
    from mpctl.estimate.time import StepTime

LISTED_RANKS = 4096


def wanted_kinds(groups: str | None) -> tuple[str, ...] | None:
    """`"tp,dp"`, `"all"` or `"none"` -> group kinds; None when nothing was asked."""
    if groups is None:
        return None
    if groups in ("all", "none"):
        return tuple(GROUP_KINDS) if groups == "all" else ()
    kinds = tuple(dict.fromkeys(groups.split(",")))
    unknown = [kind for kind in kinds if kind not in GROUP_KINDS]
    if unknown:
        raise InputError.of(
            "unknown-group",
            "--groups",
            f"no group is called {unknown[0]!r}",
            f"use {', '.join(GROUP_KINDS)}, all or none",
        )
    return kinds


def plan_document(
    plan: Plan, topology: Topology, *, kinds: tuple[str, ...] | None, ranks: bool
) -> dict[str, Any]:
    """kinds None lists everything a small world has and a summary of a large one."""
    small = topology.world_size <= LISTED_RANKS
    list_groups = small or kinds is not None
    chosen = tuple(topology.kinds) if kinds is None else kinds
    document: dict[str, Any] = {
        "schema": "mpctl.plan/1",
        "fits": plan.fits,
        "verdict": verdict(plan),
        "training": training_settings(plan.job),
        "world_size": topology.world_size,
        "nodes": topology.nodes,
        "gpus_per_node": topology.gpus_per_node,
        "sizes": dict(topology.sizes),
        "order": "-".join(topology.order),
        "groups": {
            kind: [list(group) for group in topology.kind_groups(kind)]
            if list_groups
            else group_summary(topology, kind)
            for kind in chosen
        },
    }
    if ranks or (kinds is None and small):
        document["ranks"] = [rank_entry(plan, topology, r) for r in range(topology.world_size)]
    document["checks"] = [{"status": c.status, **c.issue.as_dict()} for c in plan.checks]
    if plan.stages is not None:
        document["stages"] = [list(map(list, spans)) for spans in plan.stages]
        if any(stacks := [stack_layers(plan, spans) for spans in plan.stages]):
            document["stage_stacks"] = stacks
    if plan.nearest:
        document["nearest_that_fit"] = [near.as_dict() for near in plan.nearest]
    return document | _estimate_entries(plan)


def group_summary(topology: Topology, kind: str) -> dict[str, Any]:
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


def rank_entry(plan: Plan, topology: Topology, rank: int) -> dict[str, Any]:
    coords = topology.coords(rank)
    entry: dict[str, Any] = {
        "rank": rank,
        "node": topology.node(rank),
        "local_rank": topology.local_rank(rank),
        "coords": coords,
    }
    if plan.stages is not None:
        spans = plan.stages[coords["pp"]]
        entry["layers"] = list(map(list, spans))
        entry |= {"stacks": stacks} if (stacks := stack_layers(plan, spans)) else {}
    return entry


def stack_layers(plan: Plan, spans: Iterable[Span]) -> dict[str, list[list[int]]]:
    """Of a model with two stacks, what a stage holds of each, by the stack's own numbers: layers 4
    to 9 of 6 + 6 are 4 and 5 of the encoder, 0 to 3 of the decoder. Empty for other models."""
    model = plan.job.model
    if model is None or model.decoder_layers is None:
        return {}
    encoder, decoder = stack_spans(spans, (model.layers, model.decoder_layers))
    return {"encoder": list(map(list, encoder)), "decoder": list(map(list, decoder))}


def rank_document(plan: Plan, topology: Topology, rank: int) -> dict[str, Any]:
    """One rank: where it sits, what it holds and every group that it is in."""
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
    }


def _estimate_entries(plan: Plan) -> dict[str, Any]:
    estimate = plan.estimate
    if estimate is None:
        return {}
    return {
        "summary": plan_summary(plan).as_dict(),
        "communication": communication_entry(estimate),
        "parameters": estimate.parameters,
        "memory": {
            "stages": [_memory_entry(s) for s in estimate.memory],
            "checkpoint_bytes": estimate.checkpoint_bytes,
            "is_lower_bound": False,
        },
        "time": _time_entry(estimate.time),
    }


def communication_entry(estimate: Estimate) -> dict[str, Any]:
    """`layer` is a block of the first stack; an encoder-decoder has `decoder_layer` beside it.
    `step_by_stage`: messages of a step of one rank of each stage; `validation_by_stage`: of one
    validation of `training.eval_samples`, of the first replica."""
    first, *others = estimate.blocks
    entries = {f"{block.stack.name}_layer": _block_entry(block) for block in others}
    step = [[_message_entry(m) for m in stage] for stage in estimate.messages]
    samples = estimate.layout.job.training.eval_samples
    validation = [
        [_message_entry(m) for m in estimate.validation(stage, replica=0, samples=[samples])]
        for stage in range(len(estimate.layout.stages)) if samples
    ]  # fmt: skip
    return {"phi_bytes": first.phi_bytes, "layer": _block_entry(first), **entries,
            "step_by_stage": step, "validation_by_stage": validation}  # fmt: skip


def _block_entry(block: BlockTraffic) -> dict[str, Any]:
    parts = {
        name: {
            "all_reduces": part.all_reduces,
            "volume_phi": part.volume_phi,
            "volume_bytes": part.volume_bytes,
        }
        for name, part in block.parts.items()
    }
    return parts | _block_totals(block)


def _block_totals(block: BlockTraffic) -> dict[str, Any]:
    names = ("all_reduces", "volume_phi", "volume_bytes", "ring_bytes_per_rank")
    return {name: getattr(block, name) for name in names}


def _message_entry(message: Any) -> dict[str, Any]:
    return {key: getattr(message, key) for key in ("axis", "kind", "what", "bytes", "count")}


def _memory_entry(stage: Any) -> dict[str, Any]:
    keys = (
        "stage",
        "parameters",
        "parameter_bytes",
        "gradient_bytes",
        "optimizer_bytes",
        "activation_bytes",
        "working_bytes",
        "lasting_bytes",
        "slack_bytes",
        "context_bytes",
        "total_bytes",
        "allocated_bytes",
        "reserved_bytes",
        "device_bytes",
        "in_flight",
    )
    return {key: getattr(stage, key) for key in keys}


def _time_entry(time: StepTime | str) -> dict[str, Any]:
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


def axis_sizes(sizes: Iterable[tuple[str, int]]) -> str:
    """`tp 2 x dp 2 x pp 4`; axes of size 1 are left out unless all are."""
    used = [f"{axis} {size}" for axis, size in sizes if size > 1 and axis in AXIS_NAMES]
    return " x ".join(used) or "one rank"
