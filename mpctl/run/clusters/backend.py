"""Interfaces of launcher backends and schedulers, as used by `mpctl launch`, `status` and `stop`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from mpctl.core.errors import InputError, Issue

if TYPE_CHECKING:
    from mpctl.plan.planning.plan import Plan
    from mpctl.records.rundir.directory import RunDir
    from mpctl.run.launch.cluster import Cluster
    from mpctl.run.launch.launch_plan import HostCommand, LaunchPlan
from mpctl.spec.job import JobSpec
from mpctl.spec.paths import absolute

OnEvent = Callable[[str], None]
JOB_VARIABLES = {"slurm": "SLURM_JOB_ID", "kubernetes": "MPCTL_JOB"}
"""The environment variable with the id of a submitted job, by scheduler."""


def job_here(scheduler: str, environment: Mapping[str, str]) -> str | None:
    """The submitted job that a process with this environment belongs to, by its scheduler's name
    of it, `123`, or of a task of a Slurm array `123_4`; None outside of one."""
    array, task = (environment.get(f"SLURM_ARRAY_{name}_ID") for name in ("JOB", "TASK"))
    if scheduler == "slurm" and array and task:
        return f"{array}_{task}"
    return environment.get(JOB_VARIABLES.get(scheduler, ""))


class Backend(Protocol):
    """A way to run a plan on hosts while `mpctl launch` waits. name: as `--on` takes it; job_id: of
    the scheduler's job that this process runs in, None without one."""

    name: str
    job_id: str | None

    def check(self, plan: Plan) -> list[Issue]:
        """Return the issues of running the plan here, found without contacting a host."""

    def connect(self, plan: Plan, run: RunDir, on_event: OnEvent) -> AbstractContextManager[Cluster]:
        """The hosts, ready for attempts until the block ends, which leaves nothing of the launch
        there. Raises InputError with every reason why a host could not be used."""

    def commands(self, plan: LaunchPlan) -> list[HostCommand]:
        """The command of each host, in order of nodes, for `--dry-run`."""


class Submitter(Protocol):
    """A way to submit a run to a scheduler, which runs `mpctl launch` later. shown_anywhere:
    whether its document can be rendered on a machine that sees neither the run directory's file
    system nor the data."""

    name: str

    @property
    def shown_anywhere(self) -> bool: ...

    def check(self, plan: Plan, run: RunDir, *, is_elsewhere: bool) -> list[Issue]:
        """Return the issues of running the plan by the scheduler. is_elsewhere: the document is only shown, on a
        machine that need not see the files of the run."""

    def dry_run(self, plan: Plan, run: RunDir) -> list[Issue]:
        """Return the scheduler's own reasons to refuse the submission; empty if check has asked already. `--dry-run`
        does not ask it."""

    def notes(self, plan: Plan, run: RunDir) -> list[str]:
        """Warnings of what the submission drops or changes; the plan has passed `check`."""

    def document(self, plan: Plan, run: RunDir) -> str:
        """Return the text to submit: a batch script, a manifest. A pure function of its arguments."""

    def submit(self, plan: Plan, run: RunDir) -> str:
        """Submit it; returns the id of the job. Raises RunFailed with the scheduler's message."""


@dataclass(frozen=True)
class ScheduledJob:
    """A submitted job as its scheduler sees it. state: in the scheduler's words, `PENDING
    (Resources)`; is_active: it waits or runs; has_begun: its processes run, or did."""

    state: str
    is_active: bool
    has_begun: bool


class Scheduler(Protocol):
    """The submitted jobs of one scheduler, for what the run directory cannot do: whether a job
    still waits, and ending one that never began. Every method raises InputError where the
    scheduler's commands are missing, and RunFailed when it does not answer."""

    def find(self, job_id: str) -> ScheduledJob | None:
        """The job; None when the scheduler does not know it any more."""

    def cancel(self, job_id: str) -> None:
        """End the job, whether it waits or runs."""


def paths_read(job: JobSpec) -> dict[str, str]:
    """The paths outside of the run directory that the ranks open, by setting. A corpus is prepared
    into the run directory before the submission."""
    data, initial = job.data, job.training.init_from
    paths = {
        "data.path": data.path,
        "training.init_from": initial,
        "data.tokenizer": data.tokenizer if initial is not None else None,
        **{f"data.validation.{name}": path for name, path in data.validation.items()},
    }
    if job.launch.program:
        paths = {"launch.program_dir": absolute(job.launch.program_dir or ".")}
    return {setting: path for setting, path in paths.items() if path is not None}


def require_form(text: str, pattern: re.Pattern[str], what: str, where: str) -> str:
    """A name from a run directory that becomes an argument of a scheduler's command. Raises
    InputError unless it has the form of such names."""
    if not pattern.fullmatch(text):
        message = f"{text[:80]!r} is not {what}"
        raise InputError.of("bad-name", where, message, "correct it, if the run is yours")
    return text
