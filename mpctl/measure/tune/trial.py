"""One trial: a layout trained for some steps on the target, as `mpctl launch` trains it.

A trial makes WARM_UP_STEPS that do not count and then as many as its share of the budget allows
(`steps_for`). It is ended early, by the request that `mpctl stop --now` writes, where its steps
show that it cannot be the best, and when its time is over: the steps that it made still count.
Running out of memory and any other failure are results, with their words.

By hand, a budget of 300 s shared by 16 trials is 18.75 s each; with 8 s to start the ranks and
0.8 s a step, 13 steps: 2 to warm up and 11 that count, of which MOST_STEPS are made.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from threading import Timer
from typing import Protocol

from mpctl.core.errors import InputError
from mpctl.measure.bench.cases import TIMED_SETTINGS
from mpctl.measure.tune.state import LEAST_STEPS, TrialStatus, step_times
from mpctl.plan.planning.plan import Plan, make_plan
from mpctl.records.rundir.directory import RunDir
from mpctl.records.rundir.launcher import write_stop_request
from mpctl.records.rundir.rank_files import StepRecord
from mpctl.records.rundir.summary import WARM_UP_STEPS, RankComparison, write_summary
from mpctl.run.clusters.connect import connected
from mpctl.run.launch.set_up import Progress, set_up_run
from mpctl.run.launch.summary import summarise
from mpctl.run.launch.supervise import OnEvent, RunOutcome, run_launch
from mpctl.spec.job import JobSpec

MOST_STEPS = 10  # that count; more of one run tell less than another run
HOPELESS = 1.5  # times the best step, from which on a trial is ended
OUT_OF_MEMORY = re.compile(
    r"out.of.memory|memory ran out|OutOfMemory|OOMKilled|(?:cannot|can.t) allocate memory"
    r"|SIGKILL, often",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class TrialOrder:
    """A trial to be made. job: with the layout; steps: warm-up included; run: its directory;
    seconds: after which it is ended; best: seconds of the best step so far, None without one;
    command: the command line of the tuning, for the run's summary; began: when it was ordered,
    seconds since 1970; job_id: of the scheduler's job that makes it already, None without one."""

    job: JobSpec
    steps: int
    run: RunDir
    seconds: float
    best: float | None
    command: str
    began: float = 0.0
    job_id: str | None = None


@dataclass(frozen=True)
class TrialResult:
    """How a trial ended. seconds: of each step, the warm-up included; error: why it failed;
    peak_bytes: of the fullest rank in one step; is_stopped: by a signal, which ends the tuning;
    run_seconds: how long it ran, None for as long as it was waited for; waited: seconds in a
    scheduler's queue before."""

    status: TrialStatus
    seconds: tuple[float, ...] = ()
    error: str = ""
    peak_bytes: int | None = None
    is_stopped: bool = False
    run_seconds: float | None = None
    waited: float = 0.0


class TargetRefused(InputError):
    """The target takes no trial now, of whatever layout."""


@dataclass(frozen=True)
class TrialWatch:
    """Called while a trial runs. on_step: with the number of its last step; on_submit: with the id
    of the scheduler's job that makes it; on_wait: with what that job waits for and for how many
    seconds it has; on_event: a message for people; on_progress: of preparing data."""

    on_step: Callable[[int], None] = lambda step: None
    on_submit: Callable[[str], None] = lambda job_id: None
    on_wait: Callable[[str, float], None] = lambda state, seconds: None
    on_event: OnEvent = lambda message: None
    on_progress: Progress = lambda stage, done, total: None


class MakeTrial(Protocol):
    """Function that makes a trial: on this host and hosts that it reaches (`launch_trial`), as a job of
    a scheduler (submitted.py), or in a test."""

    def __call__(self, order: TrialOrder, watch: TrialWatch) -> TrialResult:
        """Make a trial. Raises InputError where the target refuses it before any rank starts."""


def steps_for(share: float, start: float, step: float) -> int:
    """The steps of a trial, warm-up included. share: seconds that it may take; start: of these,
    until the ranks train; step: seconds of a step.

    >>> steps_for(18.75, 8.0, 0.8), steps_for(10.0, 8.0, 0.8), steps_for(12.0, 8.0, 0.5)
    (12, 5, 8)
    """
    counted = int((share - start) / step) - WARM_UP_STEPS if step > 0 else MOST_STEPS
    return WARM_UP_STEPS + min(max(counted, LEAST_STEPS), MOST_STEPS)


def trial_job(job: JobSpec, steps: int) -> JobSpec:
    """The job of a trial: so many steps, no validation, no checkpoint, no restart."""
    tables: dict[str, dict[str, object]] = {
        "training": {"steps": steps},
        "launch": {"max_restarts": 0, "csv": False, "tensorboard": False},
    }
    for name, value in TIMED_SETTINGS.items():
        table, _, key = name.partition(".")
        tables.setdefault(table, {})[key] = value
    return job.model_copy(
        update={name: getattr(job, name).model_copy(update=changes) for name, changes in tables.items()}
    )


def trial_plan(job: JobSpec, steps: int) -> Plan:
    """The legal plan of a trial. Raises InputError with every reason why there is none."""
    plan = make_plan(trial_job(job, steps))
    plan.require_legal()
    return plan


def is_hopeless(seconds: tuple[float, ...], best: float | None) -> bool:
    """Whether steps so far show that the layout is not the best: after the warm-up, LEAST_STEPS of
    them, each HOPELESS times the best.

    >>> is_hopeless((3.0, 2.0, 1.6, 1.6, 1.7), 1.0), is_hopeless((3.0, 2.0, 1.6, 1.4, 1.7), 1.0)
    (True, False)
    """
    steady = seconds[WARM_UP_STEPS:]
    if best is None or len(steady) < LEAST_STEPS:
        return False
    return min(steady) > HOPELESS * best


def launch_trial(order: TrialOrder, watch: TrialWatch) -> TrialResult:
    """Train the layout on this host, or on the hosts that the job's [launch] reaches from here."""
    plan, run = trial_plan(order.job, order.steps), order.run
    ended: list[str] = []
    seconds: list[float] = []

    def end(why: str) -> None:
        if not ended:
            ended.append(why)
            write_stop_request(run.stop_request, now=True)

    def on_record(record: StepRecord) -> None:
        seconds.append(record["step_seconds"])
        watch.on_step(record["step"])
        if is_hopeless(tuple(seconds), order.best):
            end("slow")

    connection = connected(plan, run, watch.on_event)
    with run.locked(), connection as (cluster, launch):
        set_up_run(launch, overwrite=True, resume=False, on_progress=watch.on_progress)
        timer = Timer(order.seconds, end, ["late"])
        timer.daemon = True
        timer.start()
        try:
            outcome = run_launch(launch, cluster, on_record, watch.on_event)
        finally:
            timer.cancel()
        summary = summarise(plan, launch, outcome, command=order.command)
        write_summary(run.summary, summary)
    if ended and outcome.status == "stopped":
        outcome = replace(outcome, status="finished")
    return result_of(outcome, summary["plan_beside_run"], step_times(run))


def is_measured(seconds: tuple[float, ...]) -> bool:
    """Whether a trial made enough steps, by the seconds of each."""
    return len(seconds) >= WARM_UP_STEPS + LEAST_STEPS


def result_of(outcome: RunOutcome, ranks: Sequence[RankComparison], seconds: tuple[float, ...]) -> TrialResult:
    """The result of a launch that has ended; one that was ended early counts as finished. ranks:
    plan and run of each."""
    peaks = [rank["memory"]["peak"]["measured"] for rank in ranks if "peak" in rank["memory"]]
    peak, enough = max(peaks, default=None), is_measured(seconds)
    if outcome.failure is not None:
        return failed_result(str(outcome.failure), seconds)
    if outcome.status == "stopped":
        status: TrialStatus = "measured" if enough else "interrupted"
        return TrialResult(status, seconds, peak_bytes=peak, is_stopped=True)
    if not enough:
        words = f"{len(seconds)} steps in its time, of which the first {WARM_UP_STEPS} warm up"
        return TrialResult("too-slow", seconds, words, peak)
    return TrialResult("measured", seconds, peak_bytes=peak)


def failed_result(error: str, seconds: tuple[float, ...] = ()) -> TrialResult:
    """The result of a trial that ended with this error."""
    status: TrialStatus = "out-of-memory" if OUT_OF_MEMORY.search(error) else "failed"
    return TrialResult(status, seconds, error)


def refused_result(error: InputError) -> TrialResult:
    """The result of a trial that the target refused before any rank started."""
    return failed_result("; ".join(map(str, error.issues)))
