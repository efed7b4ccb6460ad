"""Streams beside the one that a rank computes on: for copies and messages that may go on meanwhile.

A device executes what is given to one stream in order, and two streams side by side. So that a side
stream does not read what is not yet computed, it waits for the current stream (`follow`); so that
what it wrote is not read too early, the current stream waits for it (`join`). Memory that a tensor
gives back is handed out again in the order of the stream that it was made on: a tensor that another
stream uses is held back by `keep` until that stream has passed this point (torch's
Tensor.record_stream).

On a CPU, and on the devices of a rehearsal, everything is done at once and in order: HOST_STREAM
changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class SideStream:
    """A stream beside the current one; this one is that of a device which does everything in order,
    where nothing has to wait."""

    def follow(self) -> None:
        """What is given to this stream from now on waits for what the current one has so far."""

    def running(self) -> AbstractContextManager[Any]:
        """What is computed inside goes to this stream, as does memory that is taken."""
        return nullcontext()

    def join(self) -> None:
        """What is given to the current stream from now on waits for what this one has so far."""

    def keep(self, tensor: Tensor) -> None:
        """Do not hand out the tensor's memory again before this stream has passed this point."""

    def lend(self, tensor: Tensor) -> None:
        """The current stream uses memory that was taken on this one: do not hand it out again
        before the current one has passed what it is given until the tensor is freed."""

    def mark(self) -> Callable[[], None]:
        """A function that returns once this stream has done what it has so far: the host waits for
        it, in any thread."""
        return nothing_to_wait_for


@dataclass(frozen=True)
class CudaStream(SideStream):
    """A stream of CUDA, or of ROCm, which torch calls the same."""

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
    """Return at once: the mark of what is done already."""


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
