"""A side stream (mpctl/transport/streams.py) for tests that ask what is given to it, and when."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from mpctl.transport.streams import SideStream


class LoggedStream(SideStream):
    """A side stream that notes what is asked of it."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def follow(self) -> None:
        self.log.append("follow")

    @contextmanager
    def running(self) -> Iterator[None]:
        self.log.append("copy")
        yield

    def join(self) -> None:
        self.log.append("join")

    def keep(self, tensor: Tensor) -> None:
        self.log.append("keep")

    def lend(self, tensor: Tensor) -> None:
        self.log.append("lend")

    def mark(self) -> Callable[[], None]:
        return lambda: self.log.append("marked")
