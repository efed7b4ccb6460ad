"""Run a LaunchPlan and watch it: records out, a stop in, and no process left behind.

One torchrun an attempt, in a session of its own so that Ctrl-C reaches only us. A first SIGINT,
SIGTERM, SIGHUP or SIGUSR1 (Slurm's --signal) asks the ranks to finish their step and save (a file
that rank 0's step looks for); a second one, or `stop_seconds` without an end, kills the tree. If we
are killed ourselves the kernel kills torchrun (runtime/torchrun.py), and with it the workers.

A rank that failed says so in a file. torchrun then ends the others by SIGTERM within half a second,
but waits 30 s for one that cannot take it: a stopped process, or one deep in the kernel. We do not
wait for a stopped one, and for none longer than FAILING_SECONDS. What no rank can tell, because all
of them or torchrun are stopped or cannot meet, the watch sees (watch.py).
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

from mpctl.launch.cgroup import memory_kills
from mpctl.launch.diagnose import AttemptEvidence, Failure, find_failure, port_was_taken
from mpctl.launch.launch_plan import LAUNCHER, LaunchPlan
from mpctl.launch.port import HOST, free_port
from mpctl.launch.processes import ProcessTree, kill_tree
from mpctl.launch.save_monitor import SaveMonitor
from mpctl.launch.watch import RunWatch
from mpctl.rundir.marker import COMMAND
from mpctl.rundir.metrics import parse_record
from mpctl.rundir.rank_files import StepRecord

POLL_SECONDS = 0.05
FAILING_SECONDS = 10.0
OnRecord = Callable[[StepRecord], None]
OnEvent = Callable[[str], None]


@dataclass(frozen=True)
class RunOutcome:
    """How a run ended; signal is the one that stopped it."""

    status: Literal["finished", "stopped", "failed"]
    attempts: int
    signal: int | None = None
    failure: Failure | None = None

    @property
    def exit_code(self) -> int:
        if self.status == "stopped":
            return 128 + (self.signal or signal.SIGINT)
        return 0 if self.status == "finished" else 1


@dataclass
class StopRequests:
    """Signals that asked for a stop, in order of arrival."""

    received: list[int] = field(default_factory=list)

    @contextmanager
    def listening(self) -> Iterator[StopRequests]:
        names = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
        before = {name: signal.signal(name, self._take) for name in names}
        try:
            yield self
        finally:
            for name, handler in before.items():
                signal.signal(name, handler)

    def _take(self, number: int, frame: Any) -> None:
        self.received.append(number)


def run_launch(plan: LaunchPlan, on_record: OnRecord, on_event: OnEvent) -> RunOutcome:
    """Run to the end, over as many attempts as the job allows."""
    run, attempts = plan.run, plan.job.launch.max_restarts + 1
    with StopRequests().listening() as stops:
        for attempt in range(1, attempts + 1):
            ended = _attempt(plan, stops, on_record, on_event)
            if ended.code == 0 and run.last_step() >= plan.job.training.steps:
                return RunOutcome("finished", attempt)
            if stops.received or (ended.code == 0 and run.stop.exists()):
                return RunOutcome("stopped", attempt, next(iter(stops.received), None))
            failure = find_failure(run, plan.job, plan.world_size, ended.evidence)
            if attempt == attempts:
                return RunOutcome("failed", attempt, failure=failure)
            on_event(f"{failure}; starting again from step {run.last_checkpoint()}")
    raise AssertionError("unreachable")


@dataclass(frozen=True)
class AttemptResult:
    """How one torchrun ended."""

    code: int
    evidence: AttemptEvidence


def _attempt(
    plan: LaunchPlan, stops: StopRequests, on_record: OnRecord, on_event: OnEvent
) -> AttemptResult:
    """One torchrun; a second one, on another port, when the first found its port taken."""
    ended = _run_torchrun(plan, stops, on_record, on_event)
    if ended.code and not stops.received and port_was_taken(plan.run):
        on_event("another process took the port first; once more with another")
        return _run_torchrun(plan, stops, on_record, on_event)
    return ended


def _run_torchrun(
    plan: LaunchPlan, stops: StopRequests, on_record: OnRecord, on_event: OnEvent
) -> AttemptResult:
    """One torchrun from start to end."""
    for words in plan.run.begin_attempt():
        on_event(words)
    port, kills = free_port(plan.world_size), memory_kills()
    with plan.run.torchrun_log.open("ab") as log:
        process = _spawn(plan, log, port)
        plan.run.torchrun_pid.write_text(str(process.pid))  # a worker starts a second from now
        family, reader = ProcessTree(process.pid, plan.world_size), RecordReader(plan.run.metrics)
        saves = SaveMonitor(plan.run, plan.world_size, on_event)
        failing = FailureGracePeriod(plan, family)
        watch = RunWatch(plan.run, family, plan.job.launch, address=f"{HOST}:{port}")
        try:
            while process.poll() is None and failing.may_last() and watch.finds_nothing():
                reader.deliver(on_record)
                saves.look()
                if stops.received and not _may_go_on(plan, stops, reader, saves, on_event):
                    break
                time.sleep(POLL_SECONDS)
        finally:
            code = process.poll()  # None: it is ended by us
            kill_tree(process)
            plan.run.end_attempt()
            plan.run.torchrun_pid.unlink(missing_ok=True)
        reader.deliver(on_record)
    evidence = AttemptEvidence(code, failing.stopped_ranks, watch.trouble, memory_kills() - kills)
    return AttemptResult(process.wait(), evidence)


def _spawn(plan: LaunchPlan, log: BinaryIO, port: int) -> subprocess.Popen[bytes]:
    command = plan.command(port)
    log.write(os.fsencode(f"{COMMAND}{shlex.join(command)}\n"))
    log.flush()
    return subprocess.Popen(
        command, env={**os.environ, **plan.env, LAUNCHER: str(os.getpid())},
        stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
    )  # fmt: skip


def _may_go_on(
    plan: LaunchPlan,
    stops: StopRequests,
    reader: RecordReader,
    saves: SaveMonitor,
    on_event: OnEvent,
) -> bool:
    """After a stop was asked for: whether the ranks still have time to finish their step, or get on
    with saving."""
    is_trained = reader.delivered or saves.words  # the record of a validated step follows its save
    if len(stops.received) > 1 or not is_trained:
        return False  # asked twice, or nothing was trained that could be lost
    if reader.deadline is None:
        plan.run.stop.touch()
        reader.deadline = time.monotonic() + plan.job.launch.stop_seconds
        name = signal.Signals(stops.received[0]).name
        on_event(f"{name}: finishing this step and saving; once more to stop at once")
    deadline = max(reader.deadline, saves.moved + plan.job.launch.stop_seconds)
    return time.monotonic() < deadline


@dataclass
class FailureGracePeriod:
    """How long a run may last once one of its ranks has failed."""

    plan: LaunchPlan
    family: ProcessTree
    deadline: float | None = None
    stopped_ranks: tuple[int, ...] = ()

    def may_last(self) -> bool:
        if self.deadline is None:
            if not self.plan.run.has_failures:
                return True
            self.deadline = time.monotonic() + FAILING_SECONDS
        self.stopped_ranks = self.family.stopped_ranks()
        return not self.stopped_ranks and time.monotonic() < self.deadline


@dataclass
class RecordReader:
    """Follows metrics.jsonl; hands out each complete line once."""

    path: Path
    offset: int = 0
    delivered: int = 0
    deadline: float | None = None

    def __post_init__(self) -> None:
        self.offset = self.path.stat().st_size if self.path.exists() else 0

    def deliver(self, on_record: OnRecord) -> None:
        """Each new line that is a record; a file that was removed or cut starts anew."""
        try:
            stream = self.path.open("rb")
        except OSError:
            return
        with stream:
            self.offset *= self.offset <= os.fstat(stream.fileno()).st_size
            stream.seek(self.offset)
            for line in stream:
                if not line.endswith(b"\n"):
                    break
                self.offset += len(line)
                record = parse_record(line)
                if record is not None:
                    self.delivered += 1
                    on_record(record)
