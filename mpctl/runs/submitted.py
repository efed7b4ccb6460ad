"""The job that a run was submitted as, asked of its scheduler; a sentence where it does not answer.

Only `mpctl status` and `mpctl stop` ask: a list of runs answers from the directories alone.
"""

from __future__ import annotations

from mpctl.clusters.registry import find_scheduler
from mpctl.clusters.scheduled import ScheduledJob, Scheduler
from mpctl.errors import MpctlError
from mpctl.runs.documents import SavedLauncher, read_launcher
from mpctl.runs.saved import SavedRun

UNKNOWN = "the scheduler does not know it any more"


def scheduled_job(run: SavedRun) -> ScheduledJob | str | None:
    """The job of a run; None for a run without one, a sentence when the scheduler cannot tell."""
    launcher, scheduler = known_launcher(run), scheduler_of(run)
    if launcher is None or launcher.job_id is None or scheduler is None:
        return None
    try:
        job = scheduler.find(launcher.job_id)
    except MpctlError as error:
        return str(error)
    return job or ScheduledJob(UNKNOWN, is_active=False, has_begun=False)


def cancel_job(run: SavedRun) -> None:
    """End the job of a run that has not begun. Raises InputError or RunFailed when its scheduler
    cannot be asked."""
    launcher, scheduler = known_launcher(run), scheduler_of(run)
    if launcher is not None and launcher.job_id is not None and scheduler is not None:
        scheduler.cancel(launcher.job_id)


def scheduler_of(run: SavedRun) -> Scheduler | None:
    """The scheduler that the run was submitted to, if any."""
    launcher = known_launcher(run)
    if launcher is None or run.job is None:
        return None
    return find_scheduler(launcher.backend, run.job)


def known_launcher(run: SavedRun) -> SavedLauncher | None:
    """Who launched the run; None when launcher.json is missing or damaged."""
    launcher = read_launcher(run.path / "launcher.json")
    return launcher if isinstance(launcher, SavedLauncher) else None
