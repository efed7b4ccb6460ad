"""Every estimate of one job, as one frozen value: what it sends, holds and takes.

Each is computed when it is first asked for: a batch of jobs that wants times counts no messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from mpctl.estimate.checkpoint import checkpoint_bytes
from mpctl.estimate.communication import BlockTraffic, block_traffic
from mpctl.estimate.memory import StageMemory, stage_memory
from mpctl.estimate.messages import Message, step_messages
from mpctl.estimate.time import StepTime, find_step_time
from mpctl.estimate.validation import validation_messages
from mpctl.families import get_table
from mpctl.operators.table import OperatorTable
from mpctl.pipeline.stages import Span
from mpctl.spec.job import JobSpec
from mpctl.spec.model import ModelSpec
from mpctl.topology import Topology


@dataclass(frozen=True)
class Estimate:
    """What the model costs under this layout."""

    job: JobSpec
    model: ModelSpec
    table: OperatorTable
    topology: Topology
    stages: list[list[Span]]

    @cached_property
    def blocks(self) -> tuple[BlockTraffic, ...]:
        """The last block of each stack."""
        return tuple(
            block_traffic(self.job, self.model, stack, flow.last)
            for stack, flow in zip(self.table.stacks, self.table.flows, strict=True)
        )

    @cached_property
    def messages(self) -> tuple[tuple[Message, ...], ...]:
        """Of one rank of each stage."""
        return tuple(step_messages(self.job, self.model, self.table, self.stages))

    def validation(self, stage: int, replica: int, samples: Sequence[int]) -> tuple[Message, ...]:
        """Messages of one validation, of one rank of a stage in a data-parallel replica; samples:
        of each corpus."""
        return validation_messages(
            self.job, self.model, self.table, self.stages,
            stage=stage, replica=replica, samples=samples,
        )  # fmt: skip

    @property
    def parameters(self) -> int:
        return self.table.numel

    @cached_property
    def memory(self) -> tuple[StageMemory, ...]:
        return tuple(stage_memory(self.job, self.model, self.table, self.stages))

    @cached_property
    def checkpoint_bytes(self) -> int:
        """Bytes of all tensors of one checkpoint, without the files' headers."""
        return checkpoint_bytes(self.job, self.table, self.stages)

    @cached_property
    def time(self) -> StepTime | str:
        return find_step_time(self.job, self.model, self.table, self.stages, self.topology)

    @property
    def step_seconds(self) -> float | None:
        return self.time.total if isinstance(self.time, StepTime) else None


def estimate_job(job: JobSpec, topology: Topology, stages: list[list[Span]]) -> Estimate:
    """Of a legal job with a model."""
    assert job.model is not None
    whole = get_table(job.model, tp=job.parallel.tp)
    table = replace(whole, freeze=tuple(job.training.freeze))
    return Estimate(job, job.model, table, topology, stages)
