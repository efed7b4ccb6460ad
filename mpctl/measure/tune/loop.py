"""The loop of a tuning: plan, choose, measure, learn, and again until it is settled or spent.

A Tuning has everything that the next step depends on in its folder's records, so that it goes on
after a kill as if it had not been interrupted. How a trial is made is a parameter (`MakeTrial`).

A layout that ran out of memory is not tried again, nor one that is planned to need as much or
more; one that failed otherwise takes those with it that are almost the same (NEAR_FAILED). Several
failures in a row end the tuning.

By hand, a budget of 300 s of which 280 are spent, with 8 s to start, 0.8 s a step and 5 steps at
least: a trial takes 12 s, and is made. At 290 it is not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import exp
from statistics import median
from typing import Literal, NamedTuple

from mpctl.core.errors import InputError, Issue, RunFailed
from mpctl.core.units import plural, seconds_text
from mpctl.measure.tune.choose import Belief, Candidate, MeasuredLayout, NextTrial, alikeness, choose, is_settled
from mpctl.measure.tune.pool import Learnt, Pool, learn
from mpctl.measure.tune.state import LEAST_STEPS, TrialRecord, TuneFolder
from mpctl.measure.tune.submitted import wait_for_job
from mpctl.measure.tune.trial import (
    MakeTrial,
    TargetRefused,
    TrialOrder,
    TrialResult,
    TrialWatch,
    refused_result,
    steps_for,
)
from mpctl.plan.planning.layout_settings import LayoutSettings
from mpctl.plan.search.request import SearchRequest
from mpctl.plan.search.result import why_nothing
from mpctl.plan.search.space import SearchSpace
from mpctl.records.rundir.summary import WARM_UP_STEPS
from mpctl.spec.job import JobSpec
from mpctl.spec.runtime import get_profile

SHARES = 16  # trials among which a budget is shared where their number is not given
START_SECONDS = {"local": 10.0, "auto": 10.0}
START_ELSEWHERE = 60.0
PATIENCE, LEAST_PATIENCE = 3.0, 60.0  # times the expected seconds of a trial, and at least
NEAR_FAILED = 0.85
MOST_FAILURES, FIRST_FAILURES = 5, 3  # in a row; before any layout was measured
Ended = Literal["settled", "budget", "trials", "exhausted", "failing", "stopped", "waiting"]
ENDED: Mapping[Ended, str] = {
    "settled": "no other layout has a real chance to be faster",
    "budget": "what is left of the budget is too short for another trial",
    "trials": "all trials were made",
    "exhausted": "nothing is left to measure",
    "failing": f"{MOST_FAILURES} trials in a row failed",
    "stopped": "stopped",
    "waiting": "trials are written, and wait for their logs",
}
LOST = ("out-of-memory", "failed", "too-slow")
OVER = ("measured", *LOST, "cancelled")


class TuneLimits(NamedTuple):
    """Limits of a tuning. seconds: of all sessions together; trials: number made, None for any number."""

    seconds: float
    trials: int | None = None


@dataclass(frozen=True)
class TuneWatch:
    """Called while a tuning runs. on_change: when a trial begins or ends; on_event: a message for
    people; on_step: with the last step of the running trial; on_wait: with what it waits for in a
    queue, and for how many seconds it has; on_progress: of searches and data."""

    on_change: Callable[[Tuning], None] = lambda tuning: None
    on_event: Callable[[str], None] = lambda message: None
    on_step: Callable[[int], None] = lambda step: None
    on_wait: Callable[[str, float], None] = lambda state, seconds: None
    on_progress: Callable[[str, int, int], None] = lambda stage, done, total: None


@dataclass
class Tuning:
    """One tuning.

    request: the job, and what the search holds fixed; measure: makes a trial; wait: waits for one
    that an earlier session has submitted; command: the command line; clock: seconds, of any
    beginning; check: raises InputError where the target refuses a job; prepare: returns the folder
    of prepared data that trials read, None where the job names its own; accepts: whether the target
    can run a layout; launcher: the one that makes the trials (emitted.py), None where mpctl does.
    records: the trials so far; learnt, belief: from them; after: the plans by what was learnt, None
    before; ended: why the tuning ended, None while it has
    not.
    """

    request: SearchRequest
    folder: TuneFolder
    measure: MakeTrial
    limits: TuneLimits
    command: str = "mpctl tune"
    watch: TuneWatch = field(default_factory=TuneWatch)
    clock: Callable[[], float] = time.monotonic
    check: Callable[[JobSpec], None] = lambda job: None
    prepare: Callable[[JobSpec], str | None] = lambda job: None
    accepts: Callable[[LayoutSettings], bool] = lambda layout: True
    launcher: str | None = None
    wait: MakeTrial = wait_for_job
    records: list[TrialRecord] = field(default_factory=list)
    learnt: Learnt | None = None
    after: Pool | None = None
    belief: Belief = field(default_factory=lambda: Belief([], []))
    ended: Ended | None = None
    _began: float = field(init=False)
    _spent: float = field(init=False, default=0.0)
    _queued: float = field(init=False, default=0.0)
    _waiting: float = field(init=False, default=0.0)
    _planned: list[Candidate] | None = field(init=False, default=None)
    _data: tuple[str | None] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._began = self.clock()
        self.records = self.folder.recovered()
        self._spent = sum(record.wall for record in self.records)

    # ------------------------------------------------------------ what is known

    @cached_property
    def space(self) -> SearchSpace:
        """The layouts that may be measured."""
        return self.request.space()

    @cached_property
    def before(self) -> Pool:
        """The plans by the presets that the tuning began with."""
        return Pool(self.space, self.request.typed)

    @property
    def spent(self) -> float:
        """Seconds so far, of all sessions, without those in a scheduler's queue."""
        return self._spent + self.clock() - self._began - self._queued - self._waiting

    @property
    def left(self) -> float:
        """Seconds that remain of the budget, at least 0."""
        return max(self.limits.seconds - self.spent, 0.0)

    @property
    def made(self) -> list[TrialRecord]:
        """The trials that are over and count."""
        return [record for record in self.records if record.status in OVER]

    @property
    def start_seconds(self) -> float:
        """Seconds until the ranks train: the median of the trials so far."""
        known = [r.wall - sum(r.seconds) for r in self.made if r.wall > 0 and r.seconds]
        return max(median(known), 0.0) if known else assumed_start_seconds(self.request.job)

    @property
    def best(self) -> LayoutSettings | None:
        """The best measured layout; None without one."""
        belief = self.belief
        return belief.points[belief.best].layout if belief.measured else None

    @property
    def is_settled(self) -> bool:
        """Whether the best layout leads beyond noise."""
        return bool(self.belief.measured) and is_settled(self.belief)

    def measured(self) -> list[MeasuredLayout]:
        """The measured layouts, with the plans that the tuning began with."""
        times: dict[LayoutSettings, list[float]] = {}
        for record in self.records:
            if record.status == "measured" and record.step_seconds is not None:
                times.setdefault(record.settings, []).append(record.step_seconds)
        planned = ((self.before.candidate(layout), seconds) for layout, seconds in times.items())
        return [MeasuredLayout(one, tuple(seconds)) for one, seconds in planned if one is not None]

    def update(self) -> None:
        """Form the belief from the trials so far. Raises InputError where no layout fits or can be
        timed."""
        if self._planned is None:
            every = self.before.candidates(self.watch.on_progress)
            self._planned = [one for one in every if self.accepts(one.layout)]
            if not self._planned:
                raise why_nothing(self.request, self.before.evaluator, self.watch.on_progress)
        allowed = list(without_failed(self._planned, self.records))
        self.belief = Belief.of(allowed, self.measured(), get_profile(self.request.job.training.runtime).plain)

    def learn(self) -> None:
        """Fit the planner to the trials so far, and write its presets to the folder; nothing where
        fewer than two layouts were measured."""
        try:
            self.learnt = learn(self.space, self.records, self.request.typed, self.folder)
        except InputError as error:
            why = "; ".join(map(str, error.issues))
            self.watch.on_event(f"the planner is not fitted to the trials: {why}")
        else:
            typed = self.request.typed
            self.after = Pool(self.space, typed, self.learnt) if self.learnt else None

    def search_again(self) -> bool:
        """Search with the fitted planner, and add what its fastest layouts are to the candidates,
        with the plans that they had before. Whether there are new ones."""
        self.learn()
        if self.after is None or self._planned is None:
            return False
        known = {one.layout for one in self._planned}
        again = self.after.search(self.watch.on_progress)
        new = (self.before.candidate(one.layout) for one in again if one.layout not in known)
        found = [one for one in new if one is not None and self.accepts(one.layout)]
        self._planned += found
        return bool(found)

    # ------------------------------------------------------------ the loop

    def run(self) -> None:
        """Make trials until one of the reasons in ENDED. Raises KeyboardInterrupt after Ctrl-C,
        InputError where the target refuses the first trial or the budget is too small for one, and
        RunFailed where no trial can be measured; every trial that ended is in its record."""
        self.update()
        self._require_time()
        self.watch.on_change(self)
        for record in [record for record in self.records if record.status == "running"]:
            self._finish(record, self.wait)
            self.update()
            self.watch.on_change(self)
        while self.ended is None:
            choice = self._next()
            if choice is None:
                break
            self._make(choice)
            self.update()
            self.watch.on_change(self)

    def _require_time(self) -> None:
        if self.made:
            return
        step = min(one.seconds for one in self.belief.candidates)
        if issue := time_issue(self.limits.seconds, self.start_seconds, step):
            raise InputError([issue])

    def _next(self) -> NextTrial | None:
        """The next trial; None where the tuning has ended, and why is in `ended`."""
        if self.limits.trials is not None and len(self.made) >= self.limits.trials:
            self.ended = "trials"
        elif self._failures() >= MOST_FAILURES:
            self.ended = "failing"
        elif (choice := self._choose()) is None:
            self.ended = "settled" if is_settled(self.belief) else "exhausted"
        elif self.made and self.left < least_seconds(self.start_seconds, self._expected(choice.candidate)):
            self.ended = "budget"
        else:
            return choice
        return None

    def _choose(self) -> NextTrial | None:
        """The next trial; where there seems to be none, the planner is fitted to the trials and
        searches once more."""
        choice = choose(self.belief)
        if choice is None and self.search_again():
            self.update()
            choice = choose(self.belief)
        return choice

    def _expected(self, candidate: Candidate) -> float:
        """Seconds of a step of a candidate, as far as is known."""
        if not self.belief.measured:
            return candidate.seconds
        layouts = [point.layout for point in self.belief.points]
        return exp(self.belief.means[layouts.index(candidate.layout)])

    def _failures(self) -> int:
        """Failed trials in a row, up to the last; raises RunFailed where none was measured yet."""
        count = 0
        for record in reversed(self.made):
            if record.status == "measured":
                return count
            count += 1
        if count >= FIRST_FAILURES:
            last = self.made[-1]
            log = self.folder.run(last.number).path
            raise RunFailed(f"{plural(count, 'trial')} failed and none was measured; the last, {log}: {last.error}")
        return count

    def _make(self, choice: NextTrial) -> None:
        """Make a trial; its record is written before it begins and when it has ended."""
        self._job(choice.candidate.layout)  # may prepare data, and refuse
        shares = self.limits.trials or SHARES
        share = min(self.limits.seconds / shares, self.left)
        step = self._expected(choice.candidate)
        record = self.new_record(choice, steps_for(share, self.start_seconds, step))
        self.keep(record)
        self.watch.on_change(self)
        self._finish(record, self.measure)

    def _finish(self, record: TrialRecord, measure: MakeTrial) -> None:
        """Bring a trial to its end, and write its record."""
        expected = self.start_seconds + record.steps * record.expected
        order = TrialOrder(
            self._job(record.settings),
            record.steps,
            self.folder.run(record.number),
            max(PATIENCE * expected, LEAST_PATIENCE),
            self._best_seconds(),
            self.command,
            record.began,
            record.job or None,
        )
        began = self.clock()
        result = self._measured(record, order, measure)
        passed, self._waiting = self.clock() - began, 0.0
        wall = passed if result.run_seconds is None else result.run_seconds
        self._queued += passed - wall
        ended = self._record(record.number).ended(
            result.status, wall=wall, seconds=result.seconds, error=result.error, peak_bytes=result.peak_bytes
        )
        self.keep(replace(ended, waited=result.waited))
        if result.is_stopped:
            self.ended = "stopped"
            self.update()
            raise KeyboardInterrupt

    def _record(self, number: int) -> TrialRecord:
        return next(record for record in self.records if record.number == number)

    def new_record(self, choice: NextTrial, steps: int) -> TrialRecord:
        """The record of a trial that is about to begin."""
        candidate = choice.candidate
        return TrialRecord(
            number=max((record.number for record in self.records), default=0) + 1,
            layout=candidate.layout._asdict(),
            why=choice.why,
            steps=steps,
            began=time.time(),
            planned=candidate.seconds,
            expected=self._expected(candidate),
            planned_bytes=candidate.bytes,
        )

    def claim(self) -> None:
        """Make the folder that of this job, before its first trial."""
        self.folder.claim(self.request.job, self.request.fixed)

    def keep(self, record: TrialRecord) -> None:
        """Write a record, in place of an earlier one of its number."""
        self.folder.save(record)
        kept = {one.number: one for one in self.records}
        self.records = list({**kept, record.number: record}.values())

    def _measured(self, record: TrialRecord, order: TrialOrder, measure: MakeTrial) -> TrialResult:
        def on_submit(job_id: str) -> None:
            self.keep(replace(record, job=job_id))
            self.watch.on_change(self)

        def on_wait(state: str, seconds: float) -> None:
            self._waiting = min(seconds, self.clock() - began)
            self.watch.on_wait(state, seconds)

        began = self.clock()
        watch = TrialWatch(self.watch.on_step, on_submit, on_wait, self.watch.on_event, self.watch.on_progress)
        try:
            return measure(order, watch)
        except InputError as error:
            if self.made and not isinstance(error, TargetRefused):
                return refused_result(error)
            self._forget(record)  # the target refuses: nothing is learnt by trying others
            raise

    def _forget(self, record: TrialRecord) -> None:
        self.folder.record_path(record.number).unlink(missing_ok=True)
        self.records = [one for one in self.records if one.number != record.number]

    def _job(self, layout: LayoutSettings) -> JobSpec:
        """The job in a layout, with prepared data."""
        job = self.space.job_of(layout)
        if self._data is None:
            self.check(job)
            self.claim()
            self._data = (self.prepare(job),)
        (path,) = self._data
        if path is None:
            return job
        return job.model_copy(update={"data": job.data.model_copy(update={"path": path})})

    def _best_seconds(self) -> float | None:
        return min((one.mean for one in self.belief.measured), default=None)


def assumed_start_seconds(job: JobSpec) -> float:
    """Seconds until the ranks of a job's target train, before a trial has told."""
    return START_SECONDS.get(job.launch.on, START_ELSEWHERE)


def least_seconds(start: float, step: float) -> float:
    """Return the least seconds of a trial. start: seconds until the ranks train; step: seconds of a step."""
    return start + (WARM_UP_STEPS + LEAST_STEPS) * step


def time_issue(budget: float, start: float, step: float = 0.0) -> Issue | None:
    """Return the issue of a budget too short for one trial; else None. start: seconds until the ranks
    train; step: seconds of a step, 0 if no layout was planned yet."""
    least, steps = least_seconds(start, step), WARM_UP_STEPS + LEAST_STEPS
    if budget >= least:
        return None
    message = (
        f"{seconds_text(budget)} are too short for one trial: starting the ranks takes about {seconds_text(start)}"
    )
    message += f", and {steps} steps {seconds_text(steps * step)}" if step else ""
    hint = f"use --budget {max(60, int(10 * least))}s or more"
    return Issue("tune-budget", "--budget", message, hint)


def without_failed(candidates: Sequence[Candidate], records: Sequence[TrialRecord]) -> Iterator[Candidate]:
    """The candidates without those that trials have ruled out: as large as one that ran out of
    memory, too slow to be measured, or almost the same as one that failed."""
    measured = {record.settings for record in records if record.status == "measured"}
    out = [record for record in records if record.status == "out-of-memory"]
    limit = min((record.planned_bytes for record in out), default=None)
    failed = [record.settings for record in records if record.status == "failed"]
    lost = {record.settings for record in records if record.status in LOST}
    for one in candidates:
        if one.layout in measured or not (
            one.layout in lost
            or (limit is not None and one.bytes >= limit)
            or any(alikeness(one.layout, other) >= NEAR_FAILED for other in failed)
        ):
            yield one
