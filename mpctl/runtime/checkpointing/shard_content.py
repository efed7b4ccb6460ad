"""What one shard of a checkpoint holds: tensors by parameter and field, and the record of them.

A field is `value`, `exp_avg` or `exp_avg_sq`; a frozen parameter has its value alone. A tensor of
the file is named `NAME/FIELD`. The record is rundir/shards.py's ShardRecord, without the size and
the hash of the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TypedDict

from torch import Tensor

from mpctl.kernels.parameters import shard_of
from mpctl.runtime.optimizer import Optimizer
from mpctl.weights.files import DTYPES, Entry

State = dict[str, Tensor]
SAFETENSORS_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Placement(TypedDict, total=False):
    """Where a parameter's part belongs: full shape, split dimension, [start, stop) of the blocks
    saved and, where it has moments, the updates that they have seen."""

    shape: list[int]
    dim: int | None
    blocks: list[list[int]]
    updates: int


class ShardContents(TypedDict, total=False):
    """The record of a shard: where each parameter's part belongs, and names of those without
    moments."""

    parameters: dict[str, Placement]
    frozen: list[str]


def gather_states(
    names: Mapping[Tensor, str], optimizer: Optimizer, *, is_writer: bool
) -> dict[Tensor, State]:
    """The tensors to be saved of each parameter, the frozen ones last; empty on ranks that do not
    write. Slices are gathered bucket by bucket, in which every replica takes part."""
    states: dict[Tensor, State] = {}
    for parameter, state in optimizer.states():
        if is_writer and parameter in names:
            states[parameter] = {field: _without_bucket(tensor) for field, tensor in state.items()}
    frozen: dict[Tensor, Tensor] = dict(optimizer.frozen_values())
    for other in names if is_writer else ():
        if other not in optimizer.trained:
            states[other] = {"value": _without_bucket(frozen.get(other, other).detach())}
    return states


def _without_bucket(tensor: Tensor) -> Tensor:
    """The tensor, copied out of the bucket that it may be a view of, so that the bucket's memory is
    not kept."""
    is_view = tensor.untyped_storage().nbytes() > tensor.nbytes
    return tensor.to("cpu", copy=True) if is_view else tensor.contiguous()


def file_entries(names: Mapping[Tensor, str], states: Mapping[Tensor, State]) -> list[Entry]:
    """The tensors of a shard, `NAME/FIELD`: widest type first, which aligns them, then by name."""
    tensors = {
        f"{names[parameter]}/{field}": tensor
        for parameter, state in states.items()
        for field, tensor in state.items()
    }
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    return [
        Entry(
            name, SAFETENSORS_NAMES[tensor.dtype], tuple(tensor.shape), partial(_identity, tensor)
        )
        for name, tensor in ordered
    ]


def _identity(tensor: Tensor) -> Tensor:
    return tensor


def shard_record(
    names: Mapping[Tensor, str], states: Mapping[Tensor, State], optimizer: Optimizer
) -> ShardContents:
    """What to record of a shard with these states; names: of the parameters."""
    placements: dict[str, Placement] = {}
    for parameter in states:
        shard = shard_of(parameter)
        blocks = [[block.start, block.stop] for block in shard.blocks]
        placement: Placement = {"shape": list(shard.shape), "dim": shard.dim, "blocks": blocks}
        if parameter in optimizer.trained:
            placement["updates"] = optimizer.updates_of(parameter)
        placements[names[parameter]] = placement
    frozen = [names[parameter] for parameter, state in states.items() if state.keys() == {"value"}]
    record: ShardContents = {"parameters": placements}
    if frozen:
        record["frozen"] = frozen
    return record
