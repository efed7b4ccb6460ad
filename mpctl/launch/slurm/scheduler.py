"""Slurm's jobs, as `mpctl status` and `mpctl stop` see them."""

from __future__ import annotations

from mpctl.launch.backends.scheduled import ScheduledJob
from mpctl.launch.slurm.commands import cancel, find_job
from mpctl.spec.job import JobSpec

WAITING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"}


class SlurmScheduler:
    """Asks squeue and scancel of this host; all jobs are of one cluster."""

    def __init__(self, job: JobSpec) -> None:
        pass

    def find(self, job_id: str) -> ScheduledJob | None:
        """The job in squeue's list; None when Slurm does not know it any more."""
        job = find_job(job_id)
        if job is None:
            return None
        return ScheduledJob(job.text, job.is_active, job.state not in WAITING)

    def cancel(self, job_id: str) -> None:
        """End the job by scancel."""
        cancel(job_id)
