"""What a rank waits for: a collective under way, and its wait and end as lines of a log.

By hand, a collective that is waited for: its log says "started" from its start on, "waits" while
`wait` runs and "finished" after it; one that nobody waits for stays started.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from mpctl.rundir.collective_log import GroupLog


class Work(Protocol):
    """A handle on a collective under way: torch's, or that of shared memory."""

    def wait(self) -> object:
        """Return when the result is there."""


@dataclass(frozen=True, slots=True)
class LoggedWork:
    """Work whose wait and end are logged. number: of the collective in its group's log."""

    work: Work
    log: GroupLog
    number: int

    def wait(self) -> None:
        """Return when the result is there; a wait that fails stays in the log as a wait."""
        self.log.wait(self.number)
        self.work.wait()
        self.log.finish(self.number)


def logged_work(work: Work | None, log: GroupLog | None, number: int) -> Work | None:
    """The work, logged where there is a log; None where nothing is to be waited for."""
    return work if work is None or log is None else LoggedWork(work, log, number)
