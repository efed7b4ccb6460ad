"""Side streams, for copies and messages that run while a rank computes on its current stream.

A device executes the work of one stream in order, and that of two streams concurrently. A side
stream waits for the current stream (`follow`) before it reads results of it, and the current stream
waits for the side stream (`join`) before it reads results of that. Freed memory is reused in the
order of the stream on which it was allocated: if another stream uses a tensor, `keep` holds its
memory back until that stream has passed this point (torch's Tensor.record_stream).

On a CPU, and on the devices of a rehearsal, all work is synchronous: HOST_STREAM does nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class SideStream:
    """A side stream. This base class is for synchronous devices, on which nothing has to wait."""

    def follow(self) -> None:
        """Make this stream wait for the work queued on the current stream so far."""

    def running(self) -> AbstractContextManager[Any]:
        """A context in which kernels and allocations go to this stream."""
        return nullcontext()

    def join(self) -> None:
        """Make the current stream wait for the work queued on this stream so far."""

    def keep(self, tensor: Tensor) -> None:
        """Do not reuse the tensor's memory before this stream has passed this point."""

    def lend(self, tensor: Tensor) -> None:
        """The current stream uses memory that was allocated on this one: do not reuse it before the
        current stream has done the work queued until the tensor is freed."""

    def mark(self) -> Callable[[], None]:
        """A function with which the host waits, in any thread, until this stream has done the work
        queued so far."""
        return nothing_to_wait_for


@dataclass(frozen=True)
class CudaStream(SideStream):
    """A stream of CUDA or, under the same name in torch, of ROCm."""

    stream: torch.cuda.Stream

    def follow(self) -> None:
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))

    def running(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self.stream)

    def join(self) -> None:
        torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)

    def keep(self, tensor: Tensor) -> None:
        tensor.record_stream(self.stream)

    def lend(self, tensor: Tensor) -> None:
        tensor.record_stream(torch.cuda.current_stream(self.stream.device))

    def mark(self) -> Callable[[], None]:
        event = torch.cuda.Event()
        event.record(self.stream)
        return event.synchronize


def nothing_to_wait_for() -> None:
    """Return at once: the mark of work that is done already."""


HOST_STREAM = SideStream()


class MakeStream(Protocol):
    """Makes a side stream of a device, as `side_stream` does."""

    def __call__(self, device: torch.device, *, is_urgent: bool = False) -> SideStream: ...


def side_stream(device: torch.device, *, is_urgent: bool = False) -> SideStream:
    """A new stream of the device. is_urgent: its kernels start before those of other streams that
    wait for room."""
    if device.type != "cuda":
        return HOST_STREAM
    return CudaStream(torch.cuda.Stream(device, priority=-1 if is_urgent else 0))
