"""Checkpoints of tensors alone, cut as the ranks of a grid hold them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from torch import Tensor

from mpctl.layers.grid.layers import GridPlace
from mpctl.layers.parameters import take
from mpctl.rundir.shards import MANIFEST, SCHEMA, ParameterPlacement, shard_path
from mpctl.shard import Shard
from mpctl.tensor_grid import TensorGrid
from mpctl.weights.files import DTYPES, Entry, write_file

Dims = tuple[str, ...]
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def grid_shard(
    grid: TensorGrid, rank: int, shape: tuple[int, ...], dims: Dims, fused: Sequence[int] = ()
) -> Shard:
    """The part of a parameter that a tp rank holds. fused: rows of the parts of its first
    dimension, each cut by itself."""
    return GridPlace(grid, rank, {}).shard(shape, dims, fused or None)


def save_shards(
    folder: Path, full: Mapping[str, Tensor], ranks: Sequence[Mapping[str, Shard]]
) -> Path:
    """A checkpoint `step-1` of the values `full`, a file a rank."""
    folder = folder / "step-1"
    folder.mkdir(parents=True)
    for index, shards in enumerate(ranks):
        entries = [
            Entry(
                f"{name}/value",
                NAMES[full[name].dtype],
                shard.local_shape,
                partial(take, shard, full[name]),
            )
            for name, shard in shards.items()
        ]
        file = write_file(shard_path(folder, index), entries, lambda count: None).as_record()
        places = {name: ParameterPlacement.of(shard).as_record() for name, shard in shards.items()}
        record = {**file, "parameters": places}
        shard_path(folder, index).with_suffix(".json").write_text(json.dumps(record))
    manifest = {"schema": SCHEMA, "step": 1, "shards": len(ranks), "tp": len(ranks)}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    return folder
