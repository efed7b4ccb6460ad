"""Contents of a shard of a checkpoint, tensors by parameter and field and their record, and the
snapshot of both from which a save is written.

From a GPU tensors are copied on a side stream, into pinned memory. Tensors that the rank keeps
(values and moments of full size) are copied while the next step computes: its update, which changes
them, waits for the stream, and so does the thread that writes (Snapshot.arrived). Tensors that were
gathered for the save, slices of ZeRO, are copied before the next bucket is gathered, so that the
device holds only one.

All copies of a rank lie in one block, in the order of the file, without gaps: as many bytes as the
file has of tensors (`snapshot_bytes` of plan/estimate/states.py). It is taken before the first step,
since pinning some GB takes seconds, during which the device waits.

A field is `value` or a moment of the optimizer (MOMENTS); a tensor that no optimizer steps, a frozen
parameter or a buffer, has only a value. A tensor of the file is named `NAME/FIELD`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from mpctl.records.checkpoint.manifest import ManifestTables, ParameterPlacement
from mpctl.train.checkpoint.tensor_file import DTYPES, Entry, in_file_order
from mpctl.train.layers.parameters import shard_of
from mpctl.train.transport.host_memory import host_block
from mpctl.train.transport.streams import HOST_STREAM, PASSED, SideStream, StreamMark

State = dict[str, Tensor]
MOMENTS: dict[str, tuple[str, ...]] = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "lion": ("exp_avg",),
    "sgd": ("momentum_buffer",),
    "muon": ("momentum_buffer",),
}
"""torch's names of the moments of each optimizer; SGD has one with momentum alone, Muon's are of matrices."""
USE = (
    "for the copies that checkpoints are written from; use --set checkpoint.asynchronous=false, "
    "which saves between two steps and copies nothing"
)
SAFETENSORS_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class OptimizerState(Protocol):
    """State of an optimizer that a checkpoint saves (training's: train/runtime/optimizer.py). All
    replicas together call the methods that gather slices."""

    @property
    def trained(self) -> Collection[Tensor]:
        """The parameters that it steps."""

    @property
    def gathers_states(self) -> bool:
        """Whether `states` and `frozen_values` are gathered for the caller, and freed after it."""

    def states(self) -> Iterator[tuple[nn.Parameter, State]]:
        """Each trained parameter with its full `value` and moments."""

    def frozen_values(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """The full values of frozen parameters that are stored in slices and that some rank saves."""

    def updates_of(self, parameter: Tensor) -> int:
        """Return the number of updates in the moments of a trained parameter."""

    def saved_dtypes(self, parameter: Tensor) -> Mapping[str, torch.dtype]:
        """The data types of what `states` yields of a trained parameter, by field."""

    def load(self, parameter: nn.Parameter, tensors: State, *, updates: int) -> None:
        """The inverse of `states`."""

    def full_value(self, parameter: Tensor) -> Tensor:
        """A parameter's full value, to be written to and passed to `set_value`."""

    def set_value(self, parameter: Tensor, value: Tensor) -> None:
        """Take over a full value that was written to the tensor from `full_value`."""

    def publish(self) -> None:
        """Copy the stepped tensors to the parameters that the model computes with."""


Keep = Callable[[str, Tensor], Tensor]
"""Returns the tensor `NAME/FIELD` to be saved: itself, or a copy."""


@dataclass(frozen=True)
class Snapshot:
    """Part of the checkpoint of `step` that one rank writes.

    entries: its tensors; parameters: the part of each parameter, None on a rank that writes
    nothing; frozen: those that have only a value. tables: fields of the manifest that every rank
    has, such as the state of fp16's loss scale. arrived: wait for it before reading: the tensors
    have their values then.
    """

    step: int
    entries: Sequence[Entry] = ()
    parameters: dict[str, ParameterPlacement] | None = None
    frozen: list[str] = field(default_factory=list)
    tables: ManifestTables = field(default_factory=dict)
    arrived: StreamMark = PASSED


class TensorKind(NamedTuple):
    """Shape and dtype of the memory for a copy."""

    shape: torch.Size
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Bytes of its elements."""
        return self.shape.numel() * self.dtype.itemsize


@dataclass
class HostCopies:
    """Copies of tensors in host memory, by name; their memory is used again for the next copy of
    the same name. A copy from a GPU is in pinned memory, to which it is copied at full speed.

    stream: which copies; a copy may be read once it has passed (SideStream.mark). reading: tensors
    that it may still be copying.
    """

    stream: SideStream = HOST_STREAM
    tensors: dict[str, Tensor] = field(default_factory=dict)
    reading: list[Tensor] = field(default_factory=list)

    def reserve(self, names: Mapping[Tensor, str], optimizer: OptimizerState) -> None:
        """Take the memory that `take_snapshot` with these arguments needs, unless it is there.
        Raises RunFailed if it cannot be pinned."""
        if names:
            self._take(snapshot_kinds(names, optimizer), next(iter(names)).device)

    def _take(self, kinds: Mapping[str, TensorKind], device: torch.device) -> None:
        """One block for those of the copies that have no memory."""
        missing = {name: kind for name, kind in kinds.items() if self._kind(name) != kind}
        if not missing:
            return
        size = sum(kind.bytes for kind in missing.values())
        block, start = host_block(size, device, USE), 0
        in_order = sorted(missing.items(), key=lambda one: (-one[1].dtype.itemsize, one[0]))
        for name, kind in in_order:
            part = block[start : start + kind.bytes]
            self.tensors[name] = part.view(kind.dtype).view(kind.shape)
            start += kind.bytes

    def _kind(self, name: str) -> TensorKind | None:
        copy = self.tensors.get(name)
        return None if copy is None else TensorKind(copy.shape, copy.dtype)

    def keep(self, name: str, tensor: Tensor, *, is_passing: bool = False) -> Tensor:
        """A copy of the tensor, which the next copy of this name overwrites. is_passing: the
        tensor's memory is used again at once, so that what is computed next waits for the copy;
        else the tensor must not change before `join`."""
        self._take({name: TensorKind(tensor.shape, tensor.dtype)}, tensor.device)
        copy = self.tensors[name]
        self.stream.follow()
        with self.stream.running():
            copy.copy_(tensor, non_blocking=True)
        if is_passing:
            self.stream.join()
        else:
            self.reading.append(tensor)
        return copy

    def join(self) -> None:
        """Make the current stream wait for the copies: what was kept may then change."""
        self.stream.join()
        self.reading.clear()


def snapshot_kinds(names: Mapping[Tensor, str], optimizer: OptimizerState) -> dict[str, TensorKind]:
    """The tensors that `take_snapshot` copies, by name. names: as there."""
    kinds: dict[str, TensorKind] = {}
    for tensor, name in names.items():
        is_trained = tensor in optimizer.trained
        for of, dtype in optimizer.saved_dtypes(tensor).items() if is_trained else (("value", tensor.dtype),):
            kinds[f"{name}/{of}"] = TensorKind(tensor.shape, dtype)
    return kinds


@torch.no_grad()
def take_snapshot(
    step: int,
    names: Mapping[Tensor, str],
    optimizer: OptimizerState,
    *,
    is_writer: bool,
    copies: HostCopies | None,
    tables: ManifestTables,
) -> Snapshot:
    """Take the snapshot that this rank writes. All replicas call it, since slices are gathered.

    names: of the parameters and buffers of its shard; copies: memory to copy tensors to, so that
    training may continue; None writes the tensors themselves.
    """
    keep = _without_bucket
    if copies is not None:
        if is_writer:
            copies.reserve(names, optimizer)
        keep = partial(copies.keep, is_passing=optimizer.gathers_states)
    states = _kept_states(names if is_writer else {}, optimizer, keep)
    if not is_writer:
        return Snapshot(step, tables=tables)
    entries = [
        Entry(f"{names[tensor]}/{field}", SAFETENSORS_NAMES[part.dtype], tuple(part.shape), part.detach)
        for tensor, state in states.items()
        for field, part in state.items()
    ]
    parameters = {
        names[tensor]: ParameterPlacement.of(
            shard_of(tensor), updates=optimizer.updates_of(tensor) if tensor in optimizer.trained else None
        )
        for tensor in states
    }
    return Snapshot(
        step,
        in_file_order(entries),
        parameters,
        [names[tensor] for tensor in states if tensor not in optimizer.trained],
        tables,
        PASSED if copies is None else copies.stream.mark(),
    )


def _kept_states(names: Mapping[Tensor, str], optimizer: OptimizerState, keep: Keep) -> dict[Tensor, State]:
    """The tensors to be saved of each parameter, those without moments last. Slices are gathered
    bucket by bucket, in which every replica takes part; without names it saves nothing."""
    states: dict[Tensor, State] = {}
    for parameter, state in optimizer.states():
        if (name := names.get(parameter)) is not None:
            states[parameter] = {f: keep(f"{name}/{f}", tensor) for f, tensor in state.items()}
        del state  # or its bucket stays while the next one is gathered
    gathered: dict[Tensor, Tensor] = {}
    for frozen, value in optimizer.frozen_values():
        if (name := names.get(frozen)) is not None:
            gathered[frozen] = keep(f"{name}/value", value.detach())
        del value
    for other, name in names.items():
        if other not in optimizer.trained:
            kept = gathered[other] if other in gathered else keep(f"{name}/value", other.detach())
            states[other] = {"value": kept}
    return states


def _without_bucket(name: str, tensor: Tensor) -> Tensor:
    """The tensor, copied out of the bucket that it may be a view of, so that the bucket's memory is
    freed."""
    is_view = tensor.untyped_storage().nbytes() > tensor.nbytes
    return tensor.to("cpu", copy=True) if is_view else tensor.contiguous()
