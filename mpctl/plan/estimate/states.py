"""Bytes that a rank holds between steps: parameters, gradients, optimizer states.

mpctl's, by bucket (model/layout/buckets.py): parameters in the training dtype, gradients in the reduction
dtype, moments and, for 16-bit parameters, a float32 master (optimizers.py: AdamW's here); a frozen
parameter has none of these. ZeRO 1, 2, 3 (arXiv 1910.02054) shares optimizer, gradients, parameters over the
replicas of a bucket's view, in slices of padded buckets. For other runtimes the profile has the
dtypes, and shares are even. FSDP's parameter is the shard, in float32 where the profile says so;
what is gathered is a copy in the training dtype. It lasts under ZeRO 2, which does not reshard
after a forward, and under ZeRO 3 in a pipeline whose runtime keeps it over a step
(`overlap.keeps`).

By hand, 200 bf16 parameters: 400 + 800 + 2400 bytes; ZeRO 1 over 4 ranks pads to 256, slices of 64:
512 + 1024 + 768. With float32 shards under FSDP: ZeRO 3 200 + 200 + 400, ZeRO 2 400 of the copy
more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import lcm
from typing import NamedTuple

from mpctl.core.sharding import View, Views
from mpctl.core.units import DTYPE_BYTES
from mpctl.model.layout.buckets import padded_numel, part_numel
from mpctl.model.layout.job_layout import AMAX_BYTES, JobLayout
from mpctl.model.layout.matrices import muon_matrices
from mpctl.model.operators.matmul import ParameterSpec
from mpctl.model.operators.table import named_weights
from mpctl.plan.estimate.attention import kernels_of
from mpctl.plan.estimate.base_weights import WeightKinds, WeightWidths, count_weights, gathered_bytes, held_weights
from mpctl.plan.estimate.communication import local_parameters
from mpctl.plan.estimate.muon import MuonWork
from mpctl.plan.estimate.optimizers import RULES as OPTIMIZERS
from mpctl.plan.estimate.optimizers import OptimizerStates, layout_states, moments_of, slice_moments
from mpctl.spec.job import CheckpointSpec
from mpctl.spec.runtime_memory import RuntimeMemory
from mpctl.spec.training import TrainingSpec


@dataclass(frozen=True, slots=True)
class StateBytes:
    """count: parameters of the rank, before any sharing; the other fields are bytes. stepping:
    temporary, during the update, when there are no activations. host: in host memory, of which
    fetched are parameters and paged are states that the device may hold where it has room."""

    count: int
    parameters: int
    gradients: int
    optimizer: int
    stepping: int = 0
    host: int = 0
    fetched: int = 0
    paged: int = 0


def find_states(layout: JobLayout, stage: int) -> StateBytes:
    """Return the bytes that one rank of a stage holds between steps."""
    states = _all_states(layout, stage)
    return _with_host(layout, replace(states, stepping=states.stepping + MuonWork(layout).working(stage)))


def _with_host(layout: JobLayout, states: StateBytes) -> StateBytes:
    """The same with what the job keeps in host memory: DeepSpeed's and FSDP's optimizer states and, where
    each rank has a slice of them, gradients; parameters; and paged states. A CPU is its own host."""
    t, zero = layout.job.training, layout.job.parallel.zero
    is_paged = OPTIMIZERS[t.optimizer].is_paged
    if not (t.offload_optimizer or t.offload_parameters or is_paged) or layout.job.device_kind == "cpu":
        return states
    share = t.offload_fraction if t.offload_optimizer else 1.0
    optimizer = round(share * states.optimizer) if t.offload_optimizer or is_paged else 0
    gradients = round(share * states.gradients) if t.offload_optimizer and zero >= 2 else 0
    parameters = states.parameters if t.offload_parameters else 0
    return replace(
        states,
        parameters=states.parameters - parameters,
        gradients=states.gradients - gradients,
        optimizer=states.optimizer - optimizer,
        stepping=round((1 - share) * states.stepping) if t.offload_optimizer else states.stepping,
        host=optimizer + gradients + parameters,
        fetched=parameters,
        paged=optimizer if is_paged else 0,
    )


def _all_states(layout: JobLayout, stage: int) -> StateBytes:
    """The bytes wherever they are held."""
    job, memory = layout.job, layout.profile.memory
    if not kernels_of(layout).slices_buckets:
        return _others_states(layout, memory, stage)
    count = trained = local_parameters(layout, stage)
    if layout.table.has_frozen:
        trained = local_parameters(layout, stage, trained_only=True)
    if any(view.zero for view in layout.views.values()):
        return _sliced_states(layout, count, stage)
    width, reduced = job.training.value_bytes, job.training.reduced_bytes
    stepping = trained * _cast_width(layout)
    parameters, optimizer = count * width, trained * _optimizer_width(layout, width)
    if layout.table.adapter is not None:
        held, widths = held_weights(layout, stage), WeightWidths.of(layout)
        parameters = round(widths.trained_bytes(held) + widths.frozen_bytes(held))
        optimizer = _adapter_optimizer(layout, held, widths)
    optimizer += _blocks(layout, stage)
    return StateBytes(count, parameters, trained * reduced, optimizer, stepping=stepping)


def _adapter_optimizer(layout: JobLayout, held: WeightKinds, widths: WeightWidths) -> int:
    """Optimizer states of A and B, in their data type, and of what is trained in full."""
    of_adapter, of_full = (_optimizer_width(layout, width) for width in (widths.adapter, widths.full))
    return held.adapter * of_adapter + held.full * of_full


def _optimizer_width(layout: JobLayout, stored: int) -> int:
    """Bytes of master and moments of a trained parameter that is stored in so many bytes."""
    return OptimizerStates.of(layout.job.training, layout.profile.memory, stored).width


def _cast_width(layout: JobLayout) -> int:
    """Bytes of a gradient's copy in the dtype of the update; 0 if it is reduced in that."""
    value = layout_states(layout).value
    return 0 if layout.job.training.reduced_bytes == value else value


def _blocks(layout: JobLayout, stage: int) -> int:
    """Bytes of a rank's moments whose width depends on the tensor; 0 where it does not."""
    states = layout_states(layout)
    if states.is_elementwise:
        return 0
    if states.rule.others and kernels_of(layout).slices_buckets:
        return slice_moments(layout, stage)
    is_frozen = layout.table.is_frozen
    trained = [weight for weight in layout.stage_parameters(stage) if not is_frozen(weight.name)]
    return sum(moments_of(states, layout, trained, view) for view in layout.views.values())


def _sliced_states(layout: JobLayout, count: int, stage: int) -> StateBytes:
    """Under our ZeRO: flat buckets, padded to equal slices (train/runtime/zero/param_store.py,
    train/runtime/zero/gradients.py). count: parameters of the rank, before they are shared."""
    job = layout.job
    width, reduced = job.training.value_bytes, job.training.reduced_bytes
    parameters = count  # parameters in no bucket are frozen and not shared
    gradients = stepped = 0
    frozen = 0
    for shape, number in layout.bucket_shapes(stage).items():
        view = layout.views[shape.view]
        part, padded = part_numel(shape.numel, view), padded_numel(shape.numel, view)
        added = number * ((part if view.zero == 3 else padded) - shape.numel)
        parameters += added
        if shape.is_trained:
            gradients += number * (part if view.zero >= 2 else padded)
            stepped += number * part
        else:
            frozen += added
    stepping = stepped * _cast_width(layout)
    optimizer = stepped * _optimizer_width(layout, width)
    held_bytes = parameters * width
    if layout.table.adapter is not None:
        held, widths = held_weights(layout, stage), WeightWidths.of(layout)
        is_whole = layout.table.adapter.is_quantized and not layout.profile.adapters.shards_quantized
        whole, held = (held.stored_bytes, held._replace(stored=0, stored_bytes=0.0)) if is_whole else (0.0, held)
        parameters -= count - held.trained - held.frozen
        shares = (parameters - frozen - held.frozen) / max(1, held.trained), frozen / max(1, held.frozen) + 1
        held_bytes = round(whole + shares[0] * widths.trained_bytes(held) + shares[1] * widths.frozen_bytes(held))
        optimizer = round(stepped / max(1, held.trained) * _adapter_optimizer(layout, held, widths))
    optimizer += _blocks(layout, stage)
    return StateBytes(count, held_bytes, gradients * reduced, optimizer, stepping)


def _others_states(layout: JobLayout, memory: RuntimeMemory, stage: int) -> StateBytes:
    """Under another runtime: its dtypes, shared evenly by the replicas of each view."""
    t = layout.job.training
    width, reduced = DTYPE_BYTES[memory.stored_as(t)], _gradient_width(layout, memory)
    copy = t.value_bytes
    held = parameters = gradients = 0
    optimizer = _blocks(layout, stage)
    for view in layout.views.values():
        own = _of_view(layout, stage, view, width)
        held += own.numel
        parameters += _shared(own.shared, view, 2 if width > copy else 3) + round(own.whole)
        if view.zero >= 2 and (keeps_gathered(layout) or (view.zero == 2 and width > copy)):
            parameters += round(own.gathered)
        gradients += _shared(own.trained * reduced, view, 2)
        optimizer += _shared(own.optimizer, view, 1)
    return StateBytes(held, parameters, gradients, optimizer)


class _ViewBytes(NamedTuple):
    """Parameters of a view on a rank before ZeRO shares them, and how many are trained. The rest are
    bytes: shared: that ZeRO may share, whole: that it may not; gathered: of all of them for a pass;
    optimizer: of optimizer states."""

    numel: int
    trained: int
    shared: float
    whole: float
    gathered: float
    optimizer: int


def _of_view(layout: JobLayout, stage: int, view: View, width: int) -> _ViewBytes:
    """The bytes of a view under another runtime; width: of a trained parameter's element."""
    copy = layout.job.training.value_bytes
    adapter = layout.table.adapter
    if adapter is None:
        count = trained = local_parameters(layout, stage, view=view.name)
        if layout.table.has_frozen:
            trained = local_parameters(layout, stage, view=view.name, trained_only=True)
        optimizer = trained * _optimizer_width(layout, width)
        return _ViewBytes(count, trained, count * width, 0, count * copy, optimizer)
    held, widths = held_weights(layout, stage, view.name), WeightWidths.of(layout)
    whole = held.stored_bytes if adapter.is_quantized and not layout.profile.adapters.shards_quantized else 0.0
    return _ViewBytes(
        held.trained + held.frozen,
        held.trained,
        widths.trained_bytes(held) + widths.frozen_bytes(held) - whole,
        whole,
        gathered_bytes(layout, held) - whole,
        _adapter_optimizer(layout, held, widths),
    )


def _gradient_width(layout: JobLayout, memory: RuntimeMemory) -> float:
    """Bytes of a gradient in another runtime; as wide as the parameter where 16 bits are updated."""
    t = layout.job.training
    if t.gradient_dtype is None and (value := layout_states(layout).value) < 4:
        return value
    return gradient_width(t, memory)


def gradient_width(training: TrainingSpec, memory: RuntimeMemory) -> float:
    """Bytes of a gradient in another runtime: the runtime's, and the job's where it names a data type, besides
    which a runtime may hold another copy."""
    reduced = training.reduced_bytes
    held = memory.gradient_bytes.get(training.chosen_dtype, reduced)
    if training.gradient_dtype is None:
        return held
    return max(held, reduced) if reduced >= 4 else reduced


def keeps_gathered(layout: JobLayout) -> bool:
    """Whether parameters stay gathered over a step of a pipeline, and gradients whole from the
    first micro batch to the last (`overlap.keeps`)."""
    parallel = layout.job.parallel
    return parallel.pp > 1 and parallel.zero >= 2 and layout.profile.overlap.keeps


def whole_gradients(layout: JobLayout, stage: int) -> tuple[float, ...]:
    """Return the bytes of gradients in each chunk of a stage that add up over micro batches before they
    are scattered; empty if each micro batch's are scattered, or if a buffer of the states holds them."""
    if kernels_of(layout).slices_buckets or not keeps_gathered(layout):
        return ()
    is_frozen, each = layout.table.is_frozen, layout.job.training.reduced_bytes
    chunks = map(named_weights, layout.chunks(stage))
    return tuple(float(each * _numel([w for w in chunk if not is_frozen(w.name)], layout.views)) for chunk in chunks)


def _shared(amount: float, view: View, zero: int) -> int:
    """Bytes of a rank where ZeRO divides them over ranks of a view from the stage `zero` on."""
    return -(-round(amount) // view.zero_size) if view.zero >= zero else round(amount)


def fp8_table_bytes(layout: JobLayout) -> float:
    """The table of mpctl's delayed scaling: the largest elements of each of the last steps and of
    this one, the scales, and their inverses, 16 bytes apart (train/layers/fp8.py)."""
    training = layout.job.training
    if training.dtype != "fp8" or training.fp8_recipe != "delayed":
        return 0.0
    return (training.fp8_amax_history_len + 6) * len(layout.table.narrowed_layers) * AMAX_BYTES


def held_weight_bytes(layout: JobLayout, stage: int) -> float:
    """Both layouts of a stage's weights in fp8 where a step keeps them: 2 bytes a parameter of
    linear layers (train/layers/fp8.py, WeightKinds)."""
    if not layout.holds_fp8_weights:
        return 0.0
    names = {f"{name}.weight" for name in layout.table.narrowed_layers}
    held = [w for w in layout.stage_parameters(stage) if w.name in names]
    return 2.0 * _numel(held, layout.views)


def weight_buffers(layout: JobLayout, stage: int) -> tuple[float, float]:
    """(lasting, temporary) bytes of buffers as large as weights in other runtimes: a product's dW
    before it is added, placeholders for the dW of a layer, buckets in which replicas reduce
    gradients, and under ZeRO 3 gathered parameters."""
    job, memory = layout.job, layout.profile.memory
    fetches = job.training.offload_parameters and all(view.zero < 3 for view in layout.views.values())
    if kernels_of(layout).slices_buckets and not fetches:
        return fp8_table_bytes(layout) + held_weight_bytes(layout, stage), 0.0
    width, views = DTYPE_BYTES[job.training.dtype], layout.views
    slices = layout.stage_slices(stage)
    if layout.table.adapter is not None:
        return _adapter_buffers(layout, stage)
    heads = [w.local_numel(views) for part in slices if part.has_exit for w in part.stack.exit.weights]
    head = max(heads, default=0)
    stacks = {id(part.stack): part.stack for part in slices}.values()
    kinds = [block for stack in stacks for block in stack.kinds]
    blocks = [[w.local_numel(views) for w in block.weights] for block in kinds]
    layer, largest = max(map(sum, blocks), default=0), max([head, *map(max, blocks)])
    if keeps_gathered(layout):
        return 0.0, layer * 4.0  # the input of a layer's reduction
    if job.parallel.zero >= 3:
        ends = _numel({w.name: w for part in slices for w in part.end_weights()}.values(), views)
        return 0.0, (2 * layer + ends) * job.training.value_bytes + largest * 4.0
    if memory.weight_gradients == "layer" and layout.model.attention == "flash":
        return float((layer + head) * width), 0.0
    buckets = 0.0
    for view in layout.views.values():
        if memory.reduction_bytes and view.replicas > 1:
            trained = local_parameters(layout, stage, trained_only=True, view=view.name)
            buckets += memory.reduction_bytes * trained
    return buckets, float(largest * width)


def _adapter_buffers(layout: JobLayout, stage: int) -> tuple[float, float]:
    """The same where adapters train: gathered parameters are frozen ones, in the bits that are sent, and
    gradients those of adapters."""
    job, memory, slices = layout.job, layout.profile.memory, layout.stage_slices(stage)
    width, flows = DTYPE_BYTES[job.training.dtype], [flow for part in slices for _, flow in part.blocks]
    trained = [[w.local_numel(layout.views) for w in flow.trained] for flow in flows]
    trained += [[w.local_numel(layout.views) for part in slices for w in part.end_weights(trained_only=True)]]
    largest = max((size for sizes in trained for size in sizes), default=0)
    if keeps_gathered(layout):
        return 0.0, max(map(sum, trained)) * 4.0
    if job.parallel.zero >= 3:
        weights = [(flow.part.weights, {w.name for w in flow.trained}) for flow in flows]
        layer = max((gathered_bytes(layout, count_weights(layout, w, "", names)) for w, names in weights), default=0)
        ends = count_weights(layout, {w.name: w for part in slices for w in part.end_weights()}.values())
        return 0.0, 2 * layer + gathered_bytes(layout, ends) + largest * 4.0
    if memory.weight_gradients == "layer" and layout.model.attention == "flash":
        return float(max(map(sum, trained)) * width), 0.0
    buckets = 0.0
    for view in layout.views.values():
        if memory.reduction_bytes and view.replicas > 1:
            buckets += memory.reduction_bytes * held_weights(layout, stage, view.name).trained
    return buckets, float(largest * width)


def _numel(weights: Iterable[ParameterSpec], views: Views) -> int:
    return sum(weight.local_numel(views) for weight in weights)


# ------------------------------------------------------------------------------
# How large a checkpoint is and how many of them a run keeps at the same time.
#
# A checkpoint holds, for every trained parameter, its value in the dtype of the update (float32, the
# masters of 16-bit parameters; float64 under fp64), the optimizer's moments and, for a frozen one, its
# value in the parameter's dtype (train/checkpoint/reader.py). Every rank of tp writes its shard, so
# parameters that are not split over tp are written tp times; those that several stages hold are
# written once. A rank that writes copies its part to host memory first, all in one block. The base of
# adapters that training.init_from names is not written again (JobLayout.is_saved).
#
# By hand, 10 trained bf16 parameters and 5 frozen ones, none split, tp 2: 2 (10 x 12 + 5 x 2) = 260
# bytes.


def checkpoint_bytes(layout: JobLayout) -> int:
    """Bytes of all tensors in a checkpoint of this layout; the files' headers and records, some
    hundred bytes a parameter, come on top."""
    views = layout.views
    return sum(views[view].grid.size * size for stage in _written_by_stage(layout) for view, size in stage.items())


def snapshot_bytes(layout: JobLayout) -> int:
    """Bytes of host memory that a rank keeps for the copies that checkpoints are written from:
    those of its shard, of the rank with the largest (train/checkpoint/snapshot.py); 0 where training
    waits until a checkpoint is written."""
    if not layout.job.checkpoint.asynchronous:
        return 0
    return max(sum(stage.values()) for stage in _written_by_stage(layout))


def _written_by_stage(layout: JobLayout) -> Iterator[Counter[str]]:
    """Yield for each stage the bytes that each rank of a view's first replica writes of its parameters,
    by the name of the view; parameters of several stages count in the first."""
    width = layout.job.training.value_bytes
    is_frozen, states, matrices = layout.table.is_frozen, layout_states(layout), muon_matrices(layout)
    seen = set[str]()
    for stage in range(len(layout.stages)):
        sizes = Counter[str]()
        for weight in layout.stage_parameters(stage):
            if weight.name not in seen and layout.is_saved(weight.name):
                seen.add(weight.name)
                is_matrix = weight.name in matrices
                each = width if is_frozen(weight.name) else states.saved_of(is_matrix=is_matrix)
                sizes[weight.view] += round(weight.local_numel(layout.views) * each)
        yield sizes


def most_at_once(saving: CheckpointSpec, steps: int, *, done: int = 0) -> int:
    """The most checkpoints of the steps from done + 1 to `steps` that are on the disk at the same
    time: those that are kept, and the one being written before an older one is removed.

    By hand, 100 steps, one saved every 10: 10 with keep_last 0, 3 with keep_last 2, and 6 with
    keep_last 2 and keep_every 20 (20, 40, 60, 80, 90 and the one being written).
    """
    interval = saving.interval
    saves = range(0)
    if interval:
        saves = range(interval * (done // interval + 1), steps + 1, interval)
    ends_apart = saving.at_end and steps not in saves
    return _kept(saves if ends_apart else saves[:-1], saving) + 1


def _kept(saves: range, saving: CheckpointSpec) -> int:
    """How many checkpoints of these steps, multiples of the interval, `shards.prunable` leaves;
    counted without a list, which would fill the memory for a job of 10^9 steps."""
    if saving.keep_last == 0:
        return len(saves)
    older = saves[: -saving.keep_last]
    count = len(saves) - len(older)
    if not (older and saving.keep_every):
        return count
    both = lcm(saves.step, saving.keep_every)
    return count + older[-1] // both - (older[0] - 1) // both
