"""Parameters by bucket: the tensors that the model uses and those that the optimizer updates.

ZeRO flattens and concatenates the parameters of a bucket, pads the result and cuts it into one
slice per replica (model/layout/buckets.py; arXiv 1910.02054, section 5). Slices may cut through
parameters, since AdamW is elementwise.

ZeRO 0 leaves parameters where they are. At 1 and 2 a bucket's parameters are views of one flat
tensor: this rank's slice is updated, then the slices of all replicas are gathered, possibly while
the next forward computes (gather.py). At 3 only the slice stays in memory, and the flat tensor has
memory only while its layer is computed: parameters stay the same objects, views of a storage that
grows and shrinks (as in arXiv 2304.11277, section 4.2). 16-bit parameters have float32 masters,
which are updated instead (arXiv 1710.03740), unless the job wants none.

A rank that keeps slices of a stage never has it in memory unsharded: its modules are made without
memory, then each bucket is allocated, initialized and sliced before the next one.

By hand, 100 bf16 parameters over 2 replicas, slices of 64: stage 0 keeps 200 bytes and 400 of
masters, 1 and 2 keep 256 and 256, 3 keeps 128 and 256.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from mpctl.model.layout.buckets import Bucket
from mpctl.train.transport.group import Group, Pending


class ParameterSlice(NamedTuple):
    """This rank's elements of one parameter. parameter: None for padding; start: index of the first
    of them in the flattened parameter; values: the elements, flat or in the parameter's shape."""

    parameter: nn.Parameter | None
    start: int
    values: Tensor


@dataclass(frozen=True)
class BucketShard:
    """A bucket as seen by one of its replicas.

    replicas: the group over which the bucket's gradients are reduced, under ZeRO the ranks that
    divide it; stages: the group of the pipeline stages that hold copies of these parameters, None
    if only one does. equal: the ranks that hold the same slice, where not all replicas divide it
    (`View.copies`).
    """

    bucket: Bucket
    parameters: tuple[nn.Parameter, ...]
    replicas: Group
    stages: Group | None = None
    equal: Group = field(default_factory=Group)

    @property
    def decayed(self) -> set[nn.Parameter]:
        """The parameters with weight decay (ParameterSpec.decays)."""
        named = zip(self.bucket.names, self.parameters, strict=True)
        return {parameter for name, parameter in named if name not in self.bucket.undecayed}

    @property
    def local_range(self) -> slice:
        """This rank's slice of the padded bucket."""
        first = self.replicas.rank * self.bucket.part
        return slice(first, first + self.bucket.part)

    def views(self, full: Tensor) -> list[Tensor]:
        """Views of a flat tensor [numel or more], one for each parameter in its shape."""
        parts = full[: self.bucket.numel].split(self.bucket.sizes)
        return [part.view(p.shape) for part, p in zip(parts, self.parameters, strict=True)]

    def parameter_slices(self, local: Tensor) -> Iterator[ParameterSlice]:
        """A tensor [bucket.part], split by the parameters to which its elements belong."""
        stop = 0
        for number, start, offset, length in self.bucket.pieces(self.replicas.rank):
            stop = offset + length
            yield ParameterSlice(self.parameters[number], start, local[offset:stop])
        if stop < len(local):
            yield ParameterSlice(None, 0, local[stop:])


class ParamStore:
    """Unsharded parameters: ZeRO 0.

    stepped: the tensors that the optimizer updates, by parameter. copies: what the model computes
    with, or this rank's slices of it, and the masters to copy to them before `publish`. pending:
    parameters that are being gathered, not to be used before `arrive`. master_tensors,
    parameter_tensors: tensors that only this store refers to, beside the model's parameters.
    """

    copies: list[tuple[Tensor, Tensor]]
    pending: Pending | None = None

    def __init__(self, shard: BucketShard, *, has_masters: bool = True) -> None:
        self.shard = shard
        self.stepped = [ParameterSlice(p, 0, _master(p) if has_masters else p) for p in shard.parameters]
        pairs = [(p, part.values) for p, part in zip(shard.parameters, self.stepped, strict=True)]
        self.copies = [(p, master) for p, master in pairs if master is not p]
        self.master_tensors = [master for _, master in self.copies]
        self.parameter_tensors: list[Tensor] = []

    @property
    def stepped_dtype(self) -> torch.dtype:
        """The data type of what the optimizer updates."""
        return self.stepped[0].values.dtype

    def publish(self) -> None:
        """Send the updated values to the parameters on the other replicas, possibly asynchronously
        until `arrive`; every replica calls it. ZeRO 0 sends nothing."""

    def arrive(self) -> None:
        """Wait for the messages that `publish` started, if any are pending."""

    def gather_full(self, local: list[Tensor]) -> list[Tensor]:
        """Tensors like those of `stepped` -> the full tensor of each parameter; every replica calls
        it."""
        return local

    def full_value(self, parameter: Tensor) -> Tensor:
        """A parameter's full value, to be written to and passed to `set_value`: the updated tensor
        if it has full size on this rank, otherwise a copy in host memory, for which all replicas
        must call together."""
        return next(part.values for part in self.stepped if part.parameter is parameter)

    def set_value(self, parameter: Tensor, full: Tensor) -> None:
        """Take over the full value written to the tensor that `full_value` returned."""


class SlicedParamStore(ParamStore):
    """Views of a flat tensor, of which this rank updates a slice: ZeRO 1 and 2.

    flat: the bucket, padded. local: this rank's slice of it. master: `local` in float32.
    """

    def __init__(self, shard: BucketShard, *, has_masters: bool = True) -> None:
        self.shard = shard
        self.flat = shard.parameters[0].detach().new_zeros(shard.bucket.padded)
        for parameter, view in zip(shard.parameters, shard.views(self.flat), strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
        self.local = self._take_local()
        self.master = _master(self.local) if has_masters else self.local
        self.stepped = list(shard.parameter_slices(self.master))
        self.master_tensors = [] if self.master is self.local else [self.master]
        self.parameter_tensors = [self.flat]
        local = self.shard.parameter_slices(self.local)
        pairs = [(of.values, part.values) for of, part in zip(local, self.stepped, strict=True)]
        self.copies = [] if self.master is self.local else pairs

    def _take_local(self) -> Tensor:
        return self.flat[self.shard.local_range]

    def publish(self) -> None:
        """Begin to gather every replica's updated slice into the parameters."""
        self.arrive()
        self.pending = self.shard.replicas.start_all_gather_into(self.flat, self.local)

    def arrive(self) -> None:
        if self.pending is not None:
            self.pending.wait()
            self.pending = None

    def _copy_master(self) -> None:
        if self.master is not self.local:
            self.local.copy_(self.master)

    def gather_full(self, local: list[Tensor]) -> list[Tensor]:
        self.arrive()
        return self.shard.views(self.shard.replicas.all_gather(torch.cat(local), 0))

    def full_value(self, parameter: Tensor) -> Tensor:
        self.arrive()
        return parameter.detach().to("cpu", self.master.dtype, copy=True)

    def set_value(self, parameter: Tensor, full: Tensor) -> None:
        self.arrive()
        for owner, start, values in self.stepped:
            if owner is parameter:
                values.copy_(full.reshape(-1)[start : start + len(values)])
        self._copy_master()


class Zero3ParamStore(SlicedParamStore):
    """A slice, and the flat tensor while it is needed: ZeRO 3. Frozen parameters keep their
    dtype."""

    def __init__(self, shard: BucketShard, *, has_masters: bool = True) -> None:
        super().__init__(shard, has_masters=has_masters and shard.bucket.is_trained)
        self.parameter_tensors = [self.flat, self.local]
        self.free()

    def _take_local(self) -> Tensor:
        return super()._take_local().clone()

    def publish(self) -> None:
        """Does nothing: the parameters are gathered when they are used."""

    def arrive(self) -> None:
        """Does nothing: `publish` starts no message."""

    def full_value(self, parameter: Tensor) -> Tensor:
        self.gather()
        value = super().full_value(parameter)
        self.free()
        return value

    def start(self) -> Pending:
        """Begin to gather; does nothing if it has begun already."""
        if self.pending is None:
            _resize(self.flat, self.flat.nbytes)
            self.pending = self.shard.replicas.start_all_gather_into(self.flat, self.local)
        return self.pending

    def gather(self) -> None:
        """Give the parameters their values, until `free`."""
        self.start().wait()

    def free(self) -> None:
        """Release the memory, after a pending gather, which writes to it, has ended."""
        if self.pending is not None:
            self.pending.wait()
        self.pending = None
        if self.flat.untyped_storage().nbytes():
            _resize(self.flat, 0)


@contextmanager
def without_memory() -> Iterator[None]:
    """Parameters of the modules that are made inside have no memory until `allocate`."""

    def release(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            _resize(parameter, 0)

    handle = register_module_parameter_registration_hook(release)
    try:
        with torch.no_grad():
            yield
    finally:
        handle.remove()


@torch.no_grad()
def allocate(parameter: nn.Parameter) -> None:
    """Give a parameter made `without_memory` its storage, uninitialized."""
    _resize(parameter, parameter.nbytes)


@torch.no_grad()
def release(parameter: nn.Parameter) -> None:
    """Take a parameter's storage, which is its own, until `allocate`."""
    _resize(parameter, 0)


PARAM_STORES = (ParamStore, SlicedParamStore, SlicedParamStore, Zero3ParamStore)


def make_param_store(shard: BucketShard, *, has_masters: bool = True) -> ParamStore:
    """The store of a bucket, by the ZeRO stage of its view. has_masters: of parameters of 16 bits."""
    return PARAM_STORES[shard.bucket.view.zero](shard, has_masters=has_masters)


def _resize(flat: Tensor, size: int) -> None:
    """Resize by an operation of torch, which a MemoryTracker sees; a storage's method is none."""
    torch.ops.inductor.resize_storage_bytes_(flat, size)


def _master(value: Tensor) -> Tensor:
    """The tensor to update for `value`: itself, or a float32 copy of 16-bit values."""
    if value.dtype in (torch.float32, torch.float64):
        return value
    return value.detach().float().requires_grad_(isinstance(value, nn.Parameter))
