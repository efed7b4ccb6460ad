"""The estimates of a plan as JSON: messages, memory and time, entries of schema mpctl.plan/1."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpctl.estimate.block_traffic import BlockTraffic, PartTraffic
    from mpctl.estimate.job import Estimate
    from mpctl.estimate.memory import StageMemory
    from mpctl.estimate.message import MessageCount
    from mpctl.estimate.step import StepTime
    from mpctl.planning.schemas import (
        BlockTrafficEntry,
        CommunicationEntry,
        DecoderTraffic,
        MemoryEntry,
        MessageEntry,
        NoTimeEntry,
        PartTrafficEntry,
        SentEntry,
        StageMemoryEntry,
        TimeEntry,
    )


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
