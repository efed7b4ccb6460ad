"""What a run does at this moment, schema mpctl.status/1: progress, time left, launcher, every rank.

A rank's own words come from its breadcrumb (rundir/breadcrumb.py). While no step is done for long,
the collectives that ranks log tell which rank the others wait for (launch/verdict.py). Ages are
differences between the clock of this host and times that other hosts may have written.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

from typing_extensions import TypedDict

from mpctl.clusters.backend import ScheduledJob
from mpctl.launch.attempt import AttemptPhase, RankState, read_status
from mpctl.launch.verdict import HangEvidence, ProcessView, hang_verdict
from mpctl.layout.topology import job_topology
from mpctl.rundir.breadcrumb import BreadcrumbState
from mpctl.rundir.directory import RunDir
from mpctl.rundir.launcher import LauncherRecord
from mpctl.rundir.metrics import is_number, parse_record
from mpctl.rundir.rank_files import StepRecord
from mpctl.rundir.summary import recorded_median
from mpctl.runs.listing import iso
from mpctl.runs.logs import read_tail
from mpctl.runs.saved import CheckpointRow, SavedRun, Status, launcher_is_alive, read_run
from mpctl.runs.submitted import judged_by_scheduler, known_launcher

RECENT_STEPS, RECENT_BYTES = 20, 64 * 1024
WAITING_SECONDS, WAITING_STEPS = 10.0, 5
"""Ranks are asked whom they wait for when no step was done for so long, and for so many times the
usual time of a step."""
MOST_RANKS = 1 << 16


class LauncherRow(TypedDict):
    """Who launched the run (rundir/launcher.py). is_alive: whether that process is still there;
    None when this host cannot tell."""

    backend: str
    host: str
    pid: int
    job_id: str | None
    hosts: list[str] | None
    started: str | None
    is_alive: bool | None


class RankRow(TypedDict):
    """A rank. coords: by axis; doing: in its own words, empty when it has ended or not begun;
    doing_seconds, heartbeat_seconds: since it wrote that, since its last heartbeat, None when it is
    not known; process: state of its process by psutil's name, None when it is not known."""

    rank: int
    host: str | None
    coords: dict[str, int]
    doing: str
    doing_seconds: float | None
    heartbeat_seconds: float | None
    process: str | None


class StatusDocument(TypedDict):
    """What `mpctl status --json` prints; None stands for what is not known.

    step: steps trained of `steps`; step_seconds, mfu, hfu: medians of the last 20;
    tokens_per_second, loss: of the last step; seconds_left: of training at that pace;
    last_step_seconds: since the last step was recorded; checkpoint: the newest,
    checkpoint_seconds: its age; is_stopping: a stop was requested; job_state: what the scheduler
    says of the job while the run does not go on; waiting: whom ranks wait for, while no step was
    done for long; as_of: when this was found out, ISO 8601 in UTC.
    """

    schema: Literal["mpctl.status/1"]
    name: str
    path: str
    as_of: str | None
    status: Status
    is_stopping: bool
    step: int
    steps: int | None
    loss: float | None
    validation_loss: float | None
    step_seconds: float | None
    tokens_per_second: float | None
    mfu: float | None
    hfu: float | None
    seconds_left: float | None
    last_step_seconds: float | None
    checkpoint: CheckpointRow | None
    checkpoint_seconds: float | None
    launcher: LauncherRow | None
    world_size: int | None
    ranks: list[RankRow]
    job_state: str | None
    waiting: str | None
    failure: dict[str, Any] | None
    problems: list[str]


@dataclass(frozen=True)
class RunStatusNow:
    """A run at one moment. now: seconds since 1970; launcher: None when it is not known; recent:
    the last records; ranks: every rank while the run goes on, else those that did not end in
    order; job_state: what the scheduler says of the job; waiting: whom ranks wait for, while no
    step was done for long."""

    run: SavedRun
    now: float
    launcher: LauncherRecord | None
    is_stopping: bool
    recent: Sequence[StepRecord]
    ranks: Sequence[RankNow]
    job_state: str | None
    waiting: str | None

    @property
    def step_seconds(self) -> float | None:
        """The median time of the last steps, in seconds."""
        return median(r["step_seconds"] for r in self.recent) if self.recent else None

    @property
    def seconds_left(self) -> float | None:
        """The time that the remaining steps take at that pace, in seconds."""
        pace, steps = self.step_seconds, self.run.steps
        if pace is None or steps is None or self.run.status != "running":
            return None
        return pace * max(0, steps - self.run.step)

    @property
    def last_step_seconds(self) -> float | None:
        """The time since the last step was recorded, in seconds."""
        return _last_step_seconds(self.recent, self.now)


def status_of(path: Path, name: str, now: float | None = None) -> RunStatusNow:
    """The run in a directory at this moment; never raises for its content."""
    now = time.time() if now is None else now
    run, job = read_run(path, name), None
    if run.status != "running":
        run, job = judged_by_scheduler(run)
    known = known_launcher(run)
    recent = _recent(path)
    ranks = ranks_now(run, known)
    return RunStatusNow(
        run=run,
        now=now,
        launcher=known,
        is_stopping=run.status == "running" and _is_stopping(path),
        recent=recent,
        ranks=ranks,
        job_state=job.state if isinstance(job, ScheduledJob) else job,
        waiting=_waiting(run, recent, ranks, now),
    )


def status_document(state: RunStatusNow) -> StatusDocument:
    run, last = state.run, state.run.key_records.last
    newest = run.checkpoints[-1] if run.checkpoints else None
    validated, failure = run.key_records.validated, run.failure
    return {
        "schema": "mpctl.status/1",
        "name": run.name,
        "path": str(run.path),
        "as_of": iso(state.now),
        "status": run.status,
        "is_stopping": state.is_stopping,
        "step": run.step,
        "steps": run.steps,
        "loss": last["loss"] if last else None,
        "validation_loss": validated.get("validation_loss") if validated else None,
        "step_seconds": state.step_seconds,
        "tokens_per_second": last["tokens_per_second"] if last else None,
        "mfu": recorded_median(state.recent, "mfu"),
        "hfu": recorded_median(state.recent, "hfu"),
        "seconds_left": state.seconds_left,
        "last_step_seconds": state.last_step_seconds,
        "checkpoint": newest,
        "checkpoint_seconds": _age(Path(newest["path"]) / "manifest.json", state.now)
        if newest
        else None,
        "launcher": _launcher_row(state.launcher) if state.launcher else None,
        "world_size": run.job.world_size if run.job else None,
        "ranks": [rank_row(rank, state.now) for rank in state.ranks],
        "job_state": state.job_state,
        "waiting": state.waiting,
        "failure": None if failure is None else failure.as_dict(),
        "problems": list(run.problems),
    }


def rank_row(rank: RankNow, now: float) -> RankRow:
    """A rank as JSON. now: seconds since 1970."""
    crumb = rank.breadcrumb
    return {
        "rank": rank.rank,
        "host": rank.host,
        "coords": rank.coords,
        "doing": crumb.doing,
        "doing_seconds": max(0.0, now - crumb.text_time) if crumb.text_time else None,
        "heartbeat_seconds": max(0.0, now - crumb.beat_time) if crumb.beat_time else None,
        "process": rank.process or None,
    }


def _launcher_row(launcher: LauncherRecord) -> LauncherRow:
    return {
        "backend": launcher.backend,
        "host": launcher.host,
        "pid": launcher.pid,
        "job_id": launcher.job_id,
        "hosts": None if launcher.hosts is None else list(launcher.hosts),
        "started": iso(launcher.started),
        "is_alive": launcher_is_alive(launcher),
    }


def _is_stopping(path: Path) -> bool:
    report = read_status(RunDir(path).status)
    is_stopping = report is not None and report.phase is AttemptPhase.STOPPING
    return is_stopping or RunDir(path).stop_request.exists()


def _recent(path: Path) -> list[StepRecord]:
    lines = read_tail(path / "metrics.jsonl", RECENT_BYTES).lines
    records = [record for line in lines if (record := parse_record(line.encode())) is not None]
    return records[-RECENT_STEPS:]


def _last_step_seconds(recent: Sequence[StepRecord], now: float) -> float | None:
    written = recent[-1].get("time") if recent else None
    return max(0.0, now - written) if is_number(written) else None


def _waiting(
    run: SavedRun, recent: Sequence[StepRecord], ranks: Iterable[RankNow], now: float
) -> str | None:
    """Whom the ranks wait for, in a sentence; None while steps are done, or nobody waits."""
    if run.status != "running":
        return None
    since = _last_step_seconds(recent, now)
    usual = median(r["step_seconds"] for r in recent) if recent else 0.0
    if since is None or since < max(WAITING_SECONDS, WAITING_STEPS * usual):
        return None
    ranks = list(ranks)
    evidence = HangEvidence(
        progress={rank.rank: rank.breadcrumb.collectives for rank in ranks},
        processes={rank.rank: ProcessView(rank.process) for rank in ranks if rank.process},
        queued=run.job is not None and run.job.launch.device == "cuda",
    )
    verdict = hang_verdict(evidence, since)
    if verdict is None:
        return None
    return verdict.error if verdict.rank is None else f"rank {verdict.rank} {verdict.error}"


def _age(path: Path, now: float) -> float | None:
    try:
        return max(0.0, now - path.stat().st_mtime)
    except OSError:
        return None


@dataclass(frozen=True)
class RankNow:
    """A rank. host: None when it is not known; process: the state of its process by psutil's name,
    empty when it is not known; breadcrumb: an empty one for a rank that has ended or not begun."""

    rank: int
    host: str | None
    coords: dict[str, int]
    breadcrumb: BreadcrumbState
    process: str = ""


def ranks_now(run: SavedRun, launcher: LauncherRecord | None) -> list[RankNow]:
    """All ranks, in order; none when the job cannot be read."""
    if run.job is None or run.job.world_size > MOST_RANKS:
        return []
    topology = job_topology(run.job)
    hosts = [] if launcher is None else launcher.hosts or [launcher.host]
    ranks_of_host = max(1, run.job.world_size // max(1, len(hosts)))
    report = read_status(RunDir(run.path).status)
    states = {} if report is None else report.state.ranks
    return [
        RankNow(
            rank=rank,
            host=hosts[min(rank // ranks_of_host, len(hosts) - 1)] if hosts else None,
            coords=topology.whole_coords(rank),
            breadcrumb=states.get(rank, RankState()).breadcrumb,
            process=states.get(rank, RankState()).process,
        )
        for rank in range(run.job.world_size)
    ]
