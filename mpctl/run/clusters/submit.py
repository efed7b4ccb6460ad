"""Handing a launch to a scheduler.

The run directory is complete before the scheduler is asked. The record of who launched the run
(RUN/launcher.json) has the id of the job, and no process: the one that submits is no launcher, and
may live on. Signals wait while the scheduler answers, so that no job is left whose id is lost.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from mpctl.plan.planning.plan import Plan
from mpctl.records.rundir.directory import RunDir
from mpctl.records.rundir.launcher import this_launcher, write_launcher
from mpctl.run.clusters.backend import Submitter

HELD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def submit_run(submitter: Submitter, plan: Plan, run: RunDir, set_up: Callable[[], object]) -> str:
    """Submit a run; returns the id of the job. set_up: writes the run directory. Raises InputError
    where the directory cannot be written, and RunFailed or InputError where the scheduler refuses.
    """

    def submit() -> tuple[str, list[str]]:
        job_id = submitter.submit(plan, run)
        return job_id, [job_id]

    return submit_runs(submitter.name, {run: set_up}, submit)


def submit_runs(
    scheduler: str, set_up: Mapping[RunDir, Callable[[], object]], submit: Callable[[], tuple[str, list[str]]]
) -> str:
    """Write run directories by the functions in set_up, and submit them as one job; its id. submit:
    returns the id and what each run's part of the job is called."""
    with ExitStack() as locks:
        for run, write in set_up.items():
            locks.enter_context(run.locked())
            write()
        with signals_held():
            job_id, names = submit()
            for run, name in zip(set_up, names, strict=True):
                record = this_launcher(scheduler, job_id=name)
                write_launcher(run.launcher, replace(record, process_started=None))
    return job_id


@contextmanager
def signals_held() -> Iterator[None]:
    """Signals that end a command arrive after the block, in this thread and its children."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HELD)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
