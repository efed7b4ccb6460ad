"""`--on slurm --submit`: a run whose directory is complete is handed to sbatch.

The job runs `mpctl launch --resume --on slurm` on that directory (slurm/script.py), at first and
after every requeue.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from mpctl.clusters.slurm.commands import find_partitions, submit
from mpctl.clusters.slurm.partitions import Partition
from mpctl.clusters.slurm.script import render_script
from mpctl.clusters.slurm.submission import Submission
from mpctl.durable import write_whole
from mpctl.errors import Issue
from mpctl.planning.plan import Plan
from mpctl.rundir.directory import RunDir
from mpctl.rundir.launcher import this_launcher, write_launcher
from mpctl.spec.job import JobSpec


class SlurmSubmitter:
    """Runs as batch jobs of the Slurm that this host belongs to."""

    name = "slurm"
    shown_anywhere = False

    def __init__(self, job: JobSpec, environment: Mapping[str, str]) -> None:
        self.job = job

    @cached_property
    def partitions(self) -> Sequence[Partition]:
        """What sinfo says. Raises InputError on a host without Slurm."""
        return find_partitions()

    def check(self, plan: Plan, run: RunDir, *, is_elsewhere: bool) -> list[Issue]:
        """Why Slurm would refuse the job, or let it wait for ever."""
        return list(Submission(plan, self.partitions).issues(run.path))

    def rehearse(self, plan: Plan, run: RunDir) -> list[Issue]:
        """Nothing more: sinfo was asked by the checks."""
        return []

    def document(self, plan: Plan, run: RunDir) -> str:
        """The batch script."""
        return render_script(Submission(plan, self.partitions).batch_job(run.path))

    def submit(self, plan: Plan, run: RunDir) -> str:
        """Write RUN/slurm.sh and submit it; the id of the job."""
        (run.path / "logs").mkdir(exist_ok=True)
        write_whole(run.batch_script, self.document(plan, run))
        return submit(run.batch_script)

    def record(self, run: RunDir, job_id: str) -> None:
        """Write RUN/launcher.json for the job."""
        write_launcher(run.launcher, this_launcher(self.name, job_id=job_id))
