"""Slurm's jobs, as `mpctl status` and `mpctl stop` see them."""

from __future__ import annotations

import re

from mpctl.clusters.scheduled import ScheduledJob, require_form
from mpctl.clusters.slurm.commands import cancel, find_job
from mpctl.spec.job import JobSpec

JOB_ID = re.compile(r"[0-9]{1,18}")
WAITING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"}


class SlurmScheduler:
    """Asks squeue and scancel of this host; all jobs are of one cluster."""

    def __init__(self, job: JobSpec) -> None:
        pass

    def find(self, job_id: str) -> ScheduledJob | None:
        """The job in squeue's list; None when Slurm does not know it any more."""
        job = find_job(_require(job_id))
        if job is None:
            return None
        return ScheduledJob(job.text, job.is_active, job.state not in WAITING)

    def cancel(self, job_id: str) -> None:
        """End the job by scancel."""
        cancel(_require(job_id))


def _require(job_id: str) -> str:
    return require_form(job_id, JOB_ID, "the number of a Slurm job", "launcher.json: job_id")
