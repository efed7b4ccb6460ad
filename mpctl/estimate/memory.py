"""What one rank of each stage holds at most: states, activations, and what is there for a moment.

States are exact counts (states.py).

Activations are the tensors of the operator table (activations.py) of as many micro batches as the
schedule has in flight (pipeline/schedule/orders.py): min(p - stage, m) under 1F1B, all m under
GPipe; the one under way has its most. `allocated` is what is asked for, `reserved` with the
allocator's slack, and the device holds the libraries' context besides. The heaviest stage decides.

By hand, gpt of 8 layers on 4 stages, 1F1B: stage 0 has 4 micro batches of 2 layers, as many layers
as the model; 3 wait, the 4th goes backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from mpctl.estimate.activations import (
    SENT,
    ChunkBytes,
    chunk_bytes,
    form_of,
    is_cuda,
    memory_of,
)
from mpctl.estimate.communication import message_bytes
from mpctl.estimate.states import StateBytes, find_states, weights_besides
from mpctl.layout.buckets import shared_names, zero_stage
from mpctl.operators.table import OperatorTable
from mpctl.pipeline.schedule.orders import actions, peak_in_flight
from mpctl.pipeline.stages import Span
from mpctl.spec.job import JobSpec
from mpctl.spec.model import ModelSpec
from mpctl.spec.parallel import ScheduleName


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes on one rank of a pipeline stage. in_flight: chunks of micro batches held at most;
    activation_bytes: all that is kept for backwards at once; working_bytes: the rest of the peak;
    lasting_bytes: of the software's own, from the first step on."""

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
    in_flight: int

    @property
    def state_bytes(self) -> int:
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes

    @property
    def allocated_bytes(self) -> int:
        """The most at once, as an allocator counts what it was asked for."""
        return self.state_bytes + self.activation_bytes + self.working_bytes + self.lasting_bytes

    @property
    def reserved_bytes(self) -> int:
        return self.allocated_bytes + self.slack_bytes

    @property
    def device_bytes(self) -> int:
        """As the device's own tools show it."""
        return self.reserved_bytes + self.context_bytes

    @property
    def total_bytes(self) -> int:
        return self.allocated_bytes


def stage_memory(
    job: JobSpec, model: ModelSpec, table: OperatorTable, stages: list[list[Span]]
) -> list[StageMemory]:
    """One entry a stage; the heaviest decides whether the job fits."""
    memory, shared = memory_of(job), frozenset[str]()
    if memory.kernels == "mpctl" and zero_stage(job):
        shared = shared_names(table, stages)
    t, p = job.training, job.parallel
    settings = (form_of(job, model), t.runtime, t.dtype, t.gradient_dtype, p.zero, p.bucket_bytes,
                job.sizes["dp"], p.pp > 1, shared)  # fmt: skip
    scale = (memory.slack - 1, round(memory.context_bytes)) if is_cuda(job) else (0.0, 0)
    found = []
    for stage, spans in enumerate(stages):
        key = ("memory", *map(tuple, spans), stage == 0, stage == p.pp - 1, settings)
        held = table.known.get(key)
        if held is None:
            held = _Stage.of(job, model, table, spans, stage=stage, shared=shared)
            table.known[key] = held
        found.append(_at_peak(job, held, stage, *scale))
    return found


@dataclass(frozen=True, slots=True)
class _Stage:
    """Of a stage, whatever its number: work: of weights and messages, beside a chunk's own."""

    states: StateBytes
    chunks: tuple[ChunkBytes, ...]
    lasting: int
    work: float

    @classmethod
    def of(
        cls, job: JobSpec, model: ModelSpec, table: OperatorTable, spans: Sequence[Span], *,
        stage: int, shared: frozenset[str],
    ) -> _Stage:  # fmt: skip
        states = find_states(job, table, spans, stage=stage, shared=shared)
        chunks = tuple(chunk_bytes(job, model, table, span, stage=stage) for span in spans)
        lasting, gathered = weights_besides(job, model, table, spans, stage=stage)
        work = gathered + states.passing
        if job.parallel.pp > 1:
            ends = {layer for span in spans for layer in span}
            message = max(message_bytes(job, model, dims)
                          for layer in ends for dims in table.boundary(layer))  # fmt: skip
            work += (SENT + 1) * message / _split(job)
        return cls(states, chunks, round(lasting), work)


def _at_peak(job: JobSpec, held: _Stage, stage: int, slack: float, context: int) -> StageMemory:
    states = held.states
    kept, peak, in_flight = held_at_most(job, held.chunks, stage=stage)
    activations = round(kept)
    work = round(max(peak - kept + held.work, states.stepping - kept))
    bare = states.parameters + states.gradients + states.optimizer
    allocated = bare + activations + work + held.lasting
    return StageMemory(
        stage, states.count, states.parameters, states.gradients, states.optimizer, activations,
        work, held.lasting, round(allocated * slack), context, in_flight,
    )  # fmt: skip


def _split(job: JobSpec) -> int:
    return job.parallel.tp if job.parallel.sequence_parallel else 1


def held_at_most(
    job: JobSpec, chunks: Sequence[ChunkBytes], *, stage: int
) -> tuple[float, float, int]:
    """(kept for backwards at most, most with what an action under way has, chunks in flight)."""
    p = job.parallel
    schedule: ScheduleName = p.schedule if p.pp > 1 else "1f1b"
    return _held(schedule, stage, p.pp, job.num_microbatches, tuple(chunks))


def _in_two(chunk: ChunkBytes, stage: int, stages: int, microbatches: int) -> tuple[float, float]:
    """(kept at most, most at once) where backward is in two: zero-bubble.

    Before the backward of micro batch j on stage s there are, besides itself, min(p - s - 1,
    m - 1 - j) that have gone forward and min(j, s) whose weights' gradients are put off; behind it
    its own are put off too.
    """
    ahead, kept, peak = stages - stage - 1, 0.0, 0.0
    for j in range(min(stage, microbatches - 1) + 1):
        others = min(ahead, microbatches - 1 - j) * chunk.kept + j * chunk.put_off
        kept = max(kept, others + max(chunk.kept, chunk.put_off))
        peak = max(peak, others + chunk.split_top, others + chunk.put_off)
    return kept, peak


@lru_cache(maxsize=65536)
def _held(
    schedule: ScheduleName, stage: int, stages: int, microbatches: int,
    chunks: tuple[ChunkBytes, ...],
) -> tuple[float, float, int]:  # fmt: skip
    sizes = {"stage": stage, "stages": stages, "chunks": len(chunks)}
    count = peak_in_flight(schedule, microbatches=microbatches, **sizes)
    if len(chunks) == 1:
        (only,) = chunks
        if schedule == "zero-bubble":
            return *_in_two(only, stage, stages, microbatches), count
        return count * only.kept, (count - 1) * only.kept + only.top, count
    few = min(microbatches, 4 * stages)  # the memory of a stage repeats once the pipeline is full
    held = most = peak = 0.0
    for kind, _, chunk in actions(schedule, microbatches=few, **sizes):
        kept = chunks[chunk].kept
        held += kept if kind == "forward" else 0.0
        most, peak = max(most, held), max(peak, held + chunks[chunk].work)
        held -= kept if kind != "forward" else 0.0
    return most, peak, count


def fullest_stage(memory: Iterable[StageMemory]) -> StageMemory:
    """The stage whose ranks need most memory on their device."""
    return max(memory, key=lambda stage: stage.device_bytes)


def peak_bytes(memory: Iterable[StageMemory]) -> int:
    """Bytes on the device of the fullest rank: what has to fit there."""
    return fullest_stage(memory).device_bytes
