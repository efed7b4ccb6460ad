"""A checkpoint rewritten for another layout, tensor by tensor, without process groups.

Any layout reads any checkpoint, so training never needs this. It is for what reads shards by rank
number, and for starting a large world: each rank of the new layout then reads one file, in order.

The new shards are those that a run of the new layout would have written: modules without memory
(torch's meta device) of each rank that writes say which part of which parameter it holds, and of
these it writes the ones of which it is a first replica (replicas.py). A tensor is read when its
turn comes and freed when it is written, so that memory is bounded by the largest tensor of a shard
and the parts that it is assembled from. Vocabulary padding that was not saved becomes zeros.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from mpctl.core.durable import sync_folder
from mpctl.core.shard import Shard
from mpctl.core.sharding import EXPERTS
from mpctl.model.layout.job_layout import JobLayout
from mpctl.records.checkpoint.manifest import OnBytes, ParameterPlacement, ShardRecord
from mpctl.records.checkpoint.replicas import layout_replicas, shard_files
from mpctl.train.checkpoint.reader import OpenCheckpoint, padding_rows
from mpctl.train.checkpoint.tensor_file import Entry, in_file_order, write_file
from mpctl.train.families.implementation import build_module
from mpctl.train.layers.grid.tensor_parallel import tensor_parallel_of
from mpctl.train.layers.parameters import shard_of
from mpctl.train.layers.shard_context import ALL_EXPERTS, ShardContext
from mpctl.train.transport.group import Group


def reshard(source: Path, layout: JobLayout, out: Path, on_bytes: OnBytes) -> None:
    """Write the checkpoint `source` into the empty folder `out`, as a run of `layout` would have.

    layout: of the checkpoint's model; on_bytes: called with how many bytes of tensors were written
    since the last call. Raises InputError when `source` is damaged or of another model.
    """
    checkpoint = OpenCheckpoint.of(source)
    checkpoint.require_names({weight.name for weight in layout.table.weights()})
    optional = padding_rows(layout.model, layout.job.training.adapter)
    files = shard_files(layout_replicas(layout))
    for rank, file in files.items():
        shards = rank_shards(layout, rank)
        entries = [
            Entry(
                f"{name}/{field}",
                header.dtype,
                shard.local_shape,
                partial(checkpoint.part, name, field, shard, optional.get(name)),
            )
            for name, shard in shards.items()
            for field, header in checkpoint.fields(name).items()
        ]
        digest = write_file(file.path(out), in_file_order(entries), on_bytes)
        frozen = [name for name in shards if name in checkpoint.frozen]
        placements = {
            name: ParameterPlacement.of(shard, updates=None if name in frozen else checkpoint.updates_of(name))
            for name, shard in shards.items()
        }
        ShardRecord.of(digest, placements, frozen).write(file.record_path(out))
    listed = {"shards": list(files.values()), "save": ""}
    checkpoint.manifest.model_copy(update=listed).write(out)
    sync_folder(out)


def rank_shards(layout: JobLayout, rank: int) -> dict[str, Shard]:
    """The part of each parameter that a rank saves, by name: of the views that it holds a first
    replica of, and of a parameter that several stages hold, on the first of them."""
    job, topology = layout.job, layout.topology
    stage = topology.whole_coords(rank)["pp"]
    kinds = dict(layout.grid.groups)
    for view in layout.views.values():
        kinds |= {name: (name,) for name in (*view.sizes, view.shard_group)}
    groups = dict[str, Group]()
    for name, axes in kinds.items():
        ranks = topology.group(rank, *axes)
        groups[name] = Group(ranks.index(rank), len(ranks), name=name)  # can send nothing
    context = ShardContext(
        groups["tp"],
        Group(name="cp"),
        job.parallel.sequence_parallel,
        device=torch.device("meta"),
        tensor_parallel=tensor_parallel_of(layout.grid.mode),
        grid=layout.grid,
        groups=groups,
        expert_view=layout.views.get(EXPERTS, ALL_EXPERTS),
    )
    slices = [layout.chunk_slices(stage, chunk) for chunk in range(len(layout.stages[stage]))]
    modules = [build_module(layout.model, job.training, context, part) for part in slices]
    replicas = dict(zip(layout.views, layout_replicas(layout), strict=True))
    written = {view for view, held in replicas.items() if held.is_first(rank)}
    saved = {
        weight.name
        for weight in layout.stage_parameters(stage)
        if weight.view in written
        and layout.is_saved(weight.name)
        and layout.shared_parameters.get(weight.name, (stage,))[0] == stage
    }
    named = [pair for module in modules for pair in module.named_parameters()]
    return {name: shard_of(parameter) for name, parameter in named if name in saved}
