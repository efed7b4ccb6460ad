"""Every estimate of one job, as one frozen value: what it sends, holds and takes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mpctl.estimate.communication import BlockTraffic, block_traffic
from mpctl.estimate.memory import StageMemory, stage_memory
from mpctl.estimate.messages import Message, step_messages
from mpctl.estimate.time import StepTime, find_step_time
from mpctl.families import get_table
from mpctl.spec.job import JobSpec
from mpctl.stages import Span
from mpctl.topology import Topology


@dataclass(frozen=True)
class Estimate:
    """What the model costs under this layout. blocks: the last block of each stack."""

    blocks: tuple[BlockTraffic, ...]
    messages: tuple[tuple[Message, ...], ...]
    parameters: int
    memory: tuple[StageMemory, ...]
    time: StepTime | str

    @property
    def step_seconds(self) -> float | None:
        return self.time.total if isinstance(self.time, StepTime) else None


def estimate_job(job: JobSpec, topology: Topology, stages: list[list[Span]]) -> Estimate:
    """Of a legal job with a model."""
    assert job.model is not None
    model = job.model
    whole = get_table(model, tp=job.parallel.tp)
    table = replace(whole, freeze=tuple(job.training.freeze))
    messages = tuple(step_messages(job, model, table, stages))
    return Estimate(
        blocks=tuple(
            block_traffic(job, model, stack, flow.last)
            for stack, flow in zip(table.stacks, table.flows, strict=True)
        ),
        messages=messages,
        parameters=table.numel,
        memory=tuple(stage_memory(job, model, table, stages)),
        time=find_step_time(job, model, table, stages, topology, messages),
    )
