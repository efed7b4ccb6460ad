"""Host memory of the ranks of a node: states that are offloaded, inputs of layers that wait there for
their recomputation, pages of a stash of experts' rows, and the copies that checkpoints are written from.

On a GPU a rank keeps as many blocks of an offloaded input as wait at one time, pinned and of its
true size (train/layers/recompute.py); on a CPU host and device are one memory, and nothing is added.
Snapshots are those of the ranks that write (train/checkpoint/snapshot.py). Python, torch and CUDA's
context, some GiB a rank, are not in it; nor are batches, a micro batch of token ids at a time, and
data, which is mapped from its files.

A paged stash has pinned pages for the rows that layers with experts keep for backward at
`training.moe_stash_host` times the mean load, whether rows are there or not: Megatron's factor of the
host's buffer (megatron/core/transformer/moe/paged_stash.py, allocate_stash_buffers).

By hand, 4 layers with inputs [1, 2, 8] in bf16, 3 micro batches in flight: 3 x 4 x 1 x 2 x 8 x 2 =
384 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpctl.model.layout.job_layout import JobLayout
from mpctl.model.operators.activation_shapes import ActivationShapes, SavedTensor
from mpctl.model.operators.table import StackPart
from mpctl.plan.estimate.activation_shapes import activation_shapes
from mpctl.plan.estimate.activations import ChunkBytes
from mpctl.plan.estimate.expert_overlap import more_saved
from mpctl.plan.estimate.memory import peak_activations
from mpctl.plan.estimate.saved import layer_activations
from mpctl.plan.estimate.states import checkpoint_bytes, find_states, snapshot_bytes
from mpctl.spec.parallel import ScheduleName


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes of host memory. offloaded_bytes: inputs and pages of a rank of the stage that has most;
    snapshot_bytes: copies of a rank that writes checkpoints; node_bytes: of all ranks of the
    fullest node; state_bytes: states of a rank of the stage that has most, paged ones included."""

    offloaded_bytes: int
    snapshot_bytes: int
    node_bytes: int
    state_bytes: int = 0


def host_memory(layout: JobLayout) -> HostMemory:
    """The host memory of the ranks of a layout."""
    cluster, world = layout.job.cluster, layout.job.world_size
    ranks = min(cluster.gpus_per_node or world, world)
    offloaded = max(offloaded_bytes(layout))
    return HostMemory(offloaded, snapshot_bytes(layout), host_bytes(layout, ranks), state_bytes(layout))


def state_bytes(layout: JobLayout) -> int:
    """Return the bytes of states that a rank keeps on its host, of the stage that has most."""
    return max(layout.of_stages(lambda stage: find_states(layout, stage).host))


def host_bytes(layout: JobLayout, ranks: int) -> int:
    """Bytes of so many ranks of one node at most: they may all be of the stage that offloads most,
    and all write."""
    copies = 0
    if layout.job.checkpoint.asynchronous:
        writers = layout.job.world_size // layout.dense.replicas  # records/checkpoint/replicas.py
        copies = checkpoint_bytes(layout) * min(ranks, writers) // writers
    return (max(offloaded_bytes(layout)) + state_bytes(layout)) * ranks + copies


def offloaded_bytes(layout: JobLayout) -> list[int]:
    """Return the bytes of inputs, and of pages of a stash, that a rank of each stage keeps on its host at
    one time; 0 if they stay on the device."""
    shapes, parallel, paged = activation_shapes(layout), layout.job.parallel, layout.job.training.moe_stash_host
    stages = range(len(layout.stages))
    paged = paged if shapes.is_cuda else None
    if not shapes.fetched_parts and paged is None:
        return [0 for _ in stages]
    stash = None if paged is None else activation_shapes(layout.with_moe_load(paged))
    schedule: ScheduleName = parallel.schedule if parallel.pp > 1 else "1f1b"
    found = []
    for stage in stages:
        held = [[one.part for one in layout.chunk_slices(stage, n)] for n in range(len(layout.stages[stage]))]
        sizes = [_inputs(shapes, parts) + (_pages(stash, parts) if stash else 0.0) for parts in held]
        chunks = [ChunkBytes(size, size) for size in sizes]
        place = schedule, stage, parallel.pp, layout.num_microbatches
        kept, _, in_flight = peak_activations(*place, chunks)
        if layout.job.training.moe_overlap:
            kept += more_saved(layout, stage, chunks, in_flight)
        found.append(round(kept))
    return found


def _pages(stash: ActivationShapes, parts: Sequence[StackPart]) -> float:
    """Bytes of the rows of experts that the layers of a chunk keep. stash: sizes at the load of its pages."""
    layers = [pair for part in parts for pair in part.layers]
    ends = [end for part in parts for end in (part.entry, part.exit) if end is not None]
    layers += [(block, 1) for end in ends for block in end.layers]
    rows = (
        number * stash.bytes_of(one for one in layer_activations(stash, block).saved if _is_stashed(one))
        for block, number in layers
    )
    return sum(rows)


def _is_stashed(tensor: SavedTensor) -> bool:
    return "routed" in tensor.dims and tensor.width != "index"


def _inputs(shapes: ActivationShapes, parts: Sequence[StackPart]) -> float:
    """Bytes of the inputs of a chunk's layers that wait on the host."""
    total = 0.0
    for part in parts if shapes.fetched_parts else ():
        layers = sum(number for _, number in part.layers)
        total += layers * shapes.own_bytes(part.seq) / shapes.fetched_parts
    return total
