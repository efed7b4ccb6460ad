"""What a rank waits for: a collective under way, and its wait and end as lines of a log.

By hand, a collective that is waited for: its log says "started" from its start on, "waits" while
`wait` runs and "finished" after it; one that nobody waits for stays started.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from mpctl.collectives import Kind


class MessageLog(Protocol):
    """Where a rank writes how far it is in the messages of one group (rundir/collective_log.py has
    the one of a run)."""

    def start(self, kind: Kind, size: int) -> int:
        """Log that a message of `size` bytes starts; returns its number, from 1."""

    def wait(self, number: int) -> None:
        """Log that the rank waits for the result of a message."""

    def finish(self, number: int) -> None:
        """Log that a message, and so all before it, has its result."""

    def channel(self, source: int, destination: int) -> MessageLog | None:
        """The log of messages from one member to another, by their positions in the group."""


class Work(Protocol):
    """A handle on a collective under way: torch's, or that of shared memory."""

    def wait(self) -> object:
        """Return when the result is there."""


@dataclass(frozen=True, slots=True)
class LoggedWork:
    """Work whose wait and end are logged. number: of the collective in its group's log."""

    work: Work
    log: MessageLog
    number: int

    def wait(self) -> None:
        """Return when the result is there; a wait that fails stays in the log as a wait."""
        self.log.wait(self.number)
        self.work.wait()
        self.log.finish(self.number)


def logged_work(work: Work | None, log: MessageLog | None, number: int) -> Work | None:
    """The work, logged where there is a log; None where nothing is to be waited for."""
    return work if work is None or log is None else LoggedWork(work, log, number)
