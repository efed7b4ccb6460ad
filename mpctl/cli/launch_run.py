"""One `mpctl launch`: check the plan and its hosts, write the run directory, run or submit it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, NoReturn

import typer

from mpctl.cli.options import JobSource, typed_command
from mpctl.cli.via import VIA

if TYPE_CHECKING:
    from pathlib import Path

    from mpctl.core.errors import Issue
    from mpctl.plan.planning.plan import Plan
    from mpctl.records.rundir.directory import RunDir
    from mpctl.records.rundir.summary import RunSummary
    from mpctl.run.clusters.backend import Backend, Submitter
    from mpctl.run.clusters.torchrun.world import JoinedWorld
    from mpctl.run.hosts.machine import Machine
    from mpctl.run.launch.cluster import Cluster
    from mpctl.run.launch.launch_plan import LaunchPlan
    from mpctl.run.launch.resume import Resumption
    from mpctl.run.launch.supervise import RunOutcome
    from mpctl.spec.launch import LaunchSpec


@dataclass(frozen=True)
class Launch:
    """A plan and the directory for its run. resumption: the checkpoint from which a run continues,
    None for a new run; overwrite: whether an existing run is replaced."""

    plan: Plan
    run: RunDir
    resumption: Resumption | None
    overwrite: bool
    as_json: bool

    def train(self) -> NoReturn:
        """Run it to its end; exits with the run's exit code."""
        from mpctl.plan.planning.plan import make_plan
        from mpctl.records.rundir.summary import write_summary
        from mpctl.render.output import print_warnings
        from mpctl.run.clusters.registry import find_backend
        from mpctl.run.launch.summary import summarise

        backend = find_backend(self.plan.job, os.environ)
        with self._locked() as warnings, self._connected(backend) as (cluster, prepared):
            print_warnings([*prepared.warnings, *warnings])
            outcome = self._run_ranks(prepared, cluster)
            ran = outcome.launch or prepared
            plan = make_plan(ran.job) if outcome.launch else self.plan
            summary = summarise(plan, ran, outcome, command=typed_command())
            try:
                write_summary(self.run.summary, summary)
            except OSError as error:
                print_warnings([f"{self.run.summary} could not be written: {error.strerror}"])
        self._report(outcome, summary)
        raise typer.Exit(outcome.exit_code)

    @contextmanager
    def _locked(self) -> Iterator[list[str]]:
        """Lock the run directory; yields the warnings of RunDir.locked. Raises InputError where
        another launch has locked it; a new run reports it as occupied."""
        from mpctl.core.errors import InputError
        from mpctl.run.launch.preflight import check_run_dir

        with ExitStack() as stack:
            try:
                warnings = stack.enter_context(self.run.locked())
            except InputError:
                resume = self.resumption is not None
                check_run_dir(self.run, overwrite=self.overwrite, resume=resume)
                raise
            yield warnings

    def print_commands(self) -> None:
        """Print which commands would run on which host, and start nothing."""
        from mpctl.render.output import print_warnings
        from mpctl.render.run import print_commands
        from mpctl.run.clusters.registry import find_backend
        from mpctl.run.hosts.machine import this_machine

        backend, machine = find_backend(self.plan.job, os.environ), this_machine()
        is_local = backend.name == "local"
        self._require(machine, backend)
        hosts = 1 if is_local else self.plan.job.cluster.nodes
        prepared = self._prepared(machine, hosts)
        print_warnings(list(prepared.warnings))
        print_commands(prepared, backend.commands(prepared), as_json=self.as_json)

    def submit(self, *, dry_run: bool) -> None:
        """Write the run directory and submit the run to the scheduler; dry_run only prints this."""
        from mpctl.core.errors import InputError
        from mpctl.render.output import print_warnings
        from mpctl.render.run import print_document, print_submission
        from mpctl.run.clusters.registry import find_submitter
        from mpctl.run.clusters.submit import submit_run

        submitter = find_submitter(self.plan.job, os.environ)
        self.require_submittable(submitter, dry_run=dry_run)
        print_warnings(submitter.notes(self.plan, self.run))
        if dry_run:
            text, launch = submitter.document(self.plan, self.run), self.submitted()
            print_document(submitter.name, text, self.run.path, launch.files, launch, as_json=self.as_json)
            return
        if refusals := submitter.dry_run(self.plan, self.run):
            raise InputError(refusals)
        job_id = submit_run(submitter, self.plan, self.run, self.writer())
        via = os.environ.get(VIA)
        print_submission(submitter.name, job_id, self.run, via=via, as_json=self.as_json)

    def require_submittable(self, submitter: Submitter, *, dry_run: bool) -> None:
        """Raises InputError with every reason why the run cannot be submitted, or with dry_run not
        be shown."""
        from mpctl.run.hosts.machine import this_machine

        is_elsewhere = dry_run and submitter.shown_anywhere
        issues = submitter.check(self.plan, self.run, is_elsewhere=is_elsewhere)
        self._require(this_machine(), None, more=issues, is_elsewhere=is_elsewhere)

    def writer(self) -> Callable[[], None]:
        """Return the writer of a submitted run's directory."""
        prepared = self.submitted()
        return lambda: self._set_up(prepared)

    def submitted(self) -> LaunchPlan:
        """Return the launch that the scheduler is to run."""
        from mpctl.run.hosts.machine import this_machine

        return self._prepared(this_machine(), self.plan.job.cluster.nodes, is_submitted=True)

    # ------------------------------------------------------------ before the ranks

    @contextmanager
    def _connected(self, backend: Backend) -> Iterator[tuple[Cluster, LaunchPlan]]:
        """The hosts, and the launch prepared for them."""
        from mpctl.cli.signals import ended_by_signals
        from mpctl.render.output import print_warnings
        from mpctl.run.clusters.connect import launcher_of
        from mpctl.run.hosts.checks import common_machine
        from mpctl.run.hosts.machine import this_machine

        if backend.name != "local":
            self._require(this_machine(), backend)

        def on_event(message: str) -> None:
            print_warnings([message])

        with ExitStack() as stack:
            if self.overwrite:  # what is in the way of a new run is not read by its hosts
                self.run.blamed.unlink(missing_ok=True)
            with ended_by_signals("no rank was started"):
                cluster = stack.enter_context(backend.connect(self.plan, self.run, on_event))
            machine = common_machine(cluster.hosts)
            self._require(machine, backend, cluster)
            prepared = self._prepared(machine, len(cluster.hosts))
            yield cluster, replace(prepared, launcher=launcher_of(backend, cluster))

    def _require(
        self,
        machine: Machine,
        backend: Backend | None,
        cluster: Cluster | None = None,
        *,
        more: Sequence[Issue] = (),
        is_elsewhere: bool = False,
    ) -> None:
        """Raises InputError with every reason not to start."""
        from mpctl.core.errors import InputError
        from mpctl.run.clusters.connect import launch_issues

        issues = launch_issues(
            self.plan,
            machine,
            backend,
            cluster,
            run=self.run,
            resumption=self.resumption,
            overwrite=self.overwrite,
            is_elsewhere=is_elsewhere,
        )
        if issues := [*issues, *more]:
            raise InputError(issues)

    def _prepared(self, machine: Machine, hosts: int, *, is_submitted: bool = False) -> LaunchPlan:
        """The launch on this many hosts like `machine`, with all its warnings."""
        from mpctl.run.launch.launch_plan import plan_launch, resolved_job
        from mpctl.run.launch.preflight import launch_warnings
        from mpctl.run.launch.resume import changed_settings, job_before

        plan, run, resumption = self.plan, self.run, self.resumption
        warnings = [str(check.issue) for check in plan.warnings]
        if not is_submitted:
            said = launch_warnings(plan.job, machine, resumption=resumption, hosts=hosts)
            warnings += said
        damaged: tuple[Path, ...] = ()
        if resumption is not None and not plan.job.launch.program:
            job = resolved_job(plan, machine, hosts=hosts)
            warnings += [*resumption.warnings(), *changed_settings(job, job_before(run), resumption)]
            damaged = tuple(path for path, _ in resumption.damaged)
        return plan_launch(
            plan, run, machine, hosts=hosts, warnings=tuple(warnings), damaged=damaged, is_submitted=is_submitted
        )

    # ------------------------------------------------------------ the ranks

    def _set_up(self, prepared: LaunchPlan) -> None:
        """Write the run directory and prepare the data, with a progress bar."""
        from mpctl.cli.signals import ended_by_signals
        from mpctl.render.data import data_warnings
        from mpctl.render.output import print_warnings
        from mpctl.render.progress import TaskBar
        from mpctl.run.launch.set_up import set_up_run

        resume = self.resumption is not None
        with ended_by_signals("no rank was started"), TaskBar(lines=True) as bar:
            data = set_up_run(prepared, overwrite=self.overwrite, resume=resume, on_progress=bar.update)
        print_warnings(data_warnings(data))

    def _run_ranks(self, prepared: LaunchPlan, cluster: Cluster) -> RunOutcome:
        """Set up the run, start the ranks, show what they report."""
        from mpctl.records.rundir.metrics import foreign_lines, foreign_text
        from mpctl.render.output import print_warnings
        from mpctl.render.run import RunView
        from mpctl.run.history.logs import WarningWatch
        from mpctl.run.launch.environment import busy_text
        from mpctl.run.launch.follow import EventLog, follow
        from mpctl.run.launch.monitoring import monitored
        from mpctl.run.launch.supervise import run_launch

        load = os.getloadavg()[0]  # before preparing data, which adds load
        self._set_up(prepared)
        run, job = prepared.run, prepared.job
        steps = None if job.launch.program else job.training.steps
        predicted = job.launch.predicted_step_seconds
        with RunView(steps, predicted, done=run.last_checkpoint()) as view, WarningWatch(run.path, view.event):
            events = EventLog(run.launcher_log, view.event)
            events.write(f"$ {typed_command()}")
            is_here = job.launch.on in ("auto", "local") and job.launch.device == "cpu"
            if is_here and (text := busy_text(load, os.cpu_count() or 1, predicted)):
                events.event(text)
            with monitored(run, job, events.event, then=view.record) as (on_record, on_change):
                follower = follow(run, job, events.event, then=on_record)
                outcome = run_launch(prepared, cluster, follower.record, events.event, on_change)
        why = f": {outcome.failure}" if outcome.failure else ""
        events.write(f"{outcome.status} after step {run.last_step()}{why}")
        if numbers := foreign_lines(run.metrics):
            print_warnings([foreign_text(run.metrics, numbers)])
        return outcome

    def _report(self, outcome: RunOutcome, summary: RunSummary) -> None:
        """Print how the run ended."""
        from mpctl.records.rundir.profile_files import PROFILE
        from mpctl.render.console import say
        from mpctl.render.output import print_json
        from mpctl.render.run import print_failure, print_summary

        run = self.run
        with suppress(OSError):  # stdout may have lost its reader; the exit code is the run's
            if outcome.failure is not None:
                print_failure(
                    outcome.failure,
                    run=str(run.path),
                    step=run.last_checkpoint(),
                    is_program=bool(self.plan.job.launch.program),
                )
            if self.as_json:
                print_json(summary)
            else:
                print_summary(summary, str(run.path))
                if self.plan.job.launch.profile and (run.path / PROFILE).is_dir():
                    say(f"profile        mpctl bench trace {quote(str(run.path))}")


def follow_if_joined(
    job: JobSource,
    run_dir: Path | None,
    on: str | None,
    *,
    resume: bool,
    is_dry: bool,
    is_trusted: bool = False,
    named_by: str = "--run-dir",
) -> None:
    """Follow the world's first process, and exit when its launch ends.

    Returns if this process is the first one, is not part of a world, or launches by another
    backend. on: the option --on. is_dry: nothing is started, so there is nothing to follow.
    is_trusted: the run directory may belong to another user or be written by others, which is
    otherwise refused, in a world or not. named_by: the option that names the run directory.
    """
    from mpctl.records.rundir.marker import require_own, require_own_job
    from mpctl.run.clusters.torchrun.world import find_world, require_world

    if run_dir is not None and not is_trusted:
        (require_own_job if resume else require_own)(run_dir)
    if on not in (None, "auto", "torchrun"):
        return
    world = require_world(os.environ) if on == "torchrun" else find_world(os.environ)
    if world is None:
        return
    launch = _settings(job, run_dir, world, resume=resume)
    if launch.on not in ("auto", "torchrun"):
        return
    _require_run_dir(run_dir, world, named_by)
    if run_dir is not None:
        _end_if_restarted(run_dir)
    if world.is_first:
        return
    if run_dir is not None and not is_dry:
        from mpctl.records.rundir.directory import RunDir
        from mpctl.run.clusters.torchrun.agent import follow_launcher

        follow_launcher(RunDir(run_dir), world, launch.start_seconds)
    raise typer.Exit


def _settings(job: JobSource, run_dir: Path | None, world: JoinedWorld, *, resume: bool) -> LaunchSpec:
    """The table [launch] of the job. Bad input is reported by the first process of each node, since
    nodes may see different files."""
    from mpctl.core.errors import InputError
    from mpctl.records.rundir.directory import RunDir
    from mpctl.spec.load import load_job

    source = job.source
    if source is None and resume and run_dir is not None:
        source = str(RunDir(run_dir).document("job.json"))
    try:
        return load_job(source, job.overrides).launch
    except InputError:
        if world.is_first or (world.local == 0 and world.node > 0):
            raise
        raise typer.Exit(2) from None


def _end_if_restarted(run_dir: Path) -> None:
    """Let a pod succeed that was restarted after its launch had ended: that launch has reported how
    it ended, and nothing is left to do."""
    from mpctl.records.rundir.directory import RunDir
    from mpctl.render.output import print_warnings
    from mpctl.run.clusters.kubernetes.jobs import ended_launch

    if ended := ended_launch(RunDir(run_dir), os.environ):
        print_warnings([ended])
        raise typer.Exit


def _require_run_dir(run_dir: Path | None, world: JoinedWorld, named_by: str) -> None:
    """Processes find each other in the run directory, so all of them must know it."""
    from mpctl.core.errors import InputError

    if run_dir is not None:
        return
    if not world.is_first:
        raise typer.Exit(2)
    raise InputError.of(
        "no-run-dir",
        named_by,
        f"the {world.size} processes that {world.starter} started find each other in the run "
        "directory, and none is named",
        f"add {named_by} with a folder that all hosts share, the same for every process",
    )


def dismiss_followers(plan: Plan, run: RunDir) -> None:
    """Tell the other processes of a joined world that there is nothing to do; they wait for it."""
    from mpctl.render.output import print_warnings
    from mpctl.run.clusters.registry import chosen_name, find_backend

    if chosen_name(plan.job, os.environ) != "torchrun":
        return
    with find_backend(plan.job, os.environ).connect(plan, run, lambda message: print_warnings([message])):
        pass  # they notice that the connection is closed
