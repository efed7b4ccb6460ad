"""Side streams, for copies and messages that run while a rank computes on its current stream.

A device executes the work of one stream in order, and that of two streams concurrently. A side
stream waits for the current stream (`follow`) before it reads results of it, and the current stream
waits for the side stream (`join`) before it reads results of that; either waits for all work queued
so far, or up to a mark (`mark`, `here`).

Freed memory is handed out again in the order of the stream that it was taken on, at once: the
allocator does not ask whether other streams still use it. So a tensor of the current stream that
a side stream uses is held until the current stream has joined that use. Then all memory goes back
in stream order, and how much a rank takes does not depend on how far its host runs ahead of its
device. (torch's Tensor.record_stream holds memory back instead until the host asks for more and
finds that the device has passed: with the host a step ahead nothing comes back within the step.)

On a CPU, and on the devices of a rehearsal, all work is synchronous: HOST_STREAM does nothing.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch


class StreamMark(Protocol):
    """A point in the work of a stream (torch.cuda.Event)."""

    def synchronize(self) -> None:
        """Return when the stream has passed it: the host waits, in any thread."""


class SideStream:
    """A side stream. This base class is for synchronous devices, on which nothing has to wait."""

    def follow(self, mark: StreamMark | None = None) -> None:
        """Make this stream wait for a mark; by default for the work queued on the current stream so
        far."""

    def running(self) -> AbstractContextManager[Any]:
        """A context in which kernels and allocations go to this stream."""
        return nullcontext()

    def join(self, mark: StreamMark | None = None) -> None:
        """Make the current stream wait for a mark; by default for the work queued on this stream so
        far."""

    def mark(self) -> StreamMark:
        """This point of this stream's work."""
        return PASSED

    def here(self) -> StreamMark:
        """This point of the current stream's work."""
        return PASSED


@dataclass(frozen=True)
class CudaStream(SideStream):
    """A stream of CUDA or, under the same name in torch, of ROCm."""

    stream: torch.cuda.Stream

    def follow(self, mark: Any = None) -> None:
        self.stream.wait_event(self.here() if mark is None else mark)

    def running(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self.stream)

    def join(self, mark: Any = None) -> None:
        self._current.wait_event(self.mark() if mark is None else mark)

    def mark(self) -> torch.cuda.Event:
        return _recorded(self.stream)

    def here(self) -> torch.cuda.Event:
        return _recorded(self._current)

    @property
    def _current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.stream.device)


def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(stream)
    return event


class _Passed:
    """The mark of work that is done already."""

    def synchronize(self) -> None:
        """Return at once."""


PASSED: StreamMark = _Passed()
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
