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

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mpctl.durable import sync_folder, write_whole
from mpctl.families.modules import build_module
from mpctl.layers.grid.tensor_parallel import planned_groups, tensor_parallel_of
from mpctl.layers.parameters import shard_of
from mpctl.layers.shard_context import ShardContext
from mpctl.layout.job_layout import JobLayout
from mpctl.rundir.shards import MANIFEST, SCHEMA, ParameterPlacement, shard_path
from mpctl.shard import Shard
from mpctl.spec.job import JobSpec
from mpctl.transport.group import Group
from mpctl.weights.files import DTYPES, Entry, write_file
from mpctl.weights.saved_tensors import OpenCheckpoint, padding_rows

OnBytes = Callable[[int], None]


def reshard(source: Path, job: JobSpec, out: Path, on_bytes: OnBytes) -> None:
    """Write the checkpoint `source` into the empty folder `out`, as a run of `job` would have.

    job: complete, with the model of the checkpoint and the new layout; on_bytes: called with how
    many bytes of tensors were written since the last call. Raises InputError when `source` is
    damaged or of another model.
    """
    checkpoint, layout, tp = OpenCheckpoint.of(source), JobLayout.of(job), job.parallel.tp
    checkpoint.require_names({weight.name for weight in layout.table.weights()})
    for stage in range(job.parallel.pp):
        for tp_rank in range(tp):
            path = shard_path(out, stage * tp + tp_rank)
            shards = rank_shards(layout, stage, tp_rank)
            entries = sorted(_entries(checkpoint, layout, shards), key=_place_in_file)
            file = write_file(path, entries, on_bytes).as_record()
            record = {**file, **_contents(checkpoint, shards)}
            _write_json(path.with_suffix(".json"), record)
    step, shards_in_all = checkpoint.manifest.step, tp * job.parallel.pp
    manifest = {"schema": SCHEMA, "step": step, "shards": shards_in_all, "tp": tp}
    if checkpoint.manifest.loss_scale:
        manifest["loss_scale"] = checkpoint.manifest.loss_scale
    if checkpoint.manifest.fp8:
        manifest["fp8"] = checkpoint.manifest.fp8
    _write_json(out / MANIFEST, manifest)
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


def _entries(
    checkpoint: OpenCheckpoint, layout: JobLayout, shards: dict[str, Shard]
) -> Iterator[Entry]:
    optional = padding_rows(layout.model)
    for name, shard in shards.items():
        for field, header in checkpoint.fields(name).items():
            make = partial(checkpoint.part, name, field, shard, optional.get(name))
            yield Entry(f"{name}/{field}", header.dtype, shard.local_shape, make)


def _place_in_file(entry: Entry) -> tuple[int, str]:
    """Widest type first, which aligns tensors, then by name, as a run writes them."""
    return -DTYPES[entry.dtype].itemsize, entry.name


def _contents(checkpoint: OpenCheckpoint, shards: dict[str, Shard]) -> dict[str, Any]:
    """The record of a shard, without its file."""
    placements = {}
    for name, shard in shards.items():
        updates = None if name in checkpoint.frozen else checkpoint.updates_of(name)
        placements[name] = ParameterPlacement.of(shard, updates=updates).as_record()
    frozen = [name for name in shards if name in checkpoint.frozen]
    return {"parameters": placements, **({"frozen": frozen} if frozen else {})}


def _write_json(path: Path, document: dict[str, Any]) -> None:
    write_whole(path, json.dumps(document, indent=1) + "\n")
