"""What one shard of a checkpoint holds: tensors by parameter and field, and the record of them;
and the snapshot of both that a save is written from.

A field is `value`, `exp_avg` or `exp_avg_sq`; a frozen parameter has its value alone. A tensor of
the file is named `NAME/FIELD`. The record is rundir/shards.py's ShardRecord, without the size and
the hash of the file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypedDict

import torch
from torch import Tensor

from mpctl.kernels.parameters import shard_of
from mpctl.rundir.shards import Fp8Histories, ParameterPlacement
from mpctl.runtime.loss_scale import LossScale
from mpctl.runtime.optimizer import Optimizer
from mpctl.weights.files import DTYPES, Entry

State = dict[str, Tensor]
SAFETENSORS_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class ShardContents(TypedDict, total=False):
    """The record of a shard: where each parameter's part belongs (rundir/shards.py,
    ParameterPlacement), and names of those without moments."""

    parameters: dict[str, dict[str, Any]]
    frozen: list[str]


Keep = Callable[[str, Tensor], Tensor]
"""What is kept of the tensor `NAME/FIELD`: itself, or a copy."""


@dataclass(frozen=True)
class Snapshot:
    """What one rank writes of the checkpoint of `step`: its tensors and their record, which is None
    on a rank that writes nothing. loss_scale: state of the fp16 loss scale; fp8: of the table of
    fp8 scales, empty without one."""

    step: int
    entries: Sequence[Entry] = ()
    record: ShardContents | None = None
    loss_scale: Mapping[str, float] | None = None
    fp8: Fp8Histories = field(default_factory=dict)


@dataclass
class HostCopies:
    """Copies of tensors in host memory, by name; their memory is used again for the next copy of
    the same name. A copy from a GPU lies in pinned memory, which it reaches at full speed."""

    tensors: dict[str, Tensor] = field(default_factory=dict)

    def keep(self, name: str, tensor: Tensor) -> Tensor:
        """A copy of the tensor, which the next copy of this name overwrites."""
        copy = self.tensors.get(name)
        if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self.tensors[name] = copy
        return copy.copy_(tensor)


@torch.no_grad()
def take_snapshot(
    step: int,
    names: Mapping[Tensor, str],
    optimizer: Optimizer,
    scale: LossScale | None,
    *,
    is_writer: bool,
    copies: HostCopies | None,
) -> Snapshot:
    """What this rank writes of a checkpoint. All replicas call it, since slices are gathered.

    copies: where tensors are copied to, so that training may go on; None writes the tensors
    themselves.
    """
    keep = _without_bucket if copies is None else copies.keep
    states = gather_states(names, optimizer, is_writer=is_writer, keep=keep)
    loss_scale = None if scale is None else dict(scale.state())
    if not is_writer:
        return Snapshot(step, loss_scale=loss_scale)
    record = shard_record(names, states, optimizer)
    return Snapshot(step, file_entries(names, states), record, loss_scale)


def gather_states(
    names: Mapping[Tensor, str], optimizer: Optimizer, *, is_writer: bool, keep: Keep
) -> dict[Tensor, State]:
    """The tensors to be saved of each parameter, the frozen ones last; empty on ranks that do not
    write. Slices are gathered bucket by bucket, in which every replica takes part."""
    states: dict[Tensor, State] = {}
    for parameter, state in optimizer.states():
        if is_writer and parameter in names:
            name = names[parameter]
            states[parameter] = {
                field: keep(f"{name}/{field}", tensor) for field, tensor in state.items()
            }
    frozen: dict[Tensor, Tensor] = dict(optimizer.frozen_values())
    for other, name in names.items() if is_writer else ():
        if other not in optimizer.trained:
            value = frozen.get(other, other).detach()
            states[other] = {"value": keep(f"{name}/value", value)}
    return states


def _without_bucket(name: str, tensor: Tensor) -> Tensor:
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
    placements: dict[str, dict[str, Any]] = {}
    for parameter in states:
        is_trained = parameter in optimizer.trained
        updates = optimizer.updates_of(parameter) if is_trained else None
        placement = ParameterPlacement.of(shard_of(parameter), updates=updates)
        placements[names[parameter]] = placement.as_record()
    frozen = [names[parameter] for parameter, state in states.items() if state.keys() == {"value"}]
    record: ShardContents = {"parameters": placements}
    if frozen:
        record["frozen"] = frozen
    return record
