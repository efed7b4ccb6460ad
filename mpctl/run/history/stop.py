"""Stops a run: writes a request for its launcher (records/rundir/launcher.py), then waits for the end.

No signal is sent and no process id is needed, so that this works from any host that shares the
directory, and no other process can be hit.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from typing_extensions import TypedDict  # pydantic needs it to validate them before Python 3.12

from mpctl.records.rundir.directory import RunDir
from mpctl.records.rundir.launcher import requested_signals, write_stop_request
from mpctl.run.clusters.backend import ScheduledJob
from mpctl.run.history.saved import CheckpointRow, SavedRun, Status, is_running, read_run
from mpctl.run.history.submitted import cancel_job, checked_with_scheduler, scheduled_job, write_unstarted
from mpctl.run.launch.attempt import AttemptPhase
from mpctl.run.launch.status_file import read_status

POLL_SECONDS, SCHEDULER_SECONDS = 0.2, 2.0
ENDED = ("finished", "stopped", "failed")
"""States of a run after its launcher has reported the end."""
OnWait = Callable[[str], None]


class StoppedDocument(TypedDict):
    """Output of `mpctl stop --json`. status: of the run now, `running` if it has not ended yet; checkpoint: the
    newest, None without any."""

    schema: Literal["mpctl.stopped/1"]
    name: str
    path: str
    was_running: bool
    cancelled: bool
    status: Status
    step: int
    steps: int | None
    checkpoint: CheckpointRow | None


@dataclass(frozen=True)
class Stopped:
    """A run after it was asked to stop. was_running: whether there was anything to stop; cancelled:
    the state of a job that was cancelled before it began, else empty."""

    run: SavedRun
    was_running: bool
    cancelled: str = ""

    @property
    def is_in_order(self) -> bool:
        """Whether the run came to its end, saved where it stopped, or never began."""
        return bool(self.cancelled) or self.run.status in ("finished", "stopped")

    def as_dict(self) -> StoppedDocument:
        """Return the output of `mpctl stop --json`."""
        run = self.run
        return {
            "schema": "mpctl.stopped/1",
            "name": run.name,
            "path": str(run.path),
            "was_running": self.was_running,
            "cancelled": bool(self.cancelled),
            "status": run.status,
            "step": run.step,
            "steps": run.steps,
            "checkpoint": run.checkpoints[-1] if run.checkpoints else None,
        }


def stop_run(path: Path, name: str, *, now: bool, timeout: float | None, on_wait: OnWait) -> Stopped:
    """Ask a run to stop and wait for its end.

    now: end its ranks without saving; timeout: seconds to wait, None for as long as it takes;
    on_wait: called several times a second with what the run is doing. A job that still waits for
    its scheduler is cancelled. Raises OSError when the request cannot be written, and InputError or
    RunFailed when the scheduler cannot be asked to cancel.
    """
    run = read_run(path, name)
    if run.status != "running":
        run, job = checked_with_scheduler(run)
        if not isinstance(job, ScheduledJob) or not job.is_active:
            return Stopped(run, was_running=False)
        if not job.has_begun:
            cancel_job(run)
            if run.status == "submitted":
                write_unstarted(path, "stopped")
            return Stopped(read_run(path, name), was_running=False, cancelled=job.state)
    _request(path, now=now)
    deadline = None if timeout is None else time.monotonic() + timeout
    while _goes_on(path) and (deadline is None or time.monotonic() < deadline):
        _request(path, now=now)
        on_wait(stopping_text(path))
        time.sleep(POLL_SECONDS)
    return Stopped(read_run(path, name), was_running=True)


def _request(path: Path, *, now: bool) -> None:
    """Request the stop; again if a launcher that just started took the file for an old one."""
    request = path / "stop-request"
    if requested_signals(request) < (2 if now else 1):
        write_stop_request(request, now=now)


def _goes_on(path: Path) -> bool:
    """Whether the run is running, as seen from here or by its scheduler."""
    if is_running(path):
        return True
    run = read_run(path)
    if run.status in ENDED:
        return False
    time.sleep(SCHEDULER_SECONDS)
    job = scheduled_job(run)
    return isinstance(job, ScheduledJob) and job.is_active and job.has_begun


def stopping_text(path: Path) -> str:
    """Describe the progress of a run towards a requested stop."""
    report = read_status(RunDir(path).status)
    if report is None or report.phase in (AttemptPhase.STARTING, AttemptPhase.RUNNING):
        return "waiting for the launcher"
    texts = report.state.doing().values()
    saving = [text for text in texts if text.startswith("saving")]
    if saving:
        return max(saving, key=len)
    return "finishing the step" if any(texts) else "ranks have ended"
