"""A checkpoint rewritten for another tp x pp and mode, tensor by tensor, without process groups.

Any layout reads any checkpoint, so training never needs this. It is for what reads shards by rank
number, and for starting a large world: each rank of the new layout then reads one file, in order.

The new shards are those that a run of the new layout would have written: modules without memory
(torch's meta device) of each stage and tp rank say which part of which parameter they hold. A
tensor is read when its turn comes and forgotten when it is written, so that memory is bounded by
the largest tensor of a shard and the parts that it is put together from. Vocabulary padding that
was not saved becomes zeros.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from mpctl.checkpoint.manifest import OnBytes, ParameterPlacement, ShardRecord
from mpctl.checkpoint.reader import OpenCheckpoint, padding_rows
from mpctl.checkpoint.tensor_file import Entry, in_file_order, write_file
from mpctl.checkpoint.writers import layout_replicas, shard_files
from mpctl.durable import sync_folder
from mpctl.families.implementation import build_module
from mpctl.layers.grid.tensor_parallel import planned_groups, tensor_parallel_of
from mpctl.layers.parameters import shard_of
from mpctl.layers.shard_context import ShardContext
from mpctl.layout.job_layout import JobLayout
from mpctl.shard import Shard
from mpctl.spec.job import JobSpec
from mpctl.transport.group import Group


def reshard(source: Path, job: JobSpec, out: Path, on_bytes: OnBytes) -> None:
    """Write the checkpoint `source` into the empty folder `out`, as a run of `job` would have.

    job: complete, with the model of the checkpoint and the new layout; on_bytes: called with how
    many bytes of tensors were written since the last call. Raises InputError when `source` is
    damaged or of another model.
    """
    checkpoint, layout = OpenCheckpoint.of(source), JobLayout.of(job)
    checkpoint.require_names({weight.name for weight in layout.table.weights()})
    optional = padding_rows(layout.model)
    files = shard_files(layout_replicas(layout)).values()
    for file in files:
        shards = rank_shards(layout, file.stage, file.coords["tp"])
        entries = [
            Entry(f"{name}/{field}", header.dtype, shard.local_shape,
                  partial(checkpoint.part, name, field, shard, optional.get(name)))
            for name, shard in shards.items()
            for field, header in checkpoint.fields(name).items()
        ]  # fmt: skip
        digest = write_file(file.path(out), in_file_order(entries), on_bytes)
        frozen = [name for name in shards if name in checkpoint.frozen]
        placements = {
            name: ParameterPlacement.of(
                shard, updates=None if name in frozen else checkpoint.updates_of(name)
            )
            for name, shard in shards.items()
        }
        ShardRecord.of(digest, placements, frozen).write(file.record_path(out))
    manifest = checkpoint.manifest.model_copy(update={"shards": list(files), "save": ""})
    manifest.write(out)
    sync_folder(out)


def rank_shards(layout: JobLayout, stage: int, tp_rank: int) -> dict[str, Shard]:
    """The part of each parameter that a tp rank of a stage saves, by name: of a parameter that
    several stages hold, the first one."""
    job, chunks = layout.job, len(layout.stages[stage])
    context = ShardContext(
        Group(tp_rank, layout.grid.size, name="tp"),
        Group(name="cp"),
        job.parallel.sequence_parallel,
        device=torch.device("meta"),
        tensor_parallel=tensor_parallel_of(layout.grid.mode),
        grid=layout.grid,
        groups=planned_groups(layout.grid, tp_rank),
    )
    slices = [layout.chunk_slices(stage, chunk) for chunk in range(chunks)]
    modules = [build_module(layout.model, job.training, context, part) for part in slices]
    named = [pair for module in modules for pair in module.named_parameters()]
    shared = layout.shared_parameters
    return {name: shard_of(p) for name, p in named if shared.get(name, (stage,))[0] == stage}
