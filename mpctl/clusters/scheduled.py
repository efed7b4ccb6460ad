"""What a scheduler says of a job that a run was submitted as, and how the job is taken back.

`mpctl status` and `mpctl stop` use it for what the run directory cannot tell: whether the job still
waits, and ending one that never began. A run that trains is stopped through its directory alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

from mpctl.errors import InputError

JOB_VARIABLES = {"slurm": "SLURM_JOB_ID", "kubernetes": "MPCTL_JOB"}
"""The environment variable by which a process of a job knows its id, by backend."""


def require_form(text: str, pattern: re.Pattern[str], what: str, where: str) -> str:
    """A name that a run directory gives a scheduler, once it has the form of such names: it becomes
    an argument of a command. Raises InputError otherwise."""
    if not pattern.fullmatch(text):
        message = f"{text[:80]!r} is not {what}"
        raise InputError.of("bad-name", where, message, "correct it, if the run is yours")
    return text


@dataclass(frozen=True)
class ScheduledJob:
    """A job as its scheduler sees it. state: in the scheduler's words, `PENDING (Resources)`;
    is_active: it waits or runs; has_begun: its processes run, or did."""

    state: str
    is_active: bool
    has_begun: bool


class Scheduler(Protocol):
    """The jobs of one scheduler. Every method raises InputError where its commands are missing,
    and RunFailed when it does not answer."""

    def find(self, job_id: str) -> ScheduledJob | None:
        """The job; None when the scheduler does not know it any more."""

    def cancel(self, job_id: str) -> None:
        """End the job, whether it waits or runs."""
