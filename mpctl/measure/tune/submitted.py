"""Trials as jobs of a scheduler: one job a trial, submitted, waited for, and read back.

`mpctl tune` runs where jobs are submitted from. A trial is the run that `mpctl launch --submit`
submits, in DIR/trials/NNN, which submitter and ranks share; its steps and its summary are read
from there, as `mpctl status` and `mpctl logs` read them. The scheduler is asked for what the
directory cannot say: whether the job still waits, and how it ended where its launcher could not
write that.

A trial runs from the moment when its launcher began (RUN/launcher.json has it) to its end; what it
waited in the queue before is no part of the budget. A job asks for launch.slurm.time; without it
for the time that its trial may take and SPARE_SECONDS, or for as much as its partition allows. It
is never requeued.

How a job ends is an answer. Out of memory, a crash, too few steps in its time: of the layout. A
job that somebody cancelled, that was preempted or whose node was lost says nothing of it, unless it
made enough steps. A scheduler that takes no job refuses the tuning, not the layout.

By hand, submitted at 0:00, begun at 0:40 by launcher.json, 12 steps, summary at 0:55: 40 min in
the queue, 15 min of the budget.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf

from mpctl.core.durable import write_whole
from mpctl.core.errors import InputError, Issue, MpctlError
from mpctl.core.units import seconds_text
from mpctl.measure.tune.state import TrialStatus, TuneFolder, cannot_write, step_times
from mpctl.measure.tune.trial import (
    OUT_OF_MEMORY,
    TargetRefused,
    TrialOrder,
    TrialResult,
    TrialWatch,
    is_hopeless,
    is_measured,
    result_of,
    trial_plan,
)
from mpctl.plan.planning.plan import Plan, make_plan
from mpctl.plan.search.request import SearchRequest
from mpctl.records.rundir.directory import RunDir
from mpctl.records.rundir.launcher import read_launcher, write_stop_request
from mpctl.records.rundir.rank_files import StepRecord
from mpctl.run.clusters.backend import ScheduledJob, Scheduler, Submitter
from mpctl.run.clusters.connect import launch_issues
from mpctl.run.clusters.registry import SUBMITTERS, chosen_name, find_scheduler, find_submitter
from mpctl.run.clusters.slurm.allocation import find_allocation
from mpctl.run.clusters.slurm.commands import setup_issues, submit
from mpctl.run.clusters.slurm.partitions import chosen_partition, find_partitions, request_issues, time_limit_text
from mpctl.run.clusters.slurm.script import render_script, script_issues, script_options
from mpctl.run.clusters.slurm.submission import SlurmSubmitter, Submission
from mpctl.run.clusters.slurm.variables import with_shell
from mpctl.run.clusters.submit import signals_held, submit_run
from mpctl.run.history.saved import SavedSummary, read_run, read_summary
from mpctl.run.history.submitted import FORGOTTEN, ended_with
from mpctl.run.hosts.machine import this_machine
from mpctl.run.launch.follow import RecordReader
from mpctl.run.launch.launch_plan import plan_launch
from mpctl.run.launch.set_up import set_up_run
from mpctl.run.launch.supervise import RunOutcome
from mpctl.spec.job import JobSpec

POLL_SECONDS, ASK_SECONDS = 1.0, 10.0  # reading the run directory; asking the scheduler
SETTLE_SECONDS = 30.0  # from a job's end until its last files must be visible here
END_SECONDS = 60.0  # from a request to stop until the job is cancelled
SPARE_SECONDS = 300.0
NOT_OF_LAYOUT = re.compile(rf"cancel|preempt|node_fail|boot_fail|revoked|evicted|{FORGOTTEN.state}", re.IGNORECASE)
OUT_OF_TIME = re.compile(r"timeout|deadline", re.IGNORECASE)


def is_submitted(job: JobSpec) -> bool:
    """Whether trials of a job are submitted: to Kubernetes, and to Slurm outside of an
    allocation."""
    name = chosen_name(job, os.environ)
    return name in SUBMITTERS and not (name == "slurm" and find_allocation(os.environ))


def require_scheduler(job: JobSpec, run: RunDir) -> None:
    """Raises InputError where the scheduler would refuse the job. run: a trial's directory."""
    submitter = find_submitter(job, os.environ)
    _require(submitter, trial_plan(_with_time_limit(job, 0.0, submitter), job.training.steps), run)


def submit_tuning(request: SearchRequest, folder: TuneFolder, seconds: float, command: Sequence[str]) -> str:
    """Submit a whole tuning as one batch job of Slurm, in whose allocation its trials run; returns
    its id. folder: claimed for it; seconds: its budget; command: the tuning's. Raises InputError
    where Slurm could not run it, or takes no job."""
    job = request.job
    launch = _with_time_limit(job, seconds).launch.model_copy(update={"check_memory": False})
    try:
        partitions = find_partitions()
    except MpctlError as error:
        raise _refused(error) from None
    plan = make_plan(job.model_copy(update={"launch": launch}))  # nodes, GPUs, cores and limits
    submission = Submission(plan, partitions, os.environ)
    batch = submission.batch_job(folder.path)
    batch = replace(batch, name=folder.path.name, command=command)
    issues = [
        *request_issues(partitions, submission.request),
        *script_issues(batch),
        *setup_issues(job.launch.slurm.setup),
    ]
    if issues:
        raise InputError(_named_here(issue, in_budget=not job.launch.slurm.time) for issue in issues)
    folder.claim(job, request.fixed)
    script = RunDir(folder.path).batch_script
    try:
        (folder.path / "logs").mkdir(exist_ok=True)
        write_whole(script, render_script(batch))
    except OSError as error:
        raise cannot_write(folder.path, error) from None
    with signals_held():
        try:
            return submit(script, list(script_options(batch)), os.environ)
        except MpctlError as error:
            raise _refused(error) from None


def submitted_trial(order: TrialOrder, watch: TrialWatch) -> TrialResult:
    """Submit a trial and wait for its end. Raises TargetRefused where the scheduler takes no job,
    InputError where it could not run this one."""
    submitter, run = find_submitter(order.job, os.environ), order.run
    plan = trial_plan(_with_time_limit(order.job, order.seconds, submitter), order.steps)
    _require(submitter, plan, run, overwrite=True)
    hosts = plan.job.cluster.nodes
    launch = plan_launch(plan, run, this_machine(), hosts=hosts, is_submitted=True)

    def set_up() -> None:
        set_up_run(launch, overwrite=True, resume=False, on_progress=watch.on_progress)

    def submit_it() -> str:
        try:
            return submit_run(submitter, plan, run, set_up)
        except MpctlError as error:
            raise _refused(error) from None

    return JobWait(order, watch, _scheduler(order.job), submit=submit_it).result()


def wait_for_job(order: TrialOrder, watch: TrialWatch) -> TrialResult:
    """Wait for the end of a trial that was submitted as order.job_id."""
    return JobWait(order, watch, _scheduler(order.job), order.job_id or "").result()


def _scheduler(job: JobSpec) -> Scheduler:
    scheduler = find_scheduler(chosen_name(job, os.environ), job)
    assert scheduler is not None, "it takes jobs"
    return scheduler


def _with_time_limit(job: JobSpec, seconds: float, submitter: Submitter | None = None) -> JobSpec:
    """The job with a time limit for so many seconds, where it sets none, and never requeued;
    submitter: the one whose partition limits it further. Raises TargetRefused where Slurm does not
    answer."""
    slurm, wanted = job.launch.slurm, seconds + SPARE_SECONDS
    if isinstance(submitter, SlurmSubmitter):
        try:
            named = with_shell(slurm, os.environ).partition
            partition = chosen_partition(submitter.partitions, named)
        except MpctlError as error:
            raise _refused(error) from None
        wanted = min(wanted, partition.time_limit if partition else inf)
    changed = slurm.model_copy(update={"requeue": False, "time": slurm.time or time_limit_text(ceil(wanted))})
    return job.model_copy(update={"launch": job.launch.model_copy(update={"slurm": changed})})


def _require(submitter: Submitter, plan: Plan, run: RunDir, *, overwrite: bool = False) -> None:
    """Raises InputError with every reason why the scheduler could not run the plan; TargetRefused
    where it cannot be asked, or would take no job."""
    machine = this_machine()
    known = run if overwrite else None
    issues = launch_issues(plan, machine, None, run=known, overwrite=overwrite)
    try:
        issues += submitter.check(plan, run, is_elsewhere=False)
        refusals = [] if issues else submitter.dry_run(plan, run)
    except MpctlError as error:
        raise _refused(error) from None
    if issues:
        raise InputError(map(_named_here, issues))
    if refusals:
        raise TargetRefused(refusals)


def _named_here(issue: Issue, *, in_budget: bool = False) -> Issue:
    """An issue by the option of `mpctl tune` that it comes from. in_budget: the time limit is the
    budget and SPARE_SECONDS."""
    if in_budget and issue.rule == "slurm-time":
        hint = f"{issue.hint}, {seconds_text(SPARE_SECONDS)} more than --budget; or leave out "
        return issue._replace(where="--budget", hint=f"{hint}--submit: each trial is a job then")
    return issue._replace(where="--out") if issue.where == "--run-dir" else issue


def _refused(error: MpctlError) -> TargetRefused:
    if isinstance(error, InputError):
        return TargetRefused(error.issues)
    hint = "mend what it names, then type the same command again"
    return TargetRefused([Issue("tune-refused", "--on", str(error), hint)])


@dataclass
class JobWait:
    """The wait for one job. job_id: empty for one that `submit` submits first; begun: when its
    launcher began, seconds since 1970, None before; over: when the scheduler first said that it
    runs no more; ending: when it was asked to end; job: as the scheduler last saw it."""

    order: TrialOrder
    watch: TrialWatch
    scheduler: Scheduler
    job_id: str = ""
    submit: Callable[[], str] | None = None
    clock: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep
    begun: float | None = None
    over: float | None = None
    ending: float | None = None
    job: ScheduledJob = FORGOTTEN
    seconds: list[float] = field(default_factory=list)
    is_silent: bool = False
    is_cancelled: bool = False
    next_ask: float = float("-inf")

    def __post_init__(self) -> None:
        self.reader = RecordReader(self.order.run.metrics)
        self.reader.offset = 0

    def result(self) -> TrialResult:
        """The result, once it is there. Ctrl-C and SIGTERM cancel the job; a hangup leaves it."""
        try:
            if self.submit is not None:
                self.job_id = self.submit()
                self.watch.on_submit(self.job_id)
            while (found := self.poll()) is None:
                self.sleep(POLL_SECONDS)
        except (KeyboardInterrupt, SystemExit) as error:
            launcher = read_launcher(self.order.run.path)
            self.job_id = self.job_id or (launcher.job_id if launcher else None) or ""
            is_hangup = isinstance(error, SystemExit) and error.code == 128 + signal.SIGHUP
            if is_hangup or not self.job_id:
                raise
            self._cancel()
            seconds = step_times(self.order.run)
            status: TrialStatus = "measured" if is_measured(seconds) else "interrupted"
            found = TrialResult(status, seconds, is_stopped=True)
        end = self._end()
        begun = end if self.begun is None else self.begun
        waited = max(begun - self.order.began, 0.0)
        return replace(found, run_seconds=max(end - begun, 0.0), waited=waited)

    def poll(self) -> TrialResult | None:
        """Look once; the result of a job that has ended."""
        now = self.clock()
        self.reader.deliver(self._on_record)
        self._see_begin(now)
        summary = read_summary(self.order.run.summary)
        if isinstance(summary, SavedSummary):
            return self._reported(summary)
        if now >= self.next_ask:
            self.next_ask = now + ASK_SECONDS
            self._ask(now)
        if self.over is not None and now >= self.over + SETTLE_SECONDS:
            return self._unreported()
        if self.begun is not None and now >= self.begun + self.order.seconds:
            self._request_end(now)
        if self.ending is not None and now >= self.ending + END_SECONDS and not self.is_cancelled:
            self._cancel()
        return None

    def _on_record(self, record: StepRecord) -> None:
        self.seconds.append(record["step_seconds"])
        self.watch.on_step(record["step"])
        if is_hopeless(tuple(self.seconds), self.order.best):
            self._request_end(self.clock())

    def _see_begin(self, now: float) -> None:
        launcher = read_launcher(self.order.run.path)
        if self.begun is None and launcher is not None and launcher.hosts is not None:
            self.begun = min(launcher.started or now, now)

    def _ask(self, now: float) -> None:
        try:
            job = self.scheduler.find(self.job_id)
        except MpctlError as error:
            if not self.is_silent:
                self.watch.on_event(f"job {self.job_id}: {error}; it is waited for, and asked again")
            self.is_silent = True
            return
        self.is_silent = False
        self.job = job or FORGOTTEN
        self.over = None if self.job.is_active else self.over or now
        if self.begun is None:
            self.watch.on_wait(f"job {self.job_id}: {self.job.state}", now - self.order.began)

    def _request_end(self, now: float) -> None:
        if self.ending is None:
            self.ending = now
            write_stop_request(self.order.run.stop_request, now=True)

    def _cancel(self) -> None:
        self.is_cancelled = True
        try:
            self.scheduler.cancel(self.job_id)
        except MpctlError as error:
            self.watch.on_event(f"job {self.job_id} is not cancelled: {error}")
        else:
            self.watch.on_event(f"job {self.job_id} is cancelled")

    def _reported(self, summary: SavedSummary) -> TrialResult:
        """The result of a job whose launcher has written how it ended."""
        seconds, status = step_times(self.order.run), summary.status
        if status == "stopped" and self.ending is None and not is_measured(seconds):
            is_late = summary.signal == signal.SIGUSR1
            ended_by = "its time limit" if is_late else "`mpctl stop` or its scheduler"
            words = f"job {self.job_id} was ended by {ended_by} after {len(seconds)} steps"
            return TrialResult("too-slow" if is_late else "cancelled", seconds, words)
        failure = summary.failure if status == "failed" else None
        outcome = RunOutcome("finished", summary.attempts, failure=failure)
        return result_of(outcome, summary.plan_beside_run, seconds)

    def _unreported(self) -> TrialResult:
        """The result of a job that ended without a word of its launcher."""
        seconds = step_times(self.order.run)
        if is_measured(seconds):
            return TrialResult("measured", seconds)
        words = f"job {self.job_id} ended: {self.job.state}"
        if failure := ended_with(read_run(self.order.run.path), self.job).failure:
            words += f"; {failure.error}"
        return TrialResult(_status_of(self.job.state, words), seconds, words)

    def _end(self) -> float:
        """When the job ended, as far as is known: its summary, or what the scheduler said."""
        try:
            return self.order.run.summary.stat().st_mtime
        except OSError:
            return self.over or self.clock()


def _status_of(state: str, words: str) -> TrialStatus:
    """How a trial ended by the scheduler's state and all words that there are."""
    if OUT_OF_MEMORY.search(words):
        return "out-of-memory"
    if NOT_OF_LAYOUT.search(state):
        return "cancelled"
    return "too-slow" if OUT_OF_TIME.search(state) else "failed"
