"""A side stream (mpctl/train/transport/streams.py) for tests that ask what is given to it, and when."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from mpctl.train.transport.streams import SideStream, StreamMark


class LoggedStream(SideStream):
    """A side stream that notes what is asked of it."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def follow(self, mark: StreamMark | None = None) -> None:
        self.log.append("follow" if mark is None else f"follow {mark}")

    @contextmanager
    def running(self) -> Iterator[None]:
        self.log.append("copy")
        yield

    def join(self, mark: StreamMark | None = None) -> None:
        self.log.append("join" if mark is None else f"join {mark}")

    def mark(self) -> StreamMark:
        return LoggedMark(self.log, len(self.log))

    def here(self) -> StreamMark:
        return LoggedMark(self.log, len(self.log))


@dataclass(frozen=True)
class LoggedMark:
    """A point in the work of a stream. number: of entries in its log before it."""

    log: list[str]
    number: int

    def synchronize(self) -> None:
        self.log.append("marked")

    def __str__(self) -> str:
        return str(self.number)
