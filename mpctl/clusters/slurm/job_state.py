"""The state of one job, as squeue lists it."""

from __future__ import annotations

from dataclasses import dataclass

from mpctl.errors import InputError

SQUEUE = ("squeue", "--noheader", "--states=all", "--format=%i|%T|%r|%M|%l|%S|%N|%j")
"""The command, without the job's id, whose output `read_job_state` reads: id, state, reason, time
used, time limit, start, nodes, name."""

ENDED = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
    "PREEMPTED", "REVOKED", "TIMEOUT",
}  # fmt: skip
"""States in which a job runs no more; Slurm forgets it some minutes later."""


@dataclass(frozen=True)
class JobState:
    """A job as Slurm sees it. state: PENDING, RUNNING, COMPLETED ..; reason: why it waits or how it
    ended, empty without one; elapsed, limit, start: as squeue prints them; nodes: Slurm's list of
    them, empty while it waits."""

    job_id: str
    state: str
    reason: str
    elapsed: str
    limit: str
    start: str
    nodes: str
    name: str

    @property
    def is_active(self) -> bool:
        """Whether it waits or runs."""
        return self.state not in ENDED

    @property
    def text(self) -> str:
        """`PENDING (Resources)`, `RUNNING on n[1-2] for 3:21 of 12:00:00`."""
        if self.state == "RUNNING":
            return f"RUNNING on {self.nodes} for {self.elapsed} of {self.limit}"
        return f"{self.state} ({self.reason})" if self.reason else self.state


def read_job_state(listing: str) -> JobState | None:
    """The job in the output of `SQUEUE`; None when it has forgotten the job. Raises InputError for
    output that is not of its form."""
    lines = listing.splitlines()
    if not lines:
        return None
    fields = lines[0].split("|", 7)
    if len(fields) != 8:
        message = f"cannot read {lines[0]!r} in the output of squeue"
        raise InputError.of("squeue", "squeue", message, f"run: {' '.join(SQUEUE)}")
    job_id, state, reason, elapsed, limit, start, nodes, name = fields
    reason = "" if reason == "None" else reason.strip("()")
    return JobState(job_id, state, reason, elapsed, limit, start, nodes, name)
