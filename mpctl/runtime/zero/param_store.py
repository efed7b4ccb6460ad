"""Parameters by bucket: what the model computes with, and what the optimizer steps of it.

ZeRO cuts a bucket's elements, laid one parameter after the other and padded, into one slice a
replica (layout/buckets.py; arXiv 1910.02054, section 5). Slices cut through parameters: AdamW
treats each element alone.

ZeRO 0 leaves parameters where they are. 1 and 2 lay a bucket's parameters into one flat tensor, of
which they are views: this rank's slice is stepped, then the slices of all replicas are gathered,
which may go on while the next forward computes (gather.py). At 3 only the slice stays, and the flat
tensor has memory just while its layer is computed: parameters are the same objects throughout,
views of a storage that grows and shrinks (as in arXiv 2304.11277, section 4.2). Values of 16 bit
have float32 masters, which are what is stepped (arXiv 1710.03740).

A rank that keeps slices of a stage never has all of it in memory: its modules are made without
memory, and each bucket gets its own, is initialized and sliced before the next.

By hand, 100 bf16 parameters over 2 replicas, slices of 64: stage 0 keeps 200 bytes and 400 of
masters, 1 and 2 keep 256 and 256, 3 keeps 128 and 256.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from mpctl.layout.buckets import Bucket
from mpctl.transport.group import Group, Pending


class ParameterSlice(NamedTuple):
    """Elements of one parameter that lie on this rank. parameter: None for padding; start: number
    of the first of them in the flattened parameter; values: the elements, flat or in the
    parameter's shape."""

    parameter: nn.Parameter | None
    start: int
    values: Tensor


@dataclass(frozen=True)
class BucketShard:
    """A bucket as one rank of its replicas has it.

    replicas: the group over which the bucket's gradients are reduced; stages: the group of the
    pipeline stages that hold copies of these parameters, None where no other does.
    """

    bucket: Bucket
    parameters: tuple[nn.Parameter, ...]
    replicas: Group
    stages: Group | None = None

    @property
    def decayed(self) -> set[nn.Parameter]:
        """The parameters that weight decay applies to (ParameterSpec.decays)."""
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
        """A tensor [bucket.part], cut by the parameters whose elements it holds."""
        stop = 0
        for number, start, offset, length in self.bucket.pieces(self.replicas.rank):
            stop = offset + length
            yield ParameterSlice(self.parameters[number], start, local[offset:stop])
        if stop < len(local):
            yield ParameterSlice(None, 0, local[stop:])


class ParamStore:
    """Parameters as they are: ZeRO 0.

    stepped: what the optimizer steps, by parameter. copies: parameters that the model computes with
    and the masters to be copied to them before `publish`. pending: parameters that are being
    gathered, not to be used before `arrive`. master_tensors and parameter_tensors: what only this
    store refers to, beside the model's own parameters.
    """

    copies: list[tuple[Tensor, Tensor]]
    pending: Pending | None = None

    def __init__(self, shard: BucketShard) -> None:
        self.shard = shard
        self.stepped = [ParameterSlice(p, 0, _master(p)) for p in shard.parameters]
        pairs = [(p, part.values) for p, part in zip(shard.parameters, self.stepped, strict=True)]
        self.copies = [(p, master) for p, master in pairs if master is not p]
        self.master_tensors = [master for _, master in self.copies]
        self.parameter_tensors: list[Tensor] = []

    def publish(self) -> None:
        """Send what was stepped to the parameters on the other replicas, which may go on until
        `arrive`; every replica calls it. ZeRO 0 sends nothing: all replicas step all."""

    def arrive(self) -> None:
        """Wait for what `publish` has started; nothing where nothing is under way."""

    def gather_full(self, local: list[Tensor]) -> list[Tensor]:
        """Tensors like those of `stepped` -> the full tensor of each parameter; every replica calls
        it."""
        return local

    def full_value(self, parameter: Tensor) -> Tensor:
        """A parameter's full value, to be written to and given to `set_value`: what is stepped
        where that is full size on this rank, else a copy in host memory, for which all replicas
        must call together."""
        return next(part.values for part in self.stepped if part.parameter is parameter)

    def set_value(self, parameter: Tensor, full: Tensor) -> None:
        """Take over a full value that was written to the tensor from `full_value`."""


class SlicedParamStore(ParamStore):
    """Views of a flat tensor, of which this rank steps a slice: ZeRO 1 and 2.

    flat: the bucket, padded. local: this rank's slice of it. master: `local` in float32.
    """

    def __init__(self, shard: BucketShard) -> None:
        self.shard = shard
        self.flat = shard.parameters[0].detach().new_zeros(shard.bucket.padded)
        for parameter, view in zip(shard.parameters, shard.views(self.flat), strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
        self.local = self._take_local()
        self.master = _master(self.local)
        self.stepped = list(shard.parameter_slices(self.master))
        self.master_tensors = [] if self.master is self.local else [self.master]
        self.parameter_tensors = [self.flat]
        self.copies = []  # `publish` copies the masters' slice, bucket by bucket

    def _take_local(self) -> Tensor:
        return self.flat[self.shard.local_range]

    def publish(self) -> None:
        """Begin to gather every replica's stepped slice into the parameters."""
        self.arrive()
        self._copy_master()
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
    """A slice, and the flat tensor while it is needed: ZeRO 3. Frozen parameters are kept in their
    own dtype."""

    def __init__(self, shard: BucketShard) -> None:
        super().__init__(shard)
        if not shard.bucket.is_trained:
            self.master = self.local
            self.stepped = list(shard.parameter_slices(self.local))
            self.master_tensors = []
        self.parameter_tensors = [self.flat, self.local]
        self.free()

    def _take_local(self) -> Tensor:
        return super()._take_local().clone()

    def publish(self) -> None:
        """Take over the stepped slice; the parameters are gathered when they are used."""
        self._copy_master()

    def arrive(self) -> None:
        """`publish` starts nothing."""

    def full_value(self, parameter: Tensor) -> Tensor:
        self.gather()
        value = super().full_value(parameter)
        self.free()
        return value

    def start(self) -> Pending:
        """Begin to gather; a second start changes nothing."""
        if self.pending is None:
            _resize(self.flat, self.flat.nbytes)
            self.pending = self.shard.replicas.start_all_gather_into(self.flat, self.local)
        return self.pending

    def gather(self) -> None:
        """Give the parameters their values, until `free`."""
        self.start().wait()

    def free(self) -> None:
        """Release the memory, after a gather under way has ended: it writes there until then."""
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


PARAM_STORES = (ParamStore, SlicedParamStore, SlicedParamStore, Zero3ParamStore)


def make_param_store(shard: BucketShard) -> ParamStore:
    """The store of a bucket, by the ZeRO stage of its view."""
    return PARAM_STORES[shard.bucket.view.zero](shard)


def _resize(flat: Tensor, size: int) -> None:
    """As an operation of torch's, which a MemoryTracker sees; a storage's own method is none."""
    torch.ops.inductor.resize_storage_bytes_(flat, size)


def _master(value: Tensor) -> Tensor:
    """What is stepped for `value`: itself, or a float32 copy of 16-bit values."""
    if value.dtype in (torch.float32, torch.float64):
        return value
    return value.detach().float().requires_grad_(isinstance(value, nn.Parameter))
