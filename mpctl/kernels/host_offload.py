"""Tensors that lie in host memory from forward to backward, copied beside the computation.

Both copies go on a stream of their own: the copy out while forward computes on, and the copy back
ahead of time. Backward takes the tensors of a pass in reverse order, so that taking one starts the
copy of the one put before it, which travels while backward computes. That costs the memory of one
more tensor on the device (estimate/activations.py). On the stream of the computation itself
(ZeRO-Offload's simplest form) both copies would be waited for: a fifth of a step of GPT 1.5B.

On a CPU there is nothing to travel to: what is put is a copy, and taking it gives the same memory.

By hand, 3 layers: forward puts x1, x2, x3. Backward takes x3, whose copy it waits for, and starts
that of x2; while layer 3 is computed, x2 arrives; it takes x2 and starts x1.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from mpctl.transport.streams import HOST_STREAM, SideStream


@dataclass(eq=False)
class OffloadedTensor:
    """A tensor in host memory. host: where, kept alive by its owner alone; before: what was put
    before it in the same pass; fetched: its copy on the device, from the start of that copy until
    it is taken."""

    host: TensorWeakRef
    device: torch.device
    before: weakref.ref[OffloadedTensor] | None
    fetched: Tensor | None = None


class HostOffload:
    """Copies tensors to the host and back.

    stream: on which; fetches_ahead: whether taking a tensor starts the copy of the one before it.
    """

    def __init__(self, stream: SideStream = HOST_STREAM, *, fetches_ahead: bool = False) -> None:
        self.stream, self.fetches_ahead = stream, fetches_ahead
        self._latest: weakref.ref[OffloadedTensor] | None = None

    @classmethod
    def of(cls, stream: SideStream, device: torch.device) -> HostOffload:
        """The offload of a device; ahead of time unless the device is the host itself, and then
        only on a stream that is not simply the host's order (a test's)."""
        is_apart = device.type != "cpu" or stream is not HOST_STREAM
        return cls(stream, fetches_ahead=is_apart)

    def begin_pass(self) -> None:
        """What is put from now on is taken without what was put before: another micro batch, or
        another chunk of the model, begins."""
        self._latest = None

    def put(self, tensor: Tensor) -> tuple[Tensor, OffloadedTensor]:
        """A copy of a tensor in host memory, pinned where it comes from a device, under way; and
        what `take` needs besides."""
        is_pinned = tensor.device.type != "cpu"
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=is_pinned)
        self.stream.follow()
        with self.stream.running():
            host.copy_(tensor, non_blocking=True)
        self.stream.keep(tensor)
        put = OffloadedTensor(TensorWeakRef(host), tensor.device, self._latest)
        self._latest = weakref.ref(put)
        return host, put

    def take(self, host: Tensor, put: OffloadedTensor) -> Tensor:
        """The tensor that was put, on its device."""
        if not self.fetches_ahead:
            return host.to(put.device, non_blocking=True)
        fetched = self._fetch(host, put.device) if put.fetched is None else put.fetched
        self.stream.join()
        put.fetched = None
        if put.before is not None:
            self._fetch_ahead(put.before())
        return fetched

    def _fetch_ahead(self, put: OffloadedTensor | None) -> None:
        """Start the copy of what was put; nothing where its backward is over, or it is under
        way."""
        host = None if put is None else put.host()
        if put is not None and host is not None and put.fetched is None:
            put.fetched = self._fetch(host, put.device)

    def _fetch(self, host: Tensor, device: torch.device) -> Tensor:
        """Start a copy to the device, into memory of the computation's stream, which may free it
        again after `join`."""
        fetched = torch.empty(host.shape, dtype=host.dtype, device=device)
        self.stream.follow()
        with self.stream.running():
            return fetched.copy_(host, non_blocking=True)
