"""The scheduler's job of a submitted run, its state, and jobs that ended before training.

Only `mpctl status` and `mpctl stop` ask the scheduler; a list of runs reads only directories. The
launcher of a job that is refused, cancelled or lost prints to the job's log alone; it therefore
also writes a summary, from which every command reads that the run has failed, and why.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from mpctl.core.errors import InputError, MpctlError
from mpctl.records.rundir.directory import RunDir
from mpctl.records.rundir.launcher import read_launcher
from mpctl.records.rundir.summary import SCHEMA, Failure, RunStatus, UnstartedSummary, write_summary
from mpctl.run.clusters.backend import ScheduledJob, Scheduler, job_here
from mpctl.run.clusters.registry import find_scheduler
from mpctl.run.history.logs import read_tail
from mpctl.run.history.saved import SavedRun, SavedSummary, is_submitted

FORGOTTEN = ScheduledJob("the scheduler does not know it any more", is_active=False, has_begun=False)
TAIL_BYTES = 4096


def scheduled_job(run: SavedRun) -> ScheduledJob | str | None:
    """The job of a run; None for a run without one, a sentence when the scheduler cannot tell."""
    if (found := _scheduler(run)) is None:
        return None
    scheduler, job_id = found
    try:
        job = scheduler.find(job_id)
    except MpctlError as error:
        return str(error)
    return job or FORGOTTEN


def cancel_job(run: SavedRun) -> None:
    """End the job of a run that has not begun. Raises InputError or RunFailed when its scheduler
    cannot be asked."""
    if found := _scheduler(run):
        scheduler, job_id = found
        scheduler.cancel(job_id)


def _scheduler(run: SavedRun) -> tuple[Scheduler, str] | None:
    """The scheduler that the run was submitted to, and its name of the job."""
    launcher = read_launcher(run.path)
    if launcher is None or launcher.job_id is None or run.job is None:
        return None
    scheduler = find_scheduler(launcher.backend, run.job)
    return None if scheduler is None else (scheduler, launcher.job_id)


@contextmanager
def refusal_recorded(path: Path | None, environment: Mapping[str, str]) -> Iterator[None]:
    """If the launch in the block is refused, write the reason to the run directory, provided that
    this process belongs to the run's submitted job and the run has not begun."""
    try:
        yield
    except MpctlError as error:
        job = None if path is None else _job_here(path, environment)
        if path is not None and job is not None:
            with suppress(OSError):
                write_unstarted(path, "failed", _refused(path, job, error))
        raise


def write_unstarted(path: Path, status: RunStatus, failure: Failure | None = None) -> None:
    """Write that a run ended before it began. Raises OSError."""
    run = RunDir(path)
    summary: UnstartedSummary = {
        "schema": SCHEMA,
        "status": status,
        "steps": run.last_step(),
        "checkpoint": run.last_checkpoint(),
        "attempts": 0,
        "failure": None if failure is None else failure.as_dict(),
    }
    write_summary(run.summary, summary)


def checked_with_scheduler(run: SavedRun) -> tuple[SavedRun, ScheduledJob | str | None]:
    """Return the run and the scheduler's state of its job. If the job ended before the run began, the run has
    failed."""
    job = scheduled_job(run)
    return ended_with(run, job) if isinstance(job, ScheduledJob) else run, job


def ended_with(run: SavedRun, job: ScheduledJob) -> SavedRun:
    """The run, failed where its job ended before it began."""
    if run.status != "submitted" or job.is_active:
        return run
    launcher = read_launcher(run.path)
    log = RunDir(run.path).batch_log((launcher and launcher.job_id) or "")
    lines = [line.strip() for line in read_tail(log, TAIL_BYTES).lines if line.strip()]
    said = f"; its last words: {lines[-1]}" if lines else ""
    failure = Failure(
        rank=None,
        error=f"its job ended before training, {job.state}{said}",
        log=str(log) if log.exists() else "",
        last_lines=tuple(lines),
    )
    summary = SavedSummary(status="failed", attempts=0, failure=failure)
    return replace(run, status="failed", summary=summary)


def _job_here(path: Path, environment: Mapping[str, str]) -> str | None:
    """The id of the run's submitted job, if this process belongs to it and the run has not
    begun."""
    launcher = read_launcher(path)
    if launcher is None or not is_submitted(path):
        return None
    here = job_here(launcher.backend, environment)
    return here if here == launcher.job_id else None


def _refused(path: Path, job: str, error: MpctlError) -> Failure:
    issues = error.issues if isinstance(error, InputError) else [error]
    log = RunDir(path).batch_log(job)
    said = f"refused before training: {'; '.join(map(str, issues))}"
    return Failure(None, said, log=str(log) if log.exists() else "")
