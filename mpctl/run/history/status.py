"""The present state of a run, schema mpctl.status/1: progress, time left, launcher, every rank.

What a rank is doing comes from its breadcrumb (records/rundir/breadcrumb.py). If no step ends for long, the
collectives that ranks log show which rank the others wait for (run/launch/verdict.py). Ages are
differences between the clock of this host and times that other hosts may have written.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any, Literal

from typing_extensions import TypedDict

from mpctl.model.layout.topology import job_topology
from mpctl.records.rundir.blamed import read_blamed
from mpctl.records.rundir.directory import RunDir
from mpctl.records.rundir.launcher import LauncherRecord, launcher_is_alive, read_launcher
from mpctl.records.rundir.launches import num_launches
from mpctl.records.rundir.metrics import is_number, parse_record
from mpctl.records.rundir.rank_files import StepRecord
from mpctl.records.rundir.summary import ExpertSummary, expert_summary, recorded_median
from mpctl.run.clusters.backend import ScheduledJob
from mpctl.run.history.listing import iso
from mpctl.run.history.logs import read_tail
from mpctl.run.history.saved import CheckpointRow, SavedRun, Status, read_run
from mpctl.run.history.submitted import checked_with_scheduler
from mpctl.run.launch.attempt import AttemptPhase, RankState
from mpctl.run.launch.status_file import AttemptReport, read_status
from mpctl.run.launch.verdict import ProcessView, WaitGraph, hang_verdict
from mpctl.spec.job import JobSpec

RECENT_STEPS, RECENT_BYTES = 20, 64 * 1024
WAITING_SECONDS, WAITING_STEPS = 10.0, 5
"""Waits are examined when no step has ended for this many seconds, and for this many times the
usual time of a step."""
MOST_RANKS = 1 << 16


class LauncherRow(TypedDict):
    """Launcher of the run (records/rundir/launcher.py). is_alive: whether that process still exists; None when this
    host cannot find out."""

    backend: str
    host: str
    pid: int
    job_id: str | None
    hosts: list[str] | None
    started: str | None
    is_alive: bool | None


class RankRow(TypedDict):
    """A rank. coords: by axis; doing: its activity, empty when it has ended or not begun;
    doing_seconds, heartbeat_seconds: since it wrote that, since its last heartbeat, None when it is
    not known; process: state of its process by psutil's name, None when it is not known."""

    rank: int
    host: str | None
    coords: dict[str, int]
    doing: str
    doing_seconds: float | None
    heartbeat_seconds: float | None
    process: str | None


class BlamedRow(TypedDict):
    """A host that is blamed for failures (records/rundir/blamed.py): how many, the time of the last one
    (ISO 8601 in UTC) and its words; is_excluded: the run does not use it again if it can do
    without."""

    host: str
    failures: int
    last: str | None
    error: str
    is_excluded: bool


class StatusDocument(TypedDict):
    """Output of `mpctl status --json`; None means unknown.

    step: steps trained of `steps`; program: run by the ranks instead of mpctl's training; step_seconds, mfu, hfu,
    experts: medians of the last 20; tokens_per_second, loss: of the last step; seconds_left: of training at that pace;
    last_step_seconds: since the last step was recorded; checkpoint: the newest, checkpoint_seconds: its age;
    is_stopping: a stop was requested; attempts: of the last launch, more than 1 where it has restarted; launches: how
    often the run was launched; job_state: state of the job by the scheduler while the run does not go on;
    waiting: ranks waited for, while no step was done for long; blamed: hosts by failures, most first; slow: ranks and
    links that hold up the run now (records/rundir/slow.py); as_of: time of this status, ISO 8601 in UTC.
    """

    schema: Literal["mpctl.status/1"]
    name: str
    path: str
    as_of: str | None
    status: Status
    program: list[str] | None
    is_stopping: bool
    attempts: int | None
    launches: int
    step: int
    steps: int | None
    loss: float | None
    validation_loss: float | None
    step_seconds: float | None
    tokens_per_second: float | None
    mfu: float | None
    hfu: float | None
    experts: ExpertSummary | None
    seconds_left: float | None
    last_step_seconds: float | None
    checkpoint: CheckpointRow | None
    checkpoint_seconds: float | None
    launcher: LauncherRow | None
    world_size: int | None
    ranks: list[RankRow]
    job_state: str | None
    waiting: str | None
    blamed: list[BlamedRow]
    slow: list[dict[str, Any]]
    failure: dict[str, Any] | None
    problems: list[str]


def status_of(path: Path, name: str, now: float | None = None) -> StatusDocument:
    """The present state of the run in a directory; never raises for its content. now: seconds since
    1970."""
    now = time.time() if now is None else now
    run, job = read_run(path, name), None
    if run.status != "running":
        run, job = checked_with_scheduler(run)
    is_running, launcher, failure = run.status == "running", read_launcher(run.path), run.failure
    report = read_status(RunDir(path).status)
    stops = report is not None and report.phase is AttemptPhase.STOPPING
    reported = {} if report is None else report.state.ranks
    world = run.job.world_size if run.job and run.job.world_size <= MOST_RANKS else 0
    ranks = {rank: reported.get(rank, RankState()) for rank in range(world)}
    last, validated = run.key_records.last, run.key_records.validated
    newest = run.checkpoints[-1] if run.checkpoints else None
    recent = _recent(path)
    pace = median(record["step_seconds"] for record in recent) if recent else None
    written = recent[-1].get("time") if recent else None
    idle = max(0.0, now - written) if is_number(written) else None
    return {
        "schema": "mpctl.status/1",
        "name": run.name,
        "path": str(run.path),
        "as_of": iso(now),
        "status": run.status,
        "program": run.program,
        "is_stopping": is_running and (stops or RunDir(path).stop_request.exists()),
        "attempts": _attempts(run, report),
        "launches": num_launches(RunDir(path).launcher_log),
        "step": run.step,
        "steps": run.steps,
        "loss": last["loss"] if last else None,
        "validation_loss": validated.get("validation_loss") if validated else None,
        "step_seconds": pace,
        "tokens_per_second": last["tokens_per_second"] if last else None,
        "mfu": recorded_median(recent, "mfu"),
        "hfu": recorded_median(recent, "hfu"),
        "experts": expert_summary(recent),
        "seconds_left": _seconds_left(run, pace),
        "last_step_seconds": idle,
        "checkpoint": newest,
        "checkpoint_seconds": None if newest is None else _age(newest, now),
        "launcher": None if launcher is None else _launcher_row(launcher),
        "world_size": run.job.world_size if run.job else None,
        "ranks": _rank_rows(run.job, launcher, ranks, now) if run.job else [],
        "job_state": job.state if isinstance(job, ScheduledJob) else job,
        "waiting": _waiting(run, ranks, idle, pace) if is_running else None,
        "blamed": _blamed_rows(path, run.job),
        "slow": [part.as_dict() for part in report.slow] if is_running and report else [],
        "failure": None if failure is None else failure.as_dict(),
        "problems": list(run.problems),
    }


def _attempts(run: SavedRun, report: AttemptReport | None) -> int | None:
    """The attempts of the last launch; of one that goes on or was killed, by what it last wrote."""
    if run.summary is not None and run.status not in ("running", "interrupted"):
        return run.summary.attempts
    return None if report is None else report.attempt


def _recent(path: Path) -> list[StepRecord]:
    lines = read_tail(path / "metrics.jsonl", RECENT_BYTES).lines
    records = (parse_record(line.encode()) for line in lines)
    return [record for record in records if record is not None][-RECENT_STEPS:]


def _age(checkpoint: CheckpointRow, now: float) -> float | None:
    try:
        return max(0.0, now - (Path(checkpoint["path"]) / "manifest.json").stat().st_mtime)
    except OSError:
        return None


def _seconds_left(run: SavedRun, pace: float | None) -> float | None:
    """Seconds for the remaining steps at this pace, while the run is running."""
    if pace is None or run.steps is None or run.status != "running":
        return None
    return pace * max(0, run.steps - run.step)


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


def _rank_rows(
    job: JobSpec, launcher: LauncherRecord | None, ranks: Mapping[int, RankState], now: float
) -> list[RankRow]:
    topology = job_topology(job)
    hosts = [] if launcher is None else launcher.hosts or [launcher.host]
    ranks_of_host = max(1, job.world_size // max(1, len(hosts)))
    rows: list[RankRow] = []
    for rank, state in ranks.items():
        shared_state = state.breadcrumb
        rows.append(
            {
                "rank": rank,
                "host": hosts[min(rank // ranks_of_host, len(hosts) - 1)] if hosts else None,
                "coords": topology.whole_coords(rank),
                "doing": shared_state.doing,
                "doing_seconds": max(0.0, now - shared_state.text_time) if shared_state.text_time else None,
                "heartbeat_seconds": max(0.0, now - shared_state.beat_time) if shared_state.beat_time else None,
                "process": state.process or None,
            }
        )
    return rows


def _blamed_rows(path: Path, job: JobSpec | None) -> list[BlamedRow]:
    blamed = read_blamed(RunDir(path).blamed)
    most = job.launch.most_blames if job else None
    hosts = sorted(blamed.hosts.items(), key=lambda item: -item[1].failures) if blamed else []
    return [
        {
            "host": host,
            "failures": blame.failures,
            "last": iso(blame.last),
            "error": blame.error,
            "is_excluded": most is not None and blame.failures >= most,
        }
        for host, blame in hosts
    ]


def _waiting(run: SavedRun, ranks: Mapping[int, RankState], idle: float | None, pace: float | None) -> str | None:
    """Whom the ranks wait for, in a sentence; None while steps are done, or nobody waits. idle:
    seconds since the last step; pace: seconds that one takes."""
    if idle is None or idle < max(WAITING_SECONDS, WAITING_STEPS * (pace or 0.0)):
        return None
    graph = WaitGraph(
        {rank: state.breadcrumb.collectives for rank, state in ranks.items()},
        queued=run.job is not None and run.job.launch.device == "cuda",
    )
    processes = {rank: ProcessView(state.process) for rank, state in ranks.items() if state.process}
    verdict = hang_verdict(graph, processes, {}, idle)
    if verdict is None:
        return None
    return verdict.error if verdict.rank is None else f"rank {verdict.rank} {verdict.error}"
