"""What a launcher backend offers to `mpctl launch`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from mpctl.errors import Issue
from mpctl.launch.cluster import Cluster
from mpctl.launch.launch_plan import HostCommand, LaunchPlan
from mpctl.planning.plan import Plan
from mpctl.rundir.directory import RunDir

OnEvent = Callable[[str], None]


class Backend(Protocol):
    """A way to run a plan on hosts while `mpctl launch` waits. name: as `--on` takes it; job_id: of
    the scheduler's job that it runs in, None without one."""

    name: str
    job_id: str | None

    def check(self, plan: Plan) -> list[Issue]:
        """Why the plan cannot run here, found without contacting a host; empty when it may."""

    def connect(
        self, plan: Plan, run: RunDir, on_event: OnEvent
    ) -> AbstractContextManager[Cluster]:
        """The hosts, ready for attempts until the block ends; then nothing of the launch is left
        there. Raises InputError with every reason why a host could not be used."""

    def commands(self, plan: LaunchPlan) -> list[HostCommand]:
        """What is run on each host, in order of nodes, for `--dry-run`."""


class Submitter(Protocol):
    """A way to hand a run over to a scheduler, which runs `mpctl launch` later. shown_anywhere:
    whether its document can be rendered on a machine that sees neither the run directory's file
    system nor the data."""

    name: str
    shown_anywhere: bool

    def check(self, plan: Plan, run: RunDir, *, is_elsewhere: bool) -> list[Issue]:
        """Why the scheduler could not run the plan; empty when it can. is_elsewhere: the document
        is only shown, on a machine that need not see the files of the run."""

    def rehearse(self, plan: Plan, run: RunDir) -> list[Issue]:
        """Why the scheduler would refuse the submission, as it says itself; `--dry-run` does not
        ask it. Empty where check has asked already."""

    def document(self, plan: Plan, run: RunDir) -> str:
        """What is submitted: a batch script, a manifest. A pure function of its arguments."""

    def submit(self, plan: Plan, run: RunDir) -> str:
        """Submit it; the id of the job. Raises RunFailed with the scheduler's own words."""

    def record(self, run: RunDir, job_id: str) -> None:
        """Write RUN/launcher.json for a job that has not begun yet."""
