"""The most that one rank of each stage holds: states, activations, and temporary tensors.

States are exact counts (states.py).

Activations are the tensors of the operator table (activations.py) of as many micro batches as the
schedule has in flight (model/pipeline/schedule/orders.py): min(p - stage, m) under 1F1B, all m under
GPipe; the running one counts with its peak. `allocated` is what tensors take, `reserved` adds the
allocator's slack, and the device holds the libraries' context and communicators in addition
(libraries.py). The heaviest stage decides.

By hand, gpt of 8 layers on 4 stages, 1F1B: stage 0 has 4 micro batches of 2 layers, as many layers
as the model; 3 wait, the 4th goes backward.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import mul
from typing import ClassVar, NamedTuple

from mpctl.core.units import bytes_text, part_text
from mpctl.model.layout.job_layout import MAX_SENDS_IN_FLIGHT, JobLayout
from mpctl.model.operators.activation_shapes import ActivationShapes
from mpctl.model.operators.matmul import Dims
from mpctl.model.pipeline.placement import StageChunk
from mpctl.model.pipeline.schedule.orders import FEW_OF_V, Kind, actions, peak_in_flight
from mpctl.plan.estimate.activation_shapes import activation_shapes, is_cuda
from mpctl.plan.estimate.activations import ChunkBytes, stage_chunks
from mpctl.plan.estimate.communication import message_bytes
from mpctl.plan.estimate.expert_overlap import more_saved
from mpctl.plan.estimate.libraries import Communicators, workspace_bytes
from mpctl.plan.estimate.routing import buffered_layout
from mpctl.plan.estimate.states import StateBytes, find_states, weight_buffers, whole_gradients
from mpctl.plan.estimate.unsharded import Unsharded, find_unsharded, with_unsharded
from mpctl.spec.cluster import ClusterSpec
from mpctl.spec.model import ModelSpec
from mpctl.spec.parallel import ScheduleName
from mpctl.spec.schedules import SCHEDULES


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes on one rank of a pipeline stage. in_flight: chunks of micro batches held at most;
    activation_bytes: all saved for backwards at one time; working_bytes: the rest of the peak;
    lasting_bytes: buffers of the training software, from the first step on. workspace_bytes: of
    matrix libraries, which the allocator gives them; communicator_bytes: beside the allocator."""

    JSON_PROPERTIES: ClassVar = ("allocated_bytes", "reserved_bytes", "device_bytes")

    stage: int
    parameters: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    working_bytes: int
    lasting_bytes: int
    workspace_bytes: int
    slack_bytes: int
    context_bytes: int
    communicator_bytes: int
    in_flight: int

    @property
    def state_bytes(self) -> int:
        """Parameters, gradients and optimizer states."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes

    @property
    def tensor_bytes(self) -> int:
        """The peak of what tensors take."""
        return self.state_bytes + self.activation_bytes + self.working_bytes + self.lasting_bytes

    @property
    def temporary_bytes(self) -> int:
        """Temporary bytes, in terminal and page: working memory, lasting buffers, workspaces."""
        return self.working_bytes + self.lasting_bytes + self.workspace_bytes

    @property
    def allocated_bytes(self) -> int:
        """The peak of the bytes that an allocator was asked for: tensors and workspaces."""
        return self.tensor_bytes + self.workspace_bytes

    @property
    def reserved_bytes(self) -> int:
        """Allocated bytes plus the slack that the allocator reserves."""
        return self.allocated_bytes + self.slack_bytes

    @property
    def device_bytes(self) -> int:
        """Device memory as the device's tools show it."""
        return self.reserved_bytes + self.context_bytes + self.communicator_bytes


class StageWeights(NamedTuple):
    """Bytes on one rank of a stage that no micro batch changes. lasting, passing: buffers as large
    as weights, held from the first step on and temporarily. unsharded: during backwards, by mpctl's
    ZeRO 2 and 3."""

    states: StateBytes
    lasting: float
    passing: float
    unsharded: Unsharded | None


class StageContents(NamedTuple):
    """Bytes on one rank of a stage that do not depend on how many micro batches are in flight.

    work: temporary bytes of weights and messages during a backward, in addition to a chunk's own.
    gradients: by chunk, those that are whole during a step and scattered after it; else empty.
    handed_on: of `work`, buffers of a stage without anything for its next forward; else 0.
    """

    states: StateBytes
    chunks: tuple[ChunkBytes, ...]
    lasting: int
    work: float
    gradients: tuple[float, ...] = ()
    handed_on: float = 0.0


class KnownMemory(NamedTuple):
    """Contents of stages, by everything that determines them: a cache for a caller that compares
    many layouts of one model on one device."""

    contents: dict[Hashable, StageContents]
    weights: dict[Hashable, StageWeights]


def layout_memory(layout: JobLayout) -> list[StageMemory]:
    """The memory of one rank of each stage; the heaviest decides whether the job fits."""
    shapes, groups = activation_shapes(buffered_layout(layout)), Communicators(layout)
    memory = LayoutMemory(layout, shapes, communicators=groups)
    return [memory.of_stage(stage) for stage in range(len(layout.stages))]


class LayoutMemory:
    """The memory of the stages of one layout. shapes: those of its activations; known:
    contents of stages of other layouts of the same model and device, to which its own are added."""

    def __init__(
        self,
        layout: JobLayout,
        shapes: ActivationShapes,
        known: KnownMemory | None = None,
        communicators: Communicators | None = None,
    ) -> None:
        self.layout, self.shapes = layout, shapes
        self.known = KnownMemory({}, {}) if known is None else known
        self.is_v = layout.placement.is_v
        self.settings, parallel = self._settings(), layout.job.parallel
        self.splits_backward = parallel.pp > 1 and SCHEDULES[parallel.schedule].splits_backward
        self.workspace, self.communicators = workspace_bytes(layout), communicators

    def _settings(self) -> Hashable:
        """Everything else that the bytes of a stage's weights depend on, besides its class."""
        layout, shared = self.layout, frozenset[str]()
        t, p, views = layout.job.training, layout.job.parallel, layout.views.values()
        if self.shapes.kernels.slices_buckets and any(view.zero for view in views):
            shared = frozenset(layout.shared_parameters)
        held = tuple((view.name, view.replicas, view.copies, view.grid) for view in views)
        return (
            t.runtime,
            t.dtype,
            t.fp8_recipe,
            t.fp8_amax_history_len,
            t.gradient_dtype,
            (t.optimizer, t.optimizer_dtype, t.master_weights, t.momentum > 0),
            (t.offload_optimizer, t.offload_parameters, t.offload_fraction),
            layout.holds_fp8_weights,
            p.zero,
            p.bucket_bytes,
            held,
            p.pp > 1,
            shared,
            min(layout.num_microbatches, p.pp * FEW_OF_V if self.is_v else p.pp + 1),
        )

    def of_stage(self, stage: int, microbatches: int | None = None) -> StageMemory:
        """A rank of the stage with as many micro batches in flight as its schedule has at most.
        microbatches: micro batches of a step, if not the job's."""
        contents, p = self._contents(stage), self.layout.job.parallel
        communicators = self.communicators
        schedule: ScheduleName = p.schedule if p.pp > 1 else "1f1b"
        microbatches = microbatches or self.layout.num_microbatches
        place = schedule, stage, p.pp, microbatches
        kept, peak, in_flight = peak_activations(*place, contents.chunks)
        if contents.gradients:
            peak = max(peak, peak_with_gradients(*place, contents.chunks, contents.gradients))
        if self.layout.job.training.moe_overlap:
            more = more_saved(self.layout, stage, contents.chunks, in_flight)
            kept, peak = kept + more, peak + more
        states, activations = contents.states, round(kept)
        # nothing is received where all forwards are before the first backward
        unused = contents.handed_on * (in_flight == microbatches)
        work = round(max(peak - kept + contents.work - unused, states.stepping - kept))
        bare = states.parameters + states.gradients + states.optimizer
        allocated = bare + activations + work + contents.lasting + self.workspace
        slack, context = overhead_bytes(self.layout, allocated)
        return StageMemory(
            stage=stage,
            parameters=states.count,
            parameter_bytes=states.parameters,
            gradient_bytes=states.gradients,
            optimizer_bytes=states.optimizer,
            activation_bytes=activations,
            working_bytes=work,
            lasting_bytes=contents.lasting,
            workspace_bytes=self.workspace,
            slack_bytes=slack,
            context_bytes=context,
            communicator_bytes=communicators.of_stage(self.layout, stage) if communicators else 0,
            in_flight=in_flight,
        )

    def _contents(self, stage: int) -> StageContents:
        # when weight gradients run depends on the stage
        at = (self.layout.job.parallel.schedule, stage) if self.splits_backward else -1
        key = (self.layout.stage_classes[stage], at, self.settings)
        contents = self.known.contents.get((key, self.shapes))
        if contents is None:
            weights = self.known.weights.get(key)
            if weights is None:
                weights = self.known.weights[key] = self._find_weights(stage)
            contents = self.known.contents[key, self.shapes] = self._find_contents(stage, weights)
        return contents

    def _find_weights(self, stage: int) -> StageWeights:
        layout = self.layout
        buffers = weight_buffers(layout, stage)
        unsharded = find_unsharded(layout, stage) if self.shapes.kernels.slices_buckets else None
        return StageWeights(find_states(layout, stage), *buffers, unsharded)

    def _find_contents(self, stage: int, weights: StageWeights) -> StageContents:
        layout, shapes = self.layout, self.shapes
        lasting = weights.lasting + rotary_table_bytes(layout, stage, shapes)
        work = weights.passing
        if shapes.splits:  # hidden states that a runtime gathers into a buffer of its own
            gathered = shapes.stream_bytes()
            lasting += layout.profile.memory.gather_buffers * gathered
        if layout.job.parallel.pp > 1:
            ends = {layer for span in layout.stages[stage] for layer in span}
            dims = {dims for layer in ends for dims in layout.table.boundary(layer)}
            message = max(message_bytes(layout, own) for own in dims)
            split = shapes.tp if shapes.splits else 1
            work += (MAX_SENDS_IN_FLIGHT + 1) * message / split
            work += spare_bytes(layout, stage, shapes)
        saved = stage_chunks(layout, stage, shapes)
        work += unstashed_bytes(layout, stage, saved)
        chunks = with_unsharded(saved, weights.unsharded)
        whole = whole_gradients(layout, stage)
        is_empty = not any(layout.chunks(stage))
        handed_on = spare_bytes(layout, stage, shapes) / 2 if is_empty else 0.0
        return StageContents(weights.states, chunks, round(lasting), work, whole, handed_on)


def unstashed_bytes(layout: JobLayout, stage: int, chunks: Sequence[ChunkBytes]) -> float:
    """Bytes of the buffers of one layer with experts at their capacity, less what a paged stash keeps of it.
    chunks: those of the stage with what the stash keeps."""
    t = layout.job.training
    if t.moe_capacity is None or t.moe_stash is None:
        return 0.0
    whole = stage_chunks(layout, stage, activation_shapes(layout.with_moe_load(t.moe_capacity)))
    routed = [sum(layout.model.has_experts(layer) for layer in range(*span)) for span in layout.stages[stage]]
    pairs = zip(whole, chunks, routed, strict=True)
    return max((most.saved - kept.saved) / layers for most, kept, layers in pairs if layers) if any(routed) else 0.0


def spare_bytes(layout: JobLayout, stage: int, shapes: ActivationShapes) -> float:
    """Bytes of the buffers that a rank keeps for the next message of each kind: the tensors of
    forward from the stage before, their gradients from the one after."""
    spare = layout.profile.memory.spare_receives
    if not spare:
        return 0.0
    placement, kinds = layout.placement, set[tuple[bool, int, int, Dims]]()  # is of forward, the sender, number
    for chunk in range(len(layout.stages[stage])):
        before, after = (placement.neighbour(StageChunk(stage, chunk), step) for step in (-1, 1))
        if before is not None and before.stage != stage:
            received = layout.border(stage, chunk, after=False).dims
            kinds |= {(True, before.stage, n, dims) for n, dims in enumerate(received)}
        if after is not None and after.stage != stage:
            pairs = zip(*layout.border(stage, chunk, after=True), strict=True)
            kinds |= {(False, after.stage, n, dims) for n, (dims, is_sent) in enumerate(pairs) if is_sent}
    whole = spare * sum(message_bytes(layout, dims) for *_, dims in kinds)
    return whole / (shapes.tp if shapes.splits else 1)


def overhead_bytes(layout: JobLayout, allocated: int) -> tuple[int, int]:
    """(allocator's slack, libraries' context): device bytes of a rank in addition to `allocated`
    bytes; 0 on a CPU."""
    software = layout.profile.memory
    if not is_cuda(layout.job):
        return 0, 0
    return round(allocated * (software.slack - 1)), round(software.context_bytes)


def peak_activations(
    schedule: ScheduleName, stage: int, stages: int, microbatches: int, chunks: Sequence[ChunkBytes]
) -> tuple[float, float, int]:
    """Activations of a stage whose chunks take these bytes: (most bytes saved for backwards at one
    time, peak including what the running action needs, most chunks in flight)."""
    count = peak_in_flight(schedule, stage=stage, stages=stages, microbatches=microbatches, chunks=len(chunks))
    if SCHEDULES[schedule].is_v and stages > 1:
        return *_in_pieces(schedule, stage, stages, microbatches, chunks), count
    if len(chunks) == 1:
        (only,) = chunks
        if SCHEDULES[schedule].splits_backward:
            return *_in_two(only, stage, stages, microbatches), count
        return count * only.saved, (count - 1) * only.saved + only.peak, count
    few = min(microbatches, 4 * stages)  # the memory of a stage repeats once the pipeline is full
    kinds: dict[ChunkBytes, int] = {}
    order = tuple([kinds.setdefault(chunk, len(kinds)) for chunk in chunks])
    saved = [kind.saved for kind in kinds]
    temporary = [kind.temporary for kind in kinds]
    most = peak = 0.0
    for running, counts in _fullest_moments(schedule, stage, stages, few, order):
        held = sum(map(mul, counts, saved))
        most, peak = max(most, held), max(peak, held + temporary[running])
    return most, peak, count


def peak_with_gradients(
    schedule: ScheduleName,
    stage: int,
    stages: int,
    microbatches: int,
    chunks: Sequence[ChunkBytes],
    gradients: Sequence[float],
) -> float:
    """The peak of activations and of the gradients of chunks, each whole from the first backward
    of its chunk to the last.

    By hand, stage 0 of 2, 1F1B, 2 micro batches that save 3 each and peak at 4, gradients of 10:
    3 + 4 + 10 in the first backward, 4 + 10 in the second.

    >>> peak_with_gradients("1f1b", 0, 2, 2, [ChunkBytes(3.0, 4.0)], [10.0])
    17.0
    """
    few = min(microbatches, 4 * stages)
    if SCHEDULES[schedule].is_v and stages > 1:
        return _in_pieces(schedule, stage, stages, few, chunks)[1] + sum(gradients)
    if SCHEDULES[schedule].splits_backward:  # products of weights come later still
        return _in_two(chunks[0], stage, stages, few)[1] + gradients[0]
    held, left = [0] * len(chunks), [few] * len(chunks)
    peak = 0.0
    for action in actions(schedule, stage=stage, stages=stages, microbatches=few, chunks=len(chunks)):
        at = action.chunk
        if action.kind == "forward":
            held[at] += 1
            continue
        saved = sum(n * chunk.saved for n, chunk in zip(held, chunks, strict=True))
        begun = (size for number, size in enumerate(gradients) if number == at or 0 < left[number] < few)
        peak = max(peak, saved + chunks[at].temporary + sum(begun))
        held[at] -= 1
        left[at] -= 1
    return peak


def _in_two(chunk: ChunkBytes, stage: int, stages: int, microbatches: int) -> tuple[float, float]:
    """(most bytes saved, peak) where backward is in two: zero-bubble.

    Before the backward of micro batch j, stage s also holds min(p - s - 1, m - 1 - j) micro batches
    that have only run forward and min(j, s) whose weight gradients are deferred. After that
    backward, the weight gradients of j are deferred too.
    """
    ahead, kept, peak = stages - stage - 1, 0.0, 0.0
    for j in range(min(stage, microbatches - 1) + 1):
        others = min(ahead, microbatches - 1 - j) * chunk.saved + j * chunk.deferred
        kept = max(kept, others + max(chunk.saved, chunk.deferred))
        peak = max(peak, others + chunk.split_peak, others + chunk.deferred + chunk.late)
    return kept, peak


def _in_pieces(
    schedule: ScheduleName, stage: int, stages: int, microbatches: int, chunks: Sequence[ChunkBytes]
) -> tuple[float, float]:
    """(most bytes saved, peak) in a V, whose order says when the weights of each chunk run; a backward
    in one is its two parts, one after the other."""
    held = kept = peak = 0.0
    for kind, at in _pieces(schedule, stage, stages, min(microbatches, FEW_OF_V * stages)):
        chunk = chunks[at]
        if kind == "forward":
            held += chunk.saved
        if kind in ("backward", "backward_input"):
            peak = max(peak, held - chunk.saved + chunk.split_peak)
            held += chunk.deferred - chunk.saved
        if kind in ("backward", "backward_weight"):
            peak = max(peak, held + chunk.late)
            held -= chunk.deferred
        kept = max(kept, held)
    return kept, max(kept, peak)


@lru_cache(maxsize=1024)
def _pieces(schedule: ScheduleName, stage: int, stages: int, microbatches: int) -> tuple[tuple[Kind, int], ...]:
    order = actions(schedule, stage=stage, stages=stages, microbatches=microbatches, chunks=2)
    return tuple((action.kind, action.chunk) for action in order)


@lru_cache(maxsize=4096)
def _fullest_moments(
    schedule: ScheduleName, stage: int, stages: int, microbatches: int, kinds: tuple[int, ...]
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """(the kind that runs, micro batches held of each kind) during the actions of a stage that may
    hold the most: among moments that differ only in the number held of the last kind, the largest.

    kinds: for each chunk of the stage, the number of its kind.
    """
    held, fullest = [0] * (max(kinds) + 1), dict[tuple[int, ...], int]()
    order = actions(schedule, stage=stage, stages=stages, microbatches=microbatches, chunks=len(kinds))
    for action in order:
        running = kinds[action.chunk]
        held[running] += action.kind == "forward"
        key = (running, *held[:-1])
        fullest[key] = max(fullest.get(key, 0), held[-1])
        held[running] -= action.kind != "forward"
    return tuple((running, (*others, last)) for (running, *others), last in fullest.items())


def fullest_stage(memory: Iterable[StageMemory]) -> StageMemory:
    """The stage whose ranks need most memory on their device."""
    return max(memory, key=lambda stage: stage.device_bytes)


def peak_bytes(memory: Iterable[StageMemory]) -> int:
    """Bytes on the device of the fullest rank, which have to fit."""
    return fullest_stage(memory).device_bytes


def rotary_table_bytes(layout: JobLayout, stage: int, shapes: ActivationShapes) -> int:
    """Bytes of the tables of rotary positions that a rank of this stage keeps from its first step
    on; 0 where no layer of it has any, and for other software, whose tables are not planned.

    The layers of a rank share one table a law of angles (train/kernels/rotary.py, RotaryTables): layers
    with a window may have a different base, and then there are two. Each is cosines and sines of
    half of the turned columns, in float32, for the positions that the rank holds.
    """
    model = layout.model
    if not shapes.kernels.keeps_tables or model.position != "rotary":
        return 0
    layers = (layer for part in layout.stage_slices(stage) for layer in part.layers)
    laws = {_law(model, layer) for layer in layers}
    turned = int(model.head_size * model.rotary_fraction)
    if model.is_mla:
        turned = model.qk_rope_head_dim or 0
    return len(laws) * shapes.dims["seq"] * turned * max(4, shapes.value)


def _law(model: ModelSpec, layer: int) -> tuple[float, bool]:
    """Return the base of a layer's rotary angles, and whether they are stretched."""
    own = model.window_rotary_base
    if own is None or model.window_of(layer) is None:
        is_scaled = model.rotary_scaling is not None or model.yarn_scaling is not None
        return model.rotary_base, is_scaled
    return own, False


def fit_text(cluster: ClusterSpec, need: int, who: str) -> str:
    """Whether `need` bytes on a device of the cluster leave its headroom free, and what is left or
    lacking: `fits: 61.2 of 79.6 GiB, 18.4 GiB free (headroom 5 %)`, or `does not fit: 9.3 GiB too
    much on stage 0 (84.9 of 79.6 GiB, headroom 5 %)`. Without a device only the need is known. who:
    the rank or stage that needs them."""
    if cluster.device is None:
        unknown = f"legal; not known whether it fits: {who} needs {bytes_text(need)}"
        return f"{unknown}, and no device is named (--cluster NAME)"
    have, headroom = cluster.device.memory_bytes, f"headroom {cluster.headroom:g} %"
    if cluster.fits(need):
        return f"fits: {part_text(need, have)}, {bytes_text(have - need)} free ({headroom})"
    lacking = f"does not fit: {bytes_text(need - (cluster.usable_bytes or 0))} too much on {who}"
    return f"{lacking} ({part_text(need, have)}, {headroom})"
