"""Checkpoints of tensors alone, cut as the ranks of a grid hold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from torch import Tensor

from mpctl.core.shard import Shard
from mpctl.core.sharding import View
from mpctl.core.tensor_grid import TensorGrid
from mpctl.records.checkpoint.manifest import Manifest, ParameterPlacement, ShardFile, ShardRecord, read_shard_record
from mpctl.train.checkpoint.tensor_file import DTYPES, Entry, write_file
from mpctl.train.layers.parameters import take

Dims = tuple[str, ...]
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def grid_shard(grid: TensorGrid, rank: int, shape: tuple[int, ...], dims: Dims, fused: Sequence[int] = ()) -> Shard:
    """The part of a parameter that a tp rank holds. fused: rows of the parts of its first
    dimension, each cut by itself."""
    return View(grid=grid).shard(shape, dims, rank, fused or None)


def save_shards(folder: Path, full: Mapping[str, Tensor], ranks: Sequence[Mapping[str, Shard]]) -> Path:
    """A checkpoint `step-1` of the values `full`, a file a rank."""
    folder = folder / "step-1"
    folder.mkdir(parents=True)
    for index, shards in enumerate(ranks):
        entries = [
            Entry(f"{name}/value", NAMES[full[name].dtype], shard.local_shape, partial(take, shard, full[name]))
            for name, shard in shards.items()
        ]
        file = write_file(shard_path(folder, index), entries, lambda count: None)
        places = {name: ParameterPlacement.of(shard) for name, shard in shards.items()}
        ShardRecord.of(file, places, []).write(numbered(index).record_path(folder))
    Manifest(step=1, shards=[numbered(index) for index in range(len(ranks))]).write(folder)
    return folder


def numbered(index: int) -> ShardFile:
    """The shard of a tp rank of a single stage."""
    return ShardFile(name=f"shard-{index}", coords={"pp": 0, "tp": index})


def shard_path(folder: Path, index: int) -> Path:
    """The tensors of a shard."""
    return folder / f"shard-{index}.safetensors"


def shard_record(folder: Path, index: int) -> ShardRecord:
    """The record of a shard, whose bytes are those that were written."""
    return read_shard_record(folder, numbered(index))
