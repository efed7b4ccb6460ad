"""A plan: one job with everything that follows from it, as one frozen value.

`make_plan` never prints and never fails on a bad layout: the checks say what is wrong, and what
cannot be known without a legal layout is None.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mpctl.errors import InputError
from mpctl.estimate.communication import BlockTraffic, block_traffic
from mpctl.estimate.memory import StageMemory, stage_memory
from mpctl.estimate.messages import Message, step_messages
from mpctl.estimate.time import StepTime, find_step_time
from mpctl.families import find_table
from mpctl.families.gpt.ops import BLOCK
from mpctl.families.table import OperatorTable
from mpctl.rules.check import Check
from mpctl.rules.layout import find_topology, job_stages
from mpctl.rules.model import memory_check
from mpctl.spec.job import JobSpec
from mpctl.spec.load import load_partial
from mpctl.stages import Span
from mpctl.topology import Topology
from mpctl.validate import check_job


@dataclass(frozen=True)
class Estimate:
    """What the model costs under this layout; absent parts say why in `time`."""

    block: BlockTraffic
    messages: tuple[tuple[Message, ...], ...] = ()
    parameters: int | None = None
    memory: tuple[StageMemory, ...] = ()
    time: StepTime | str = "no operator table for this family yet"

    @property
    def step_seconds(self) -> float | None:
        return self.time.total if isinstance(self.time, StepTime) else None


@dataclass(frozen=True)
class Plan:
    job: JobSpec
    checks: tuple[Check, ...]
    topology: Topology | None
    stages: tuple[tuple[Span, ...], ...] | None
    estimate: Estimate | None

    @property
    def errors(self) -> list[Check]:
        return [check for check in self.checks if check.status == "error"]

    @property
    def warnings(self) -> list[Check]:
        return [check for check in self.checks if check.status == "warning"]

    def require_legal(self) -> Topology:
        """The topology of a legal plan; raises InputError with every error otherwise."""
        if self.errors or self.topology is None:
            raise InputError([check.issue for check in self.errors])
        return self.topology


def load_plan(source: str | None, overrides: Mapping[str, Any] | None = None) -> Plan:
    """The legal plan of a job by path or preset name; raises InputError with every issue at once,
    those of the schema and those of the rules that can still be asked."""
    loaded = load_partial(source, overrides)
    checks = check_job(loaded.job, loaded.doubtful) if loaded.job else []
    errors = [check.issue for check in checks if check.status == "error"]
    if loaded.issues or errors or loaded.job is None:
        raise InputError([*loaded.issues, *errors])
    return make_plan(loaded.job)


def make_plan(job: JobSpec) -> Plan:
    checks = check_job(job)
    legal = all(check.status != "error" for check in checks)
    topology = find_topology(job)
    stages = job_stages(job, job.model.layers) if job.model and legal else None
    estimate = _estimate(job, topology, stages) if legal and topology and stages else None
    if estimate and estimate.memory:
        heaviest = max(estimate.memory, key=lambda stage: stage.total_bytes)
        fits = memory_check(job, heaviest.total_bytes, heaviest.stage)
        checks += [fits] if fits else []
    frozen = tuple(tuple(spans) for spans in stages) if stages else None
    return Plan(job, tuple(checks), topology, frozen, estimate)


def _estimate(job: JobSpec, topology: Topology, stages: list[list[Span]]) -> Estimate:
    assert job.model is not None
    model = job.model
    table = find_table(model, tp=job.parallel.tp)
    if table is None:  # every family is made of the same two parallel layers
        return Estimate(block=block_traffic(job, model, BLOCK))
    return Estimate(
        block=block_traffic(job, model, table.block),
        messages=tuple(_messages(job, table, stages)),
        parameters=table.numel,
        memory=tuple(stage_memory(job, model, table, stages)),
        time=find_step_time(job, model, table, stages, topology),
    )


def _messages(
    job: JobSpec, table: OperatorTable, stages: list[list[Span]]
) -> list[tuple[Message, ...]]:
    assert job.model is not None
    return [
        tuple(step_messages(job, job.model, table, spans, stage=stage))
        for stage, spans in enumerate(stages)
    ]
