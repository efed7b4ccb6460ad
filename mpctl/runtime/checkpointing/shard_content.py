"""What one shard of a checkpoint holds: tensors by parameter and field, and the record of them;
and the snapshot of both that a save is written from.

From a GPU tensors are copied on a side stream, into pinned memory. What the rank keeps (values and
moments of full size) is copied while the next step computes: its update, which changes them, waits
(Optimizer.reader), and so does the thread that writes (Snapshot.arrived). What was gathered for the
save, slices of ZeRO, is copied before the next bucket is gathered, so that no more than one is held
on the device.

A field is `value`, `exp_avg` or `exp_avg_sq`; a frozen parameter has its value alone. A tensor of
the file is named `NAME/FIELD`. The record is rundir/shards.py's ShardRecord, without the size and
the hash of the file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypedDict

import torch
from torch import Tensor

from mpctl.layers.parameters import shard_of
from mpctl.rundir.shards import Fp8Histories, ParameterPlacement
from mpctl.runtime.loss_scale import LossScale
from mpctl.runtime.optimizer import Optimizer
from mpctl.transport.streams import HOST_STREAM, SideStream, nothing_to_wait_for
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
    fp8 scales, empty without one. arrived: returns once the tensors have their values; to be called
    before they are read."""

    step: int
    entries: Sequence[Entry] = ()
    record: ShardContents | None = None
    loss_scale: Mapping[str, float] | None = None
    fp8: Fp8Histories = field(default_factory=dict)
    arrived: Callable[[], None] = nothing_to_wait_for


@dataclass
class HostCopies:
    """Copies of tensors in host memory, by name; their memory is used again for the next copy of
    the same name. A copy from a GPU lies in pinned memory, which it reaches at full speed.

    stream: what copies; a copy may be read once it has passed (SideStream.mark).
    """

    stream: SideStream = HOST_STREAM
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def keep(self, name: str, tensor: Tensor, *, is_passing: bool = False) -> Tensor:
        """A copy of the tensor, which the next copy of this name overwrites. is_passing: the
        tensor's memory is used again at once, so that what is computed next waits for the copy;
        else the tensor must not change before the stream has passed."""
        copy = self.tensors.get(name)
        if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
            is_pinned = tensor.device.type != "cpu"
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=is_pinned)
            self.tensors[name] = copy
        self.stream.follow()
        with self.stream.running():
            copy.copy_(tensor, non_blocking=True)
        if is_passing:
            self.stream.join()
        else:
            self.stream.keep(tensor)
        return copy


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
    keep = _without_bucket
    if copies is not None:
        keep = partial(copies.keep, is_passing=optimizer.gathers_states)
        optimizer.reader = copies.stream
    states = gather_states(names, optimizer, is_writer=is_writer, keep=keep)
    loss_scale = None if scale is None else dict(scale.state())
    if not is_writer:
        return Snapshot(step, loss_scale=loss_scale)
    snapshot = Snapshot(
        step, file_entries(names, states), shard_record(names, states, optimizer), loss_scale
    )
    return snapshot if copies is None else replace(snapshot, arrived=copies.stream.mark())


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
