"""`mpctl launch --submit` of a job with `launch.slurm.array`: several runs by one submission."""

from __future__ import annotations

import os
from functools import partial
from shlex import quote
from typing import TYPE_CHECKING

from mpctl.cli.launch_run import Launch
from mpctl.cli.options import JobSource

if TYPE_CHECKING:
    from mpctl.plan.planning.plan import Plan
    from mpctl.records.rundir.directory import RunDir


def has_array(plan: Plan) -> bool:
    """Whether its submission makes several runs."""
    from mpctl.run.clusters.registry import chosen_name

    return bool(plan.job.launch.slurm.array) and chosen_name(plan.job, os.environ) == "slurm"


def submit_array(
    job: JobSource, plan: Plan, folder: RunDir, device: str | None, *, overwrite: bool, dry_run: bool, as_json: bool
) -> None:
    """Write the directory of every run of the array and submit them; dry_run only prints the
    script. plan, folder: of the job as it is without its array. Raises InputError with everything
    that is wrong with any run, and then nothing is written."""
    from mpctl.core.errors import InputError, attempt
    from mpctl.records.rundir.directory import RunDir
    from mpctl.render.output import print_warnings
    from mpctl.render.run import print_document
    from mpctl.run.clusters.slurm.array import array_issues, task_folder, task_settings
    from mpctl.run.clusters.slurm.submission import SlurmSubmitter
    from mpctl.run.clusters.submit import submit_runs

    submitter, slurm = SlurmSubmitter(plan.job, os.environ), plan.job.launch.slurm
    if issues := list(array_issues(slurm)):
        raise InputError(issues)
    launches = []
    for number, table in enumerate(slurm.array):
        own, found = RunDir(task_folder(folder.path, number)), len(issues)
        task = job.with_settings({"launch.device": device, **task_settings(table)})
        if planned := attempt(issues, task.plan):
            launch = Launch(planned, own, None, overwrite=overwrite, as_json=as_json)
            check = partial(launch.require_submittable, submitter, dry_run=dry_run)
            attempt(issues, check)
            launches.append(launch)
        issues[found:] = [issue._replace(message=f"{issue.message} (task {number})") for issue in issues[found:]]
    if issues:
        raise InputError(issues)
    tasks = [(launch.plan, launch.run) for launch in launches]
    print_warnings(submitter.notes(*tasks[0]))
    if dry_run:
        text = submitter.array_document(tasks, folder.path)
        written = [launch.submitted() for launch in launches]
        files = {f"{one.run.path.name}/{name}": text for one in written for name, text in one.files.items()}
        print_document(submitter.name, text, folder.path, files, written[0], as_json=as_json)
        return
    writers = {launch.run: launch.writer() for launch in launches}
    job_id = submit_runs(submitter.name, writers, lambda: submitter.submit_array(tasks, folder.path))
    runs = [str(run.path) for run in writers]
    _print_array(submitter.name, job_id, folder, runs, as_json=as_json)


def _print_array(scheduler: str, job_id: str, folder: RunDir, runs: list[str], *, as_json: bool) -> None:
    from mpctl.cli.via import VIA
    from mpctl.render.console import say
    from mpctl.render.output import print_json
    from mpctl.render.run import submission_document

    if as_json:
        print_json({**submission_document(scheduler, job_id, str(folder.path)), "runs": runs})
        return
    via = os.environ.get(VIA)
    there = "" if via is None else f"--via {quote(via)} "
    say(f"submitted to {scheduler} as array {job_id}; its runs are {runs[0]} to {runs[-1]}")
    say(f"  mpctl runs {there}{quote(str(folder.path))}")
    for command in ("status", "logs --follow", "stop"):
        say(f"  mpctl {command} {there}{quote(runs[0])}")
