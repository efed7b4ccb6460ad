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

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar, NamedTuple

from mpctl.estimate.activation_shapes import ActivationShapes, activation_shapes, is_cuda
from mpctl.estimate.activations import ChunkBytes, stage_chunks
from mpctl.estimate.attention import kernels_of
from mpctl.estimate.communication import message_bytes
from mpctl.estimate.states import StateBytes, find_states, weights_besides
from mpctl.layout.job_layout import MAX_SENDS_IN_FLIGHT, JobLayout
from mpctl.pipeline.schedule.orders import actions, peak_in_flight
from mpctl.spec.cluster import ClusterSpec
from mpctl.spec.job import JobSpec
from mpctl.spec.model import ModelSpec
from mpctl.spec.parallel import ScheduleName
from mpctl.spec.runtime import RuntimeMemory
from mpctl.spec.schedules import SCHEDULES
from mpctl.units import bytes_text, part_text


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes on one rank of a pipeline stage. in_flight: chunks of micro batches held at most;
    activation_bytes: all that is kept for backwards at once; working_bytes: the rest of the peak;
    lasting_bytes: of the software's own, from the first step on."""

    JSON_PROPERTIES: ClassVar = ("allocated_bytes", "reserved_bytes", "device_bytes")

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
        """Parameters, gradients and optimizer states."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes

    @property
    def allocated_bytes(self) -> int:
        """The most at once, as an allocator counts what it was asked for."""
        return self.state_bytes + self.activation_bytes + self.working_bytes + self.lasting_bytes

    @property
    def reserved_bytes(self) -> int:
        """Allocated bytes with the slack that the allocator reserves besides."""
        return self.allocated_bytes + self.slack_bytes

    @property
    def device_bytes(self) -> int:
        """As the device's own tools show it."""
        return self.reserved_bytes + self.context_bytes


class StageWeights(NamedTuple):
    """Bytes on one rank of a stage that no micro batch changes. lasting, passing: as large as
    weights, from the first step on and for a moment."""

    states: StateBytes
    lasting: float
    passing: float

    @classmethod
    def of(cls, layout: JobLayout, stage: int) -> StageWeights:
        """What one rank of this stage holds of weights and states."""
        return cls(find_states(layout, stage), *weights_besides(layout, stage))


class StageContents(NamedTuple):
    """Bytes on one rank of a stage that do not depend on how many micro batches are in flight.

    work: beside a chunk's own, of weights and messages, for a moment of a backward.
    """

    states: StateBytes
    chunks: tuple[ChunkBytes, ...]
    lasting: int
    work: float

    @classmethod
    def of(
        cls, layout: JobLayout, stage: int, shapes: ActivationShapes, weights: StageWeights
    ) -> StageContents:
        """What one rank of this stage holds; shapes: those of the layout's activations."""
        lasting = weights.lasting + gather_buffers(shapes, layout.profile.memory)
        lasting += rotary_table_bytes(layout, stage, shapes)
        work = weights.passing + weights.states.passing
        if layout.job.parallel.pp > 1:
            ends = {layer for span in layout.stages[stage] for layer in span}
            dims = {dims for layer in ends for dims in layout.table.boundary(layer)}
            message = max(message_bytes(layout, own) for own in dims)
            work += (MAX_SENDS_IN_FLIGHT + 1) * message / _split(layout.job)
        return cls(weights.states, stage_chunks(layout, stage, shapes), round(lasting), work)


@dataclass(frozen=True, slots=True)
class MemoryCache:
    """What stages hold, by all that it follows from: owned by who compares many layouts of one
    model on one device."""

    contents: dict[Hashable, StageContents] = field(default_factory=dict)
    weights: dict[Hashable, StageWeights] = field(default_factory=dict)


def gather_buffers(shapes: ActivationShapes, memory: RuntimeMemory) -> float:
    """Bytes that a runtime keeps for gathered hidden states, from the first step on."""
    if not shapes.splits:
        return 0.0
    return memory.gather_buffers * shapes.batch * shapes.seq * shapes.hidden * shapes.value


def layout_memory(layout: JobLayout, cache: MemoryCache | None = None) -> list[StageMemory]:
    """The memory of one rank of each stage; the heaviest decides whether the job fits.

    cache: contents of stages that other layouts of the same model and device had, and where those
    of this layout are added. Stages that hold as much share theirs even without one.
    """
    known = MemoryCache() if cache is None else cache
    shapes, settings = activation_shapes(layout), _settings(layout)
    return [
        _at_peak(layout, _contents(layout, stage, shapes, settings, known), stage)
        for stage in range(len(layout.stages))
    ]


def first_stage_memory(layout: JobLayout, cache: MemoryCache | None = None) -> StageMemory:
    """The memory of one rank of the first stage alone; cache: as of `layout_memory`."""
    known = MemoryCache() if cache is None else cache
    contents = _contents(layout, 0, activation_shapes(layout), _settings(layout), known)
    return _at_peak(layout, contents, 0)


def _settings(layout: JobLayout) -> Hashable:
    """What the weights of a stage follow from, besides its layers and whether it is an end."""
    job, shared = layout.job, frozenset[str]()
    t, p = job.training, job.parallel
    if kernels_of(layout).slices_buckets and any(v.zero for v in layout.views.values()):
        shared = frozenset(layout.shared_parameters)
    splits_backward = p.pp > 1 and SCHEDULES[p.schedule].splits_backward
    views = tuple((v.name, v.replicas, v.grid.size) for v in layout.views.values())
    grid = p.tp, p.tensor_mode, p.tensor_depth, p.sequence_parallel
    return (*grid, t.runtime, t.dtype, t.fp8_recipe, t.fp8_amax_history_len, t.gradient_dtype,
            p.zero, splits_backward, p.bucket_bytes, views, p.pp > 1,
            shared)  # fmt: skip


def _contents(
    layout: JobLayout, stage: int, shapes: ActivationShapes, settings: Hashable, known: MemoryCache
) -> StageContents:
    key = (layout.stages[stage], stage == 0, stage == layout.head_stage, settings)
    contents = known.contents.get((key, shapes))
    if contents is None:
        weights = known.weights.get(key)
        if weights is None:
            weights = known.weights[key] = StageWeights.of(layout, stage)
        contents = StageContents.of(layout, stage, shapes, weights)
        known.contents[key, shapes] = contents
    return contents


def _at_peak(layout: JobLayout, contents: StageContents, stage: int) -> StageMemory:
    """The stage with as many micro batches in flight as its schedule has at most."""
    states = contents.states
    kept, peak, in_flight = peak_activations(layout, contents.chunks, stage=stage)
    activations = round(kept)
    work = round(max(peak - kept + contents.work, states.stepping - kept))
    bare = states.parameters + states.gradients + states.optimizer
    slack, context = beside_tensors(layout, bare + activations + work + contents.lasting)
    return StageMemory(
        stage=stage,
        parameters=states.count,
        parameter_bytes=states.parameters,
        gradient_bytes=states.gradients,
        optimizer_bytes=states.optimizer,
        activation_bytes=activations,
        working_bytes=work,
        lasting_bytes=contents.lasting,
        slack_bytes=slack,
        context_bytes=context,
        in_flight=in_flight,
    )


def beside_tensors(layout: JobLayout, allocated: int) -> tuple[int, int]:
    """(allocator's slack, libraries' context): bytes that a rank takes of its device beside so many
    of tensors; none on a CPU."""
    software = layout.profile.memory
    if not is_cuda(layout.job):
        return 0, 0
    return round(allocated * (software.slack - 1)), round(software.context_bytes)


def _split(job: JobSpec) -> int:
    return job.parallel.tp if job.parallel.sequence_parallel else 1


def peak_activations(
    layout: JobLayout, chunks: Sequence[ChunkBytes], *, stage: int
) -> tuple[float, float, int]:
    """Activations of a stage whose chunks take these bytes: (most bytes saved for backwards at
    once, most bytes with what a running action needs besides, most chunks in flight)."""
    p = layout.job.parallel
    schedule: ScheduleName = p.schedule if p.pp > 1 else "1f1b"
    return _held(schedule, stage, p.pp, layout.num_microbatches, tuple(chunks))


def _in_two(chunk: ChunkBytes, stage: int, stages: int, microbatches: int) -> tuple[float, float]:
    """(kept at most, most at once) where backward is in two: zero-bubble.

    Before the backward of micro batch j on stage s there are, besides itself, min(p - s - 1,
    m - 1 - j) that have gone forward and min(j, s) whose weights' gradients are deferred; behind it
    its own are deferred too.
    """
    ahead, kept, peak = stages - stage - 1, 0.0, 0.0
    for j in range(min(stage, microbatches - 1) + 1):
        others = min(ahead, microbatches - 1 - j) * chunk.saved + j * chunk.deferred
        kept = max(kept, others + max(chunk.saved, chunk.deferred))
        peak = max(peak, others + chunk.split_peak, others + chunk.deferred)
    return kept, peak


@lru_cache(maxsize=65536)
def _held(
    schedule: ScheduleName, stage: int, stages: int, microbatches: int,
    chunks: tuple[ChunkBytes, ...],
) -> tuple[float, float, int]:  # fmt: skip
    count = peak_in_flight(
        schedule, stage=stage, stages=stages, microbatches=microbatches, chunks=len(chunks)
    )
    if len(chunks) == 1:
        (only,) = chunks
        if SCHEDULES[schedule].splits_backward:
            return *_in_two(only, stage, stages, microbatches), count
        return count * only.saved, (count - 1) * only.saved + only.peak, count
    few = min(microbatches, 4 * stages)  # the memory of a stage repeats once the pipeline is full
    held = most = peak = 0.0
    bytes_of = [(chunk.saved, chunk.temporary) for chunk in chunks]
    for turn in _turns(schedule, stage, stages, few, len(chunks)):
        saved, temporary = bytes_of[abs(turn) - 1]
        if turn > 0:
            held += saved
        most, peak = max(most, held), max(peak, held + temporary)
        if turn < 0:
            held -= saved
    return most, peak, count


@lru_cache(maxsize=1024)
def _turns(
    schedule: ScheduleName, stage: int, stages: int, microbatches: int, chunks: int
) -> tuple[int, ...]:
    """The number of the chunk of each action, from 1; below 0 where it goes backward."""
    order = actions(schedule, stage=stage, stages=stages, microbatches=microbatches, chunks=chunks)
    return tuple(turn.chunk + 1 if turn.kind == "forward" else -turn.chunk - 1 for turn in order)


def fullest_stage(memory: Iterable[StageMemory]) -> StageMemory:
    """The stage whose ranks need most memory on their device."""
    return max(memory, key=lambda stage: stage.device_bytes)


def peak_bytes(memory: Iterable[StageMemory]) -> int:
    """Bytes on the device of the fullest rank: what has to fit there."""
    return fullest_stage(memory).device_bytes


# ------------------------------------------------------------------------------
# Bytes of the tables of rotary positions, which a rank keeps from its first step on.
#
# The layers of a rank share one table a law of angles (kernels/rotary.py, RotaryTables): layers
# with a window may have a base of their own, and then there are two. Each is cosines and sines of
# half of the turned columns, in float32, for the positions that the rank holds.
#
# By hand, 2048 positions of heads of 128: 2048 x 2 x 64 x 4 = 1 MiB, of however many layers.


def rotary_table_bytes(layout: JobLayout, stage: int, shapes: ActivationShapes) -> int:
    """Bytes of the tables that a rank of this stage keeps; 0 where no layer of it has any, and for
    other software, whose tables are not planned."""
    model = layout.model
    if not shapes.kernels.keeps_tables or model.position != "rotary":
        return 0
    layers = (layer for part in layout.stage_slices(stage) for layer in part.layers)
    laws = {_law(model, layer) for layer in layers}
    turned = int(model.head_size * model.rotary_fraction)
    return len(laws) * shapes.seq * turned * max(4, shapes.value)


def _law(model: ModelSpec, layer: int) -> tuple[float, bool]:
    """What the angles of a layer follow from: a base, and whether it is stretched."""
    own = model.window_rotary_base
    if own is None or model.window_of(layer) is None:
        return model.rotary_base, model.rotary_scaling is not None
    return own, False


# ------------------------------------------------------------------------------
# Whether a job fits the memory of its devices, in one line.
#
# By hand, 84.9 GiB on a device of 79.6 with a headroom of 5 %, which leaves 75.6: 9.3 GiB too much.


def fit_text(cluster: ClusterSpec, need: int, who: str) -> str:
    """Whether so many bytes on a device of the cluster leave its headroom free, and what is left or
    lacking: `fits: 61.2 of 79.6 GiB, 18.4 GiB free (headroom 5 %)`, or
    `does not fit: 9.3 GiB too much on stage 0 (84.9 of 79.6 GiB, headroom 5 %)`. Without a device
    only the need is known. who: the rank or stage that needs them."""
    if cluster.device is None:
        unknown = f"legal; not known whether it fits: {who} needs {bytes_text(need)}"
        return f"{unknown}, and no device is named (--cluster NAME)"
    have, headroom = cluster.device.memory_bytes, f"headroom {cluster.headroom:g} %"
    over = need - (cluster.usable_bytes or 0)
    if over <= 0:
        return f"fits: {part_text(need, have)}, {bytes_text(have - need)} free ({headroom})"
    lacking = f"does not fit: {bytes_text(over)} too much on {who}"
    return f"{lacking} ({part_text(need, have)}, {headroom})"
