"""Targets of trials: this host, hosts that it reaches, or jobs of a scheduler.

The target is checked before the first trial as `mpctl launch` checks it. Text is prepared once, in
the folder of the tuning, for all trials.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from mpctl.core.errors import InputError
from mpctl.measure.tune.state import DATA, TuneFolder
from mpctl.measure.tune.submitted import is_submitted, require_scheduler
from mpctl.measure.tune.trial import trial_plan
from mpctl.plan.rules.launched import why_not_launched
from mpctl.records.rundir.directory import RunDir
from mpctl.run.clusters.connect import bench_issues
from mpctl.run.clusters.torchrun.world import find_world
from mpctl.run.hosts.machine import Machine
from mpctl.run.launch.launch_plan import plan_launch
from mpctl.run.launch.set_up import Progress, prepare_data
from mpctl.spec.job import JobSpec
from mpctl.spec.runtime import is_launched


def require_launched(job: JobSpec) -> None:
    """Raises InputError for a job that `mpctl launch` does not train, and in a world that another
    program started: it has one size and one start, and trials need many."""
    if not is_launched(job.training.runtime):
        raise InputError.of(
            "tune-runtime",
            "training.runtime",
            f"mpctl launches its own runtime, and the job is planned for {job.training.runtime}",
            "use --emit with the launcher that runs it, or --runtime mpctl",
        )
    if reasons := why_not_launched(job):
        raise InputError(reason.issue for reason in reasons)
    if job.launch.on in ("auto", "torchrun") and find_world(os.environ):
        message = "a world that is started already runs one layout, and a tuning starts many"
        hint = "use --on slurm in the allocation, or --on ssh with a hostfile"
        raise InputError.of("tune-in-world", "--on", message, hint)


def require_target(job: JobSpec, folder: TuneFolder, machine: Machine) -> None:
    """Raises InputError where the target refuses a job in a layout that can run."""
    if is_submitted(job):
        require_scheduler(job, folder.run(1))
    elif issues := bench_issues(trial_plan(job, job.training.steps), machine):
        raise InputError(issues)


def prepared_data(job: JobSpec, folder: TuneFolder, machine: Machine, on_progress: Progress) -> str | None:
    """The folder of the data that trials read, prepared from the job's corpus where it is not yet;
    None where the job names prepared data. Raises InputError where the text cannot be prepared."""
    if job.data.path is not None:
        return None
    data: Path = (folder.path / DATA).resolve()
    launch = plan_launch(trial_plan(job, job.training.steps), RunDir(data), machine)
    prepare_data(replace(launch, job=launch.job), on_progress, data)
    return str(data)
