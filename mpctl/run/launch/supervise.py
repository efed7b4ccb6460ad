"""Run a LaunchPlan to its end: deliver its records, forward stop requests, leave no process behind.

Every attempt starts new ranks (node/torchrun.py). A first SIGINT, SIGTERM, SIGHUP or SIGUSR1
(Slurm's --signal) asks the ranks to finish their step and save, through the memory that they share
with the agent of their host (records/rundir/breadcrumb.py); a second one, or `stop_seconds` without
progress, kills them. The file RUN/stop-request, which `mpctl stop` writes, counts as a SIGTERM.

A rank that fails leaves a record in that memory. torchrun then ends the others by SIGTERM within
half a second, but waits 30 s for one that cannot take it: a stopped process, or one in a system
call that cannot be interrupted. The supervisor does not wait for a stopped one, and for no other
longer than FAILING_SECONDS. Failures that no rank can record, because all ranks or torchrun are
stopped or the ranks cannot reach each other, are seen by watch.py.

A rank that saves writes into its breadcrumb how much it has written so far: only that while
training waits for the save, otherwise after what the rank is doing. While that text changes, the
save makes progress, and a stop waits for it however long it takes (SaveMonitor).
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpctl.core.errors import InputError, RunFailed
from mpctl.core.units import plural
from mpctl.records.rundir.launcher import requested_signals
from mpctl.records.rundir.slow import SlowPart
from mpctl.records.rundir.summary import Failure, RunStatus
from mpctl.run.hosts.checks import common_machine
from mpctl.run.launch.attempt import AttemptPhase, AttemptState, NodeState, RunChange, report_seconds
from mpctl.run.launch.cluster import Attempt, Cluster
from mpctl.run.launch.diagnose import AttemptEvidence, find_failure, full_disk_text, without_ranks
from mpctl.run.launch.elastic import fit_hosts, least_nodes
from mpctl.run.launch.follow import OnAnswer, OnRecord, RecordReader, parse_answer
from mpctl.run.launch.launch_plan import LaunchPlan, plan_launch
from mpctl.run.launch.preflight import chosen_device
from mpctl.run.launch.program_watch import reached_step
from mpctl.run.launch.restarts import RestartPolicy, skip_batches
from mpctl.run.launch.set_up import name_origin
from mpctl.run.launch.slow_parts import SlowPartsMonitor
from mpctl.run.launch.status_file import StatusFile
from mpctl.run.launch.watch import RunWatch
from mpctl.spec.launch import LaunchSpec

if TYPE_CHECKING:
    from mpctl.run.launch.program_records import ProgramRecords

SAVING = "saving step"
SAVE_SECONDS, REPORT_AFTER, REPORT_EVERY = 0.5, 2.0, 15.0
POLL_SECONDS = 0.05
FAILING_SECONDS, LOST_SECONDS = 10.0, 2.0
REQUEST_SECONDS = 0.5
SHOWN_ENDED = 8
OnEvent = Callable[[str], None]


@dataclass
class SaveMonitor:
    """The saves of one attempt. messages: the progress text of each rank that saves; last_progress:
    when one of them last changed, by `clock`; is_awaited: whether training waits."""

    on_event: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    last_progress: float = float("-inf")
    next_poll: float = float("-inf")
    next_report: float = float("inf")
    messages: dict[int, str] = field(default_factory=dict)
    is_awaited: bool = False

    def poll(self, attempt: Attempt) -> None:
        """Read the ranks' texts, at most every SAVE_SECONDS; report a save that training has to
        wait for and that takes long."""
        now = self.clock()
        if now < self.next_poll:
            return
        self.next_poll = now + SAVE_SECONDS
        doing = attempt.snapshot().doing()
        # `saving step 3: 20 MiB of 1 GiB written` alone or after something else
        messages = {r: text[text.rfind(SAVING) :] for r, text in doing.items() if SAVING in text}
        awaited = [text for text in doing.values() if text.startswith(SAVING)]
        if not self.is_awaited:
            self.next_report = now + REPORT_AFTER
        if messages and messages != self.messages:
            self.last_progress = now
        self.messages, self.is_awaited = messages, bool(awaited)
        if awaited and now >= self.next_report:
            self.next_report = now + REPORT_EVERY
            self.on_event(max(awaited, key=len))


@dataclass(frozen=True)
class RunOutcome:
    """End of a run. attempts: how many were made; signal: number of the signal that stopped it, or None; launch: of the
    last attempt, if an elastic run ended on fewer hosts than it was planned for."""

    status: RunStatus
    attempts: int
    signal: int | None = None
    failure: Failure | None = None
    launch: LaunchPlan | None = None

    @property
    def exit_code(self) -> int:
        """0 for a finished run, 1 for a failed one, 128 + the signal for a stopped one."""
        if self.status == "stopped":
            return 128 + (self.signal or signal.SIGINT)
        return 0 if self.status == "finished" else 1

    def with_words(self, words: str) -> RunOutcome:
        """The outcome with words added to the error of its failure."""
        if self.failure is None or not words:
            return self
        return replace(self, failure=replace(self.failure, error=f"{self.failure.error}; {words}"))


@dataclass
class StopRequests:
    """The numbers of the signals that asked for a stop, in order of arrival. next_poll: when
    RUN/stop-request is read again, by time.monotonic(); is_by_file: that file came first."""

    received: list[int] = field(default_factory=list)
    next_poll: float = float("-inf")
    is_by_file: bool = False

    @contextmanager
    def listening(self) -> Iterator[StopRequests]:
        """Collect SIGINT, SIGTERM, SIGHUP and SIGUSR1 inside of the block; not a SIGHUP that nohup
        has this process ignore."""
        hangup = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
        names = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, *hangup)
        before = {name: signal.signal(name, self._receive) for name in names}
        try:
            yield self
        finally:
            for name, handler in before.items():
                signal.signal(name, handler)

    def poll(self, path: Path) -> None:
        """Count a request in RUN/stop-request as SIGTERM, an urgent one as two; reads the file once
        in REQUEST_SECONDS."""
        if time.monotonic() >= self.next_poll:
            self.next_poll = time.monotonic() + REQUEST_SECONDS
            missing = requested_signals(path) - len(self.received)
            self.is_by_file = self.is_by_file or (missing > 0 and not self.received)
            self.received.extend([signal.SIGTERM] * missing)

    @property
    def cause(self) -> str:
        """Source of the stop: the name of the first signal, or `mpctl stop`."""
        return "mpctl stop" if self.is_by_file else signal.Signals(self.received[0]).name

    def _receive(self, number: int, frame: Any) -> None:
        self.received.append(number)


def run_launch(
    plan: LaunchPlan,
    cluster: Cluster,
    on_record: OnRecord | OnAnswer,
    on_event: OnEvent,
    on_change: Callable[[RunChange], None] = lambda change: None,
) -> RunOutcome:
    """Run to the end, over as many attempts as the job allows (restarts.py).

    on_record: called with each record of a step, or answer of a bench; on_event: with messages for
    people; on_change: with each failure and restart, with what holds up the run, and with the end.
    """
    restarts, full = RestartPolicy(plan.job), plan
    with StopRequests().listening() as stops:
        supervisor = Supervisor(plan, cluster, stops, on_record, on_event, on_change)
        for attempt in count(1):
            outcome, words = supervisor.outcome(attempt), ""
            if outcome.failure is not None:
                if outcome.failure.blamed:
                    cluster.blame(outcome.failure.blamed, outcome.failure.error)
                step, checkpoint = plan.run.last_step(), plan.run.last_checkpoint()
                if plan.runs_program:
                    step = checkpoint = max(step, supervisor.reached)
                decision = restarts.decide(outcome.failure, step=step, checkpoint=checkpoint)
                words = decision.words
                on_change(RunChange("failure", attempt, "failed", outcome.failure, words))
                if not decision.goes_on:
                    outcome = outcome.with_words(decision.words)
                    break
                on_event(f"{outcome.failure}; {decision.words}")
                full = skip_batches(full, decision.skip_batches)
            elif outcome.status != "stopped" or stops.received:
                break  # else an elastic run was stopped for a host that has returned
            try:
                supervisor.take_hosts(full)
            except InputError as error:
                if stops.received:  # while lost hosts were waited for
                    outcome = RunOutcome("stopped", attempt, stops.received[0])
                why = "; ".join(f"{issue.where}: {issue.message}" for issue in error.issues)
                outcome = outcome.with_words(f"not started again: {why}")
                break
            on_change(RunChange("restart", attempt, outcome.status, outcome.failure, words))
    on_change(RunChange("end", outcome.attempts, outcome.status, outcome.failure))
    ran = supervisor.plan
    return outcome if ran.job is plan.job else replace(outcome, launch=ran)


@dataclass
class WatchedAttempt:
    """An attempt with its phase (attempt.py). stop_requested: whether its ranks were asked to end;
    status: what other commands read of it."""

    attempt: Attempt
    status: StatusFile
    phase: AttemptPhase = AttemptPhase.STARTING
    stop_requested: bool = False

    def poll(self) -> AttemptPhase:
        """The phase now; writes the status when that is due."""
        self.phase = self.phase.then(self.attempt.poll())
        if self.status.is_due:
            self.status.write(self.attempt.snapshot(), self.phase)
        return self.phase

    def request_stop(self) -> None:
        self.attempt.request_stop()
        self.stop_requested = True
        self.phase = self.phase.then(AttemptPhase.STOPPING)
        self.status.write(self.attempt.snapshot(), self.phase)

    def end(self) -> AttemptState:
        self.phase = self.phase.then(self.attempt.poll()).then(AttemptPhase.ENDED)
        state = self.attempt.end()
        self.status.write(state, self.phase)
        return state


@dataclass
class Supervisor:
    """Runs attempts of one launch. plan: what the next one runs; attempt: number of the last;
    reached: the highest step that a rank of a program said it was at."""

    plan: LaunchPlan
    cluster: Cluster
    stops: StopRequests
    on_record: OnRecord | OnAnswer
    on_event: OnEvent
    on_change: Callable[[RunChange], None] = lambda change: None
    attempt: int = 0
    reached: int = 0

    def take_hosts(self, full: LaunchPlan) -> None:
        """Connect to lost hosts again, and plan for `full`, the launch on all nodes of the job, or
        for an elastic run on the available hosts. Raises InputError with the reasons when the run
        cannot continue."""
        job, plan = full.job, full
        if lost := self.cluster.recover(least_nodes(job), self._is_stopped):
            raise InputError(lost)
        hosts = self.cluster.hosts
        if job.launch.elastic and len(hosts) < job.cluster.nodes:
            machine, fewer = common_machine(hosts), fit_hosts(job, len(hosts))
            if issues := self.cluster.check(fewer, chosen_device(job, machine)):
                raise InputError(issues)
            plan = plan_launch(fewer, full.run, machine, hosts=fewer.job.cluster.nodes)
            plan = replace(plan, warnings=full.warnings, launcher=full.launcher)
        if plan.world_size != self.plan.world_size:
            nodes, dp = plan.job.cluster.nodes, plan.job.sizes["dp"]
            names = ", ".join(host.name for host in hosts[:nodes])
            self.on_event(f"going on with {plural(nodes, 'host')} ({names}) at dp {dp}")
        used = [host.name for host in hosts[: plan.job.cluster.nodes]]
        self.plan = replace(plan, launcher=replace(plan.launcher, hosts=used))

    def _is_stopped(self) -> bool:
        self.stops.poll(self.plan.run.stop_request)
        return bool(self.stops.received)

    def outcome(self, attempt: int) -> RunOutcome:
        """Run one attempt to its end; returns how it ended. attempt: its number, from 1. An elastic
        run that no signal stopped continues with a host that has returned."""
        run, self.attempt = self.plan.run, attempt
        try:
            evidence = self._attempt()
        except (RunFailed, OSError) as error:  # the ranks could not be started
            with suppress(OSError):
                run.end_attempt()
            full = full_disk_text(run.path) if isinstance(error, OSError) else ""
            error_text = f"{full}; {error}" if full else str(error)
            return RunOutcome("failed", attempt, failure=without_ranks(error_text, run))
        has_succeeded = evidence.state.phase is AttemptPhase.SUCCEEDED
        if has_succeeded and self._is_done(evidence):
            return RunOutcome("finished", attempt)
        if self.stops.received or (has_succeeded and evidence.stop_requested):
            return RunOutcome("stopped", attempt, next(iter(self.stops.received), None))
        return RunOutcome("failed", attempt, failure=find_failure(run, self.plan.job, evidence))

    def _is_done(self, evidence: AttemptEvidence) -> bool:
        """Whether the ranks have finished: the last step, or the last answer of a bench. A program
        has if it ended by itself."""
        if self.plan.runs_program:
            return not evidence.stop_requested
        if self.plan.request is not None:
            return 0 in evidence.state.finished_ranks
        return self.plan.run.last_step() >= self.plan.job.training.steps

    def _attempt(self) -> AttemptEvidence:
        """One attempt; once more, on another port, when torchrun found its port in use, and from
        the checkpoint before as often as ranks found the newest one damaged."""
        evidence = self._run_ranks()
        has_failed = evidence.state.phase is AttemptPhase.FAILED
        if has_failed and evidence.state.port_taken and not self.stops.received:
            self.on_event("another process took the port first; trying again with another port")
            evidence = self._run_ranks()
        while not self.stops.received and (renamed := self.plan.run.set_reported_damage_aside(evidence.state.failures)):
            for message in renamed:
                self.on_event(message)
            evidence = self._run_ranks()
        return evidence

    def _run_ranks(self) -> AttemptEvidence:
        """Start all ranks and watch them until they have ended or must be killed."""
        run, launch = self.plan.run, self.plan.job.launch
        is_bench = self.plan.request is not None
        is_training = not (is_bench or self.plan.runs_program)
        for message in self._begin_attempt():
            self.on_event(message)
        reader = self._reader()
        saves = SaveMonitor(self.on_event)
        attempt = self.cluster.start(name_origin(self.plan))
        watched = WatchedAttempt(attempt, StatusFile(run.status, self.attempt))
        watch = RunWatch(
            launch, self.plan.world_size, address=attempt.address, period=report_seconds(self.plan.job.cluster.nodes)
        )
        slow = SlowPartsMonitor(self.plan.job, run.slow, partial(self._say_slow, watched.status))
        grace = FailureGracePeriod(attempt)
        stop = StopGracePeriod(watched, launch, self.stops, self.on_event)

        def learning(record: Any) -> None:
            watch.timeout.learn(record)
            self.on_record(record)

        try:
            while not watched.poll().is_over and grace.is_open(watched.phase, saves) and watch.is_healthy(attempt):
                reader.deliver(learning if is_training else self.on_record)
                saves.poll(attempt)
                if is_training:
                    slow.poll(attempt)
                self.stops.poll(run.stop_request)
                if not watched.stop_requested and reader.delivered and self.cluster.has_returned():
                    self.on_event("a host has returned: saving, to go on with it")
                    watched.request_stop()
                # What a bench measured is written already.
                if self.stops.received and (is_bench or not stop.is_open(reader, saves)):
                    break
                time.sleep(POLL_SECONDS)
        finally:
            state = watched.end()
            for node in state.nodes:
                if node.unkilled:
                    self.on_event(_unkilled_text(node))
                if node.ended:
                    self.on_event(_ended_text(node))
            run.end_attempt()
        if left_out := reader.finish(self.on_record):
            self.on_event(left_out)
        self.reached = max(self.reached, reached_step(state)) if state.nodes else self.reached
        return AttemptEvidence(watched.phase, grace.stopped_ranks, watch.hang, state, watched.stop_requested)

    def _say_slow(self, status: StatusFile, slow: Sequence[SlowPart], words: Sequence[str]) -> None:
        """Report what has become slow, or is no longer. slow: all that is now."""
        status.slow = slow
        for text in words:
            self.on_event(text)
        said = "; ".join(words)
        self.on_change(RunChange("slow", self.attempt, "running", words=said, slow=slow))

    def _begin_attempt(self) -> list[str]:
        run = self.plan.run
        if not self.plan.runs_program:
            return run.begin_attempt(self.plan.job.checkpoint.keep_last)
        run.begin_program()
        return []

    def _reader(self) -> RecordReader | ProgramRecords:
        """Return the reader of an attempt's records."""
        run = self.plan.run
        if self.plan.runs_program:
            from mpctl.run.launch.program_records import ProgramRecords

            return ProgramRecords(run, self.plan.job)
        is_bench = self.plan.request is not None
        return RecordReader(run.answers, parse_answer) if is_bench else RecordReader(run.metrics)


def _unkilled_text(node: NodeState) -> str:
    """The message about a host on which processes still run after SIGKILL."""
    noun = "process" if len(node.unkilled) == 1 else "processes"
    return (
        f"host {node.host}: {noun} {', '.join(map(str, node.unkilled))} cannot be killed, in a "
        "system call that does not return (state D, often a file system that does not answer); "
        "going on without"
    )


def _ended_text(node: NodeState) -> str:
    """The message about what a program had started and left on a host."""
    more = len(node.ended) - SHOWN_ENDED
    shown = ", ".join(node.ended[:SHOWN_ENDED]) + (f" and {more} more" if more > 0 else "")
    noun = "a process" if len(node.ended) == 1 else f"{len(node.ended)} processes"
    return f"host {node.host}: the program left {noun} behind, ended now: {shown}"


@dataclass
class StopGracePeriod:
    """Time limit of the ranks after a requested stop: `launch.stop_seconds`, and as long again since the last progress
    of a save."""

    watched: WatchedAttempt
    launch: LaunchSpec
    stops: StopRequests
    on_event: OnEvent
    deadline: float | None = None

    def is_open(self, reader: RecordReader | ProgramRecords, saves: SaveMonitor) -> bool:
        """Whether the ranks may continue; the first call asks them to finish a step and save."""
        # A validated step is saved before its record is written; a program need not report any.
        is_trained = reader.delivered or saves.messages or self.launch.program
        seconds = self.launch.stop_seconds
        if len(self.stops.received) > 1 or not is_trained:
            return False  # a second request, or no training that could be lost
        if self.deadline is None:
            self.watched.request_stop()
            self.deadline = time.monotonic() + seconds
            told = "finishing this step and saving"
            if self.launch.program:
                told = f"the program is told to save and end, and has {seconds:g} s"
            self.on_event(f"{self.stops.cause}: {told}; repeat it to stop at once")
        return time.monotonic() < max(self.deadline, saves.last_progress + seconds)


@dataclass
class FailureGracePeriod:
    """Time limit of the ranks after one of them has failed, so that the others can record their failures and a save in
    flight can end: FAILING_SECONDS, as long again since the last progress of a save, LOST_SECONDS once a host is lost,
    0 once a process is stopped."""

    attempt: Attempt
    deadline: float | None = None
    stopped_ranks: tuple[int, ...] = ()

    def is_open(self, phase: AttemptPhase, saves: SaveMonitor) -> bool:
        """Whether the ranks may continue; always while the attempt is not failing."""
        if phase is not AttemptPhase.FAILING:
            return True
        state = self.attempt.snapshot()
        self.deadline = self.deadline or time.monotonic() + FAILING_SECONDS
        deadline = self.deadline
        if state.lost:
            deadline = self.deadline = min(deadline, time.monotonic() + LOST_SECONDS)
        else:
            deadline = max(deadline, saves.last_progress + FAILING_SECONDS)
        self.stopped_ranks = state.stopped_ranks()
        return not self.stopped_ranks and time.monotonic() < deadline
