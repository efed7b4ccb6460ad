"""Parameters by bucket: what the model computes with, and what the optimizer steps of it.

ZeRO 0 leaves parameters where they are. 1 and 2 lay a bucket's into one flat tensor, of which they
are views: this rank's slice is stepped, then the slices of all are gathered. At 3 only the slice
stays, and the flat tensor has memory just while its layer is computed: parameters are the same
objects throughout, views of a storage that grows and shrinks (as in arXiv 2304.11277, section 4.2).
Values of 16 bit have float32 masters, which are what is stepped (arXiv 1710.03740).

A stage is never whole on a rank that keeps slices of it: its modules are made without memory, and
each bucket gets its own, is drawn and cut before the next.

By hand, 5 bf16 parameters over 2 replicas: 0 keeps 10 bytes and 20 of masters, 1 and 2 keep 12 and
12, 3 keeps 6 and 12.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from mpctl.runtime.zero.gradients import BucketShard
from mpctl.transport.group import Pending


class ParamStore:
    """Parameters as they are: ZeRO 0. stepped: what the optimizer steps, with the parameter and
    its first element there; held: tensors that only this store has."""

    def __init__(self, block: BucketShard) -> None:
        self.block = block
        self.stepped: list[tuple[nn.Parameter | None, int, Tensor]] = [
            (p, 0, _master(p)) for p in block.parameters
        ]
        held = [v for (p, _, v) in self.stepped if v is not p]
        self.held: dict[str, list[Tensor]] = {"optimizer": held, "parameters": []}

    def publish(self) -> Pending | None:
        """Masters -> the parameters that the model computes with."""
        for parameter, _, value in self.stepped:
            if parameter is not None and parameter is not value:
                parameter.copy_(value)
        return None

    def wholes(self, part: list[Tensor]) -> list[Tensor]:
        """Of pieces like those of `stepped`, each parameter's; every replica calls it."""
        return part


class SlicedParamStore(ParamStore):
    """Views of a flat tensor, of which this rank steps a slice: ZeRO 1 and 2."""

    def __init__(self, block: BucketShard) -> None:
        self.block = block
        first = block.parameters[0].detach()
        self.flat = first.new_zeros(block.bucket.padded(block.replicas.size))
        for parameter, view in zip(block.parameters, block.views(self.flat), strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
        self.shard = self._take_shard()
        self.master = _master(self.shard)
        self.stepped = list(block.own_pieces(self.master))
        own = [] if self.master is self.shard else [self.master]
        self.held = {"optimizer": own, "parameters": [self.flat]}

    def _take_shard(self) -> Tensor:
        return self.flat[self.block.own]

    def publish(self) -> Pending | None:
        self._round()
        return self.block.replicas.start_all_gather_into(self.flat, self.shard)

    def _round(self) -> None:
        if self.master is not self.shard:
            self.shard.copy_(self.master)

    def wholes(self, part: list[Tensor]) -> list[Tensor]:
        return self.block.views(self.block.replicas.all_gather(torch.cat(part), 0))

    def whole(self, parameter: Tensor) -> Tensor:
        """A copy of what the model computes with, in the dtype that is stepped, in host memory."""
        return parameter.detach().to("cpu", self.master.dtype, copy=True)

    def keep(self, parameter: Tensor, value: Tensor) -> None:
        """Take this rank's elements of a whole value."""
        for held, start, piece in self.stepped:
            if held is parameter:
                piece.copy_(value.reshape(-1)[start : start + len(piece)])
        self._round()


class Zero3ParamStore(SlicedParamStore):
    """A slice, and the flat tensor while it is needed: ZeRO 3. Frozen parameters are kept in their
    own dtype."""

    def __init__(self, block: BucketShard) -> None:
        self.pending: Pending | None = None
        super().__init__(block)
        if not block.bucket.is_trained:
            self.master = self.shard
            self.stepped = list(block.own_pieces(self.shard))
            self.held["optimizer"] = []
        self.held["parameters"] = [self.flat, self.shard]
        self.free()

    def _take_shard(self) -> Tensor:
        return super()._take_shard().clone()

    def publish(self) -> Pending | None:
        self._round()
        return None

    def whole(self, parameter: Tensor) -> Tensor:
        self.gather()
        found = super().whole(parameter)
        self.free()
        return found

    def start(self) -> None:
        """Begin to gather; a second start changes nothing."""
        if self.pending is None:
            _resize(self.flat, self.flat.nbytes)
            self.pending = self.block.replicas.start_all_gather_into(self.flat, self.shard)

    def gather(self) -> None:
        """Until `free`, the parameters have their values."""
        self.start()
        assert self.pending is not None
        self.pending.wait()

    def free(self) -> None:
        """Give the memory back, after a gather under way has ended: it writes there until then."""
        if self.pending is not None:
            self.pending.wait()
        self.pending = None
        if self.flat.untyped_storage().nbytes():
            _resize(self.flat, 0)


@contextmanager
def without_memory() -> Iterator[None]:
    """Parameters of the modules made meanwhile have no memory until `allocate`."""

    def strip(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            _resize(parameter, 0)

    handle = register_module_parameter_registration_hook(strip)
    try:
        with torch.no_grad():
            yield
    finally:
        handle.remove()


@torch.no_grad()
def allocate(parameter: nn.Parameter) -> None:
    """To a bare one; what is in it is anything."""
    _resize(parameter, parameter.nbytes)


def make_param_store(block: BucketShard, zero: int) -> ParamStore:
    """The store of a ZeRO stage."""
    return (ParamStore, SlicedParamStore, SlicedParamStore, Zero3ParamStore)[zero](block)


def _resize(flat: Tensor, size: int) -> None:
    """As an operation of torch's, which a ledger sees; a storage's own method is none."""
    torch.ops.inductor.resize_storage_bytes_(flat, size)


def _master(value: Tensor) -> Tensor:
    if value.dtype in (torch.float32, torch.float64):
        return value
    return value.detach().float().requires_grad_(isinstance(value, nn.Parameter))
