"""Which rank ended a run, and why, from what every rank left behind.

A rank that fails by an exception leaves a record, which says whether it only echoes a lost peer. A
rank killed by a signal leaves none; torchrun's log then has its exit code. A rank that exited with
code 0 too early has neither. A stopped rank (SIGSTOP, a debugger) is recognised by its process
state. A torchrun that something killed took its ranks with it. Ranks that torchrun terminated
afterwards, and ranks that NCCL's watchdog aborted because they waited too long, are the cause only
when there is no other. What a rank without a record was doing is in its breadcrumb
(mpctl/rundir/breadcrumb.py).

When a rank of 512 dies, 511 ranks record that they lost a peer, each with another address. Only the
first failure and those that are no echo tell anything; of the rest the number is told
(`other_failures`). What a full disk breaks looks like something else: ranks that end without a
record, a torchrun that cannot write its log. It is found by writing to it, which also meets what
free bytes do not show, a quota or a lack of inodes.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from mpctl.launch.attempt import AttemptPhase, AttemptState, NodeState, RankState
from mpctl.launch.verdict import WATCHDOG, blocked_in, ended_verdict, nccl_verdict
from mpctl.launch.watch import HangReport, stopped_text
from mpctl.layout.topology import job_topology
from mpctl.rundir.directory import RunDir
from mpctl.rundir.logs import STEP, merge_logs
from mpctl.rundir.rank_files import FailureRecord
from mpctl.rundir.summary import Failure, OtherFailure
from mpctl.spec.job import JobSpec
from mpctl.units import bytes_text

PROBE_BYTES = 1 << 16
FULL = (errno.ENOSPC, errno.EDQUOT)
UNSAID = "an error without words"
LAST_LINES = 15
TAIL_BYTES = 65536
OUT_OF_MEMORY = (
    "memory ran out, and the kernel killed a process of this control group; use a smaller model or "
    "micro batch, fewer ranks, or a higher limit"
)
FAILED, EXITED, TERMINATED, TIMED_OUT = range(4)
CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)


def full_disk_text(folder: Path) -> str:
    """`the disk of /runs/a is full: No space left on device; 0 B of 8.0 MiB are free`; empty where
    PROBE_BYTES can be written into the folder."""
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(PROBE_BYTES))
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        if error.errno in FULL:
            return f"the disk of {folder} is full: {error.strerror}{_free(folder)}"
    return ""


def is_of_full_disk(words: str) -> bool:
    """Whether an error says that a disk is full."""
    return any(os.strerror(number) in words for number in FULL)


def _free(folder: Path) -> str:
    with suppress(OSError):
        usage = shutil.disk_usage(folder)
        return f"; {bytes_text(usage.free)} of {bytes_text(usage.total)} are free"
    return ""


def other_failures(state: AttemptState, first: int | None) -> tuple[OtherFailure, ...]:
    """The failures besides that of rank `first`; None: the failure was of no rank. Those that are
    no echo come first."""
    records = [record for record in state.failures if record["rank"] != first]
    causes = {record["rank"]: record["error"] for record in records if not record["is_echo"]}
    echoes = {record["rank"]: record["error"] for record in records if record["is_echo"]}
    known = {record["rank"] for record in state.failures} | {first}
    killed = {rank: code for rank, code in state.ended_ranks.items() if rank not in known}
    return (*_alike(causes), *_endings(killed), *_echo(echoes))


def _alike(errors: dict[int, str]) -> Iterator[OtherFailure]:
    """Errors that differ in a rank's own values only are one."""
    for entry in merge_logs({rank: [error or UNSAID] for rank, error in errors.items()}):
        yield OtherFailure(entry.ranks, entry.text, is_echo=False)


def _echo(errors: dict[int, str]) -> Iterator[OtherFailure]:
    """All echoes together, with the words that most of them have in common."""
    if errors:
        most = max(_alike(errors), key=lambda other: len(other.ranks))
        yield OtherFailure(tuple(sorted(errors)), most.error, is_echo=True)


def _endings(codes: dict[int, int]) -> Iterator[OtherFailure]:
    """Ranks without a record that a signal ended."""
    by_code: defaultdict[int, list[int]] = defaultdict(list)
    for rank, code in sorted(codes.items()):
        if code < 0:
            by_code[code].append(rank)
    for code, ranks in by_code.items():
        yield OtherFailure(tuple(ranks), f"killed by signal {-code}", is_echo=False)


@dataclass(frozen=True)
class AttemptEvidence:
    """What the supervisor saw of an attempt.

    phase: in which it ended, ENDED where the supervisor ended it; stop_requested: its ranks were
    asked to save and end; stopped: ranks whose process was
    stopped when it failed; hang: why the supervisor ended it; state: of all hosts and ranks at the
    end.
    """

    phase: AttemptPhase = AttemptPhase.ENDED
    stopped: tuple[int, ...] = ()
    hang: HangReport | None = None
    state: AttemptState = field(default_factory=AttemptState)
    stop_requested: bool = False


def without_ranks(error: str, run: RunDir) -> Failure:
    """The failure of an attempt that ended before a rank was started."""
    return Failure(None, error, log=str(run.launcher_log))


def find_failure(run: RunDir, job: JobSpec, world_size: int, evidence: AttemptEvidence) -> Failure:
    """The most likely cause, in this order: a recorded error, that of a full disk before others, a
    host that was lost, a stopped rank, a hang that the supervisor saw, a torchrun that was killed,
    a rank that ended without a record, the first echo of a lost peer. Where the disk of the run is
    full, that comes before all, and only a recorded error is named beside it."""
    failure = _find_failure(run, job, world_size, evidence)
    if full := full_disk_text(run.path):
        is_known = any(not record["is_echo"] for record in evidence.state.failures)
        failure = failure if is_known else without_ranks("", run)
        error = f"{full}; {failure.error}" if is_known else full
        failure = replace(failure, error=error, would_repeat=True)
    failure = replace(failure, others=other_failures(evidence.state, failure.rank))
    if failure.rank is None or len(evidence.state.nodes) < 2:
        return failure
    host = next((n.host for n in evidence.state.nodes if failure.rank in n.ranks), "")
    return replace(failure, host=host)


def _find_failure(run: RunDir, job: JobSpec, world_size: int, evidence: AttemptEvidence) -> Failure:
    records = evidence.state.failures
    causes = [record for record in records if not record["is_echo"]]
    if causes:
        return _recorded(run, min(causes, key=lambda r: not is_of_full_disk(r["error"])))
    if lost := evidence.state.lost:
        error = f"host {lost[0].host} (node {lost[0].node}): {lost[0].lost}"
        return _of_no_rank(run, error, evidence.state)
    if evidence.stopped:
        return _stopped(run, job, evidence)
    if evidence.hang is not None:
        rank, error = evidence.hang.rank, evidence.hang.error
        if rank is None:
            return _of_no_rank(run, error, evidence.state)
        return _unrecorded(run, job, rank, error, evidence.state)
    if killed := next((node for node in evidence.state.nodes if node.killed_by), None):
        error = _torchrun_ending(evidence.state, killed)
        return _of_no_rank(run, error, evidence.state, run.node_log(killed.node))
    rank = _likeliest_without_record(run, world_size, records, evidence)
    if rank is not None:
        return _ended(run, job, rank, evidence)
    if records:
        return _recorded(run, records[0])
    return _of_no_rank(run, _torchrun_ending(evidence.state), evidence.state)


def _likeliest_without_record(
    run: RunDir, world_size: int, records: list[FailureRecord], evidence: AttemptEvidence
) -> int | None:
    """The likeliest cause among the ranks that left neither a report nor a record; None when
    nothing shows that a rank ended by itself."""
    known = evidence.state.finished_ranks | {record["rank"] for record in records}
    unknown = [rank for rank in range(world_size) if rank not in known]
    ended_alone = records or evidence.phase is AttemptPhase.SUCCEEDED or evidence.state.ended_ranks
    if not (unknown and ended_alone):
        return None
    return min(unknown, key=lambda rank: _kind_of_ending(run, rank, evidence.state))


def _kind_of_ending(run: RunDir, rank: int, state: AttemptState) -> int:
    """How a rank without a record ended, the likeliest cause first: killed or failed, exited with
    code 0, terminated by torchrun or with it, aborted because it waited too long."""
    if rank in state.exit_codes:
        code = state.ended_ranks.get(rank)
        if code == -signal.SIGABRT and WATCHDOG in _end_of(run.log(rank)):
            return TIMED_OUT
        return TERMINATED if code is None else FAILED
    # A torchrun that came to its end names every rank that did not exit with code 0.
    complete = (node for node in state.nodes if node.exit_codes or node.code == 0)
    return EXITED if any(rank in node.ranks for node in complete) else TERMINATED


def _recorded(run: RunDir, record: FailureRecord) -> Failure:
    failure = _failure(run, record["rank"], record["coords"], record["error"], record["doing"])
    is_cause = not record["is_echo"]
    return replace(failure, would_repeat=is_cause, rollback=record.get("rollback"))


def _unrecorded(run: RunDir, job: JobSpec, rank: int, error: str, state: AttemptState) -> Failure:
    coords = job_topology(job).whole_coords(rank)
    seen = state.ranks.get(rank, RankState()).breadcrumb
    doing = seen.doing or f"step {run.last_step() + 1}"
    return _failure(run, rank, coords, error, doing)


def _of_no_rank(run: RunDir, error: str, state: AttemptState, log: Path | None = None) -> Failure:
    """A failure of all ranks, or of what they run on; doing: what the first of them did whose words
    are known."""
    log = log or run.torchrun_log
    said = (state.ranks[rank].breadcrumb.doing for rank in sorted(state.ranks))
    doing = next(filter(None, said), "start")
    return Failure(None, error, {}, doing, str(log), _last_lines(log))


def _failure(run: RunDir, rank: int, coords: dict[str, int], error: str, doing: str) -> Failure:
    log = run.log(rank)
    if not log.exists():  # it ended before it could open one
        log = run.torchrun_log
    return Failure(rank, error, coords, doing, str(log), _last_lines(log))


def _stopped(run: RunDir, job: JobSpec, evidence: AttemptEvidence) -> Failure:
    """The first stopped rank, and the collective in which others wait for it."""
    rank, error = evidence.stopped[0], stopped_text(list(evidence.stopped))
    missed = blocked_in(evidence.state.collectives(), rank, queued=job.launch.device == "cuda")
    return _unrecorded(run, job, rank, f"{error}; it {missed}" if missed else error, evidence.state)


def _ended(run: RunDir, job: JobSpec, rank: int, evidence: AttemptEvidence) -> Failure:
    """A rank that ended without a record, and the collective that it did not join. Where no rank
    ended by itself, the one that the others waited for."""
    progress, queued = evidence.state.collectives(), job.launch.device == "cuda"
    if _kind_of_ending(run, rank, evidence.state) in (TERMINATED, TIMED_OUT):
        verdict = ended_verdict(progress, queued=queued) or nccl_verdict(
            {rank: _end_of(run.log(rank)) for rank in range(job.world_size)}
        )
        if verdict is not None and verdict.rank is not None:
            return _unrecorded(run, job, verdict.rank, verdict.error, evidence.state)
    error = _ending(run, rank, evidence.state)
    missed = blocked_in(progress, rank, queued=queued)
    error = f"{error}; it {missed}" if missed else error
    failure = _unrecorded(run, job, rank, error, evidence.state)
    code, kills = evidence.state.exit_codes.get(rank, 0), evidence.state.memory_kills
    crashed = code > 0 or -code in CRASHES or (code == -signal.SIGKILL and kills)
    return replace(failure, would_repeat=bool(crashed))


def _ending(run: RunDir, rank: int, state: AttemptState) -> str:
    """How a rank without a record ended, in words."""
    kind = _kind_of_ending(run, rank, state)
    if kind == TIMED_OUT:
        return f"timed out waiting for its peers (NCCL: {WATCHDOG})"
    if kind == TERMINATED:
        return "did not answer its peers, which timed out waiting for it"
    if kind == EXITED:
        return "exited with code 0 before the last step"
    code = state.exit_codes[rank]
    if code >= 0:
        return f"exited with code {code} without a traceback"
    return f"killed by {_signal_text(-code, state.memory_kills)}"


def _torchrun_ending(state: AttemptState, killed: NodeState | None = None) -> str:
    """What is known when no rank left anything. killed: the host whose torchrun was killed."""
    ranks = state.ranks if killed is None else killed.ranks
    has_started = any(rank.breadcrumb.start for rank in ranks.values())
    when = "with its ranks" if has_started else "before its ranks had started"
    if killed is None:
        return f"torchrun ended {when}{f': {OUT_OF_MEMORY}' if state.memory_kills else ''}"
    where = f" on host {killed.host}" if len(state.nodes) > 1 else ""
    why = _signal_text(killed.killed_by, killed.memory_kills)
    return f"torchrun{where}, {when}, was killed by {why}"


def _signal_text(number: int, memory_kills: int) -> str:
    """`signal 9 (SIGKILL, often sent by the kernel when memory runs out)`."""
    return f"signal {number} ({_signal_name(number)}{_memory_hint(number, memory_kills)})"


def _memory_hint(number: int, memory_kills: int) -> str:
    if memory_kills:
        return f": {OUT_OF_MEMORY}"
    return ", often sent by the kernel when memory runs out" if number == signal.SIGKILL else ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def _last_lines(log: Path) -> tuple[str, ...]:
    """The last LAST_LINES of a log, from the last step on: losses of earlier steps tell nothing."""
    lines = _end_of(log).splitlines()[-LAST_LINES:]
    steps = [index for index, line in enumerate(lines) if STEP.match(line)]
    return tuple(lines[steps[-1] :] if steps else lines)


def _end_of(log: Path) -> str:
    """The last TAIL_BYTES of a log."""
    if not log.exists():
        return ""
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - TAIL_BYTES))
        return stream.read().decode("utf-8", errors="replace")
