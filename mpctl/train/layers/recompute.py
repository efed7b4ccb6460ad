"""Activations recomputed in backward instead of saved (arXiv 1604.06174; 2205.05198, section 5).

full: a layer saves only its input, 2bsh bytes in 16 bit, and backward repeats its forward.
selective: only the attention core is recomputed, whose scores cost 5as/h bytes per element of
[b, s, h] but few operations. Dropout is a function of (seed, step, position)
(train/kernels/counter_rng.py), so the second forward draws the masks of the first and no generator state
is saved or restored.

The second forward ends at the last tensor that backward needs. A layer with dropout needs the last
mask, and a post-norm layer its last norm's input, so these run to their end; otherwise the product
of the last row layer and its reduction are skipped, which is 1 of the 2 collectives of a layer (4
under sequence parallelism).

The input is saved as in ZeRO-R (arXiv 1910.02054, section 6.1, P_a and P_a+cpu; Megatron's
distribute-saved-activations): under tensor parallelism every rank of the group holds the same
input, so rank r may save the r-th of t equal parts of its flattened elements, and backward restores
it by one all-gather of the full message. On the host (`HostOffload`) it costs no device memory, but
two copies over the bus. Bytes saved on a device for [b, s, h] of 16 bit: 2bsh; partition 2bsh/t;
offload 0, and besides the last two inputs of a forward, whose copies are under way.

Letters: b batch, s sequence, h hidden, a heads, t ranks of the group.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import TensorWeakRef

from mpctl.core.sharding import local_range
from mpctl.model.operators.kernel_sets import COPIES_IN_FLIGHT
from mpctl.train.transport.group import Group
from mpctl.train.transport.host_memory import host_block
from mpctl.train.transport.streams import HOST_STREAM, SideStream, StreamMark

USE = "for offloaded inputs of layers; use --set training.offload_activations=false"


def recomputed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """function(*args, **kwargs), for which only the arguments are saved: backward calls it again.

    The function must compute the same at both calls, as `CounterRNG` does; no generator state is
    saved. For selective recomputation of attention: q, k and v are views of one product (rotary
    positions make new q and k), so that saving them costs next to nothing.
    """
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def checkpointed(
    function: Callable[..., Tensor],
    hidden: Tensor,
    *args: Any,
    group: Group | None = None,
    partition: bool = False,
    offload: HostOffload | None = None,
    **kwargs: Any,
) -> Tensor:
    """function(hidden, *args, **kwargs), for which only `hidden` is saved; backward calls it again.

    partition: save 1/t of hidden, which must be equal on every rank of `group`; backward gathers
    it, one all-gather of the full message. offload: saves it in host memory. Other arguments, such
    as masks and positions, are saved unchanged. Without gradients nothing is saved.
    """
    if not torch.is_grad_enabled():
        return function(hidden, *args, **kwargs)
    checkpointer = InputCheckpointer(group or Group(), partition, offload)
    shape, requires_grad = hidden.shape, hidden.requires_grad
    live = [hidden]

    def run(saved: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Runs in forward on the live input, which is then released, in backward on the saved
        one."""
        restored = live.pop() if live else checkpointer.restore(saved, shape)
        return function(restored.requires_grad_(requires_grad), *args, **kwargs)

    result: Tensor = recomputed(run, checkpointer.save(hidden), *args, **kwargs)
    return result


@dataclass
class InputCheckpointer:
    """Saves one tensor until backward.

    partition: save 1/t of it on each rank of `group`, on all of which it is equal. offload: saves
    it in host memory; None saves it on the device.
    """

    group: Group
    partition: bool = False
    offload: HostOffload | None = None
    _put: OffloadedTensor | None = field(default=None, init=False)

    def save(self, tensor: Tensor) -> Tensor:
        """The tensor for `restore`: [n] or [n/t], on the device or on the host. Raises ValueError
        if t does not divide the number of elements.
        """
        saved = tensor.detach()
        if self._splits:
            own = local_range(saved.numel(), parts=self.group.size, index=self.group.rank)
            # [b, s, h] -> [b*s*h] -> [b*s*h/t], a copy so that the full tensor can be freed
            saved = saved.reshape(-1)[own.start : own.stop].clone()
        if self.offload is not None:
            saved, self._put = self.offload.put(saved)
        return saved

    def restore(self, saved: Tensor, shape: torch.Size) -> Tensor:
        """The tensor that was saved, bit for bit, outside autograd; one all-gather if split."""
        saved = saved.detach()
        if self.offload is not None and self._put is not None:
            saved = self.offload.take(saved, self._put)
        return (self.group.all_gather(saved, 0) if self._splits else saved).view(shape)

    @property
    def _splits(self) -> bool:
        return self.partition and self.group.size > 1


@dataclass(eq=False)
class OffloadedTensor:
    """A tensor in host memory. host: a weak reference to it; before: the tensor that was put before
    it in the same pass; fetched: its copy on the device, from the start of that copy until it is
    taken; is_taken: its host memory may be another's since."""

    host: TensorWeakRef
    device: torch.device
    before: weakref.ref[OffloadedTensor] | None
    fetched: Tensor | None = None
    is_taken: bool = False


class HostOffload:
    """Copies tensors to the host and back.

    stream: the stream of the copies; is_apart: whether it copies while the rank computes. Then
    taking a tensor starts the copy of the one that was put before it; and COPIES_IN_FLIGHT tensors
    at most are held until they are copied: to put another, the current stream waits for the copy of
    the first. Its memory then goes back in the order of that stream (train/transport/streams.py). Host
    memory of what was taken is that of the next put of its shape: all its copies are in the order
    of this one stream.
    """

    def __init__(self, stream: SideStream = HOST_STREAM, *, is_apart: bool = False) -> None:
        self.stream, self.is_apart = stream, is_apart
        self._latest: weakref.ref[OffloadedTensor] | None = None
        self._leaving: deque[tuple[Tensor, StreamMark]] = deque()
        self._blocks: list[Tensor] = []  # all that were made: a copy may be under way
        self._free: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}

    @classmethod
    def of(cls, stream: SideStream, device: torch.device) -> HostOffload:
        """The offload of a device. It is apart, unless the device is the host and the stream is
        synchronous (in tests it may not be)."""
        return cls(stream, is_apart=device.type != "cpu" or stream is not HOST_STREAM)

    def begin_pass(self) -> None:
        """Begin another micro batch or chunk of the model, whose tensors are taken independently of
        those put before."""
        self._latest = None

    def put(self, tensor: Tensor) -> tuple[Tensor, OffloadedTensor]:
        """Start a copy to host memory, pinned if the tensor is on a device; returns the copy, and a
        handle for `take`. Raises RunFailed if memory cannot be pinned."""
        host = self._host_memory(tensor)
        self.stream.follow()
        with self.stream.running():
            host.copy_(tensor, non_blocking=True)
        if self.is_apart:
            self._hold(tensor)
        put = OffloadedTensor(TensorWeakRef(host), tensor.device, self._latest)
        self._latest = weakref.ref(put)
        return host, put

    def _host_memory(self, tensor: Tensor) -> Tensor:
        """Host memory like a tensor: what was taken, or new."""
        free = self._free.get((tensor.shape, tensor.dtype))
        if free:
            return free.pop()
        block = host_block(tensor.nbytes, tensor.device, USE)
        if self.is_apart:
            self._blocks.append(block)
        return block.view(tensor.dtype).view(tensor.shape)

    def _hold(self, tensor: Tensor) -> None:
        """Hold a tensor until it is copied, and let go the one before the last."""
        self._leaving.append((tensor, self.stream.mark()))
        if len(self._leaving) > COPIES_IN_FLIGHT:
            _, copied = self._leaving[0]
            self.stream.join(copied)
            self._leaving.popleft()

    def take(self, host: Tensor, put: OffloadedTensor) -> Tensor:
        """The tensor that was put, on its device. Raises RuntimeError the second time, where copies
        are apart."""
        if not self.is_apart:
            return host.to(put.device, non_blocking=True)
        if put.is_taken:
            raise RuntimeError("an offloaded input was taken before: backward can run once only")
        fetched = self._fetch(host, put.device) if put.fetched is None else put.fetched
        self.stream.join()
        self._leaving.clear()
        self._free.setdefault((host.shape, host.dtype), []).append(host.view(host.shape))
        put.fetched, put.is_taken = None, True
        if put.before is not None:
            self._fetch_ahead(put.before())
        return fetched

    def _fetch_ahead(self, put: OffloadedTensor | None) -> None:
        """Start the copy of a tensor to the device, unless its backward is over or the copy has
        started."""
        if put is None or put.is_taken or put.fetched is not None:
            return
        host = put.host()
        if host is not None:
            put.fetched = self._fetch(host, put.device)

    def _fetch(self, host: Tensor, device: torch.device) -> Tensor:
        """Start a copy to the device, into memory of the current stream, which may free it after
        `join`."""
        fetched = torch.empty(host.shape, dtype=host.dtype, device=device)
        self.stream.follow()
        with self.stream.running():
            return fetched.copy_(host, non_blocking=True)
