"""Which rank ended a run, and why, out of what every rank left behind.

A rank that fails by an exception leaves a record that says whether it is only an echo of a lost
peer. A rank killed by a signal leaves nothing; torchrun's summary then has its exit code. One that
left by itself with exit code 0 is neither there nor in the summary. A stopped one (SIGSTOP, a
debugger) is seen in its process state. Ranks that torchrun itself terminated afterwards (SIGTERM),
and those that NCCL's watchdog aborted because they waited too long, are the cause only when nothing
else is. What a rank without a record was doing is in its trail (mpctl/rundir/breadcrumb.py).
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from pathlib import Path

from mpctl.launch.watch import HangReport, stopped_text
from mpctl.rundir.directory import RunDir
from mpctl.rundir.rank_files import FailureRecord
from mpctl.spec.job import JobSpec
from mpctl.topology import Topology

LAST_LINES = 15
TAIL_BYTES = 65536
ENTRY = re.compile(r"rank\s*:\s*(\d+) \(local_rank.*?exitcode\s*:\s*(-?\d+)", re.S)
OUT_OF_MEMORY = (
    "memory ran out, the kernel killed a process of this control group; use a smaller model or "
    "micro batch, fewer ranks, or a higher limit"
)
WATCHDOG = "Watchdog caught collective operation timeout"


@dataclass(frozen=True)
class AttemptEvidence:
    """What the supervisor saw of an attempt.

    code: torchrun's exit code, None where the supervisor ended it; stopped: ranks whose process was
    stopped when it failed; trouble: why the supervisor ended it; memory_kills: processes that the
    kernel killed in the meantime because the control group's memory ran out.
    """

    code: int | None = None
    stopped: tuple[int, ...] = ()
    trouble: HangReport | None = None
    memory_kills: int = 0


@dataclass(frozen=True)
class Failure:
    """The rank that failed first, where it sits, what it did, and the end of its log."""

    rank: int | None
    coords: dict[str, int]
    error: str
    doing: str
    log: str
    last_lines: tuple[str, ...]

    def __str__(self) -> str:
        if self.rank is None:
            return f"{self.error} ({self.log})"
        place = ", ".join(f"{axis} {index}" for axis, index in self.coords.items())
        return f"rank {self.rank} ({place}) failed at {self.doing}: {self.error}"


def find_failure(
    run: RunDir, job: JobSpec, world_size: int, evidence: AttemptEvidence = AttemptEvidence()
) -> Failure:
    """The most likely cause: a real error, a stopped rank, what the supervisor saw, a rank that
    ended without a record, else the first echo."""
    records = sorted(run.failure_records(), key=lambda record: record["time"])
    causes = [record for record in records if not record["is_echo"]]
    if causes:
        return _recorded(run, causes[0])
    if evidence.stopped:
        return _silent(run, job, evidence.stopped[0], stopped_text(list(evidence.stopped)))
    if evidence.trouble is not None:
        rank, error = evidence.trouble.rank, evidence.trouble.error
        return _nobody(run, error) if rank is None else _silent(run, job, rank, error)
    done = {int(document["rank"]) for document in run.rank_reports()}
    known = done | {int(record["rank"]) for record in records}
    codes = _exit_codes(run)
    unknown = [rank for rank in range(world_size) if rank not in known]
    tells = records or evidence.code == 0 or set(codes.values()) - {-signal.SIGTERM}
    if unknown and tells:
        rank = min(unknown, key=lambda rank: _innocence(run, rank, codes))
        return _silent(run, job, rank, _ending(run, rank, codes, evidence))
    if records:
        return _recorded(run, records[0])
    has_started = any(run.breadcrumb(rank).start for rank in range(world_size))
    return _nobody(run, _torchrun_ending(evidence, has_started=has_started))


def _innocence(run: RunDir, rank: int, codes: dict[int, int]) -> int:
    """Ranks that left no record, the most likely cause first: killed or ended with an error, ended
    with code 0, terminated by torchrun, aborted because it waited too long."""
    code = codes.get(rank)
    if code == -signal.SIGABRT and WATCHDOG in _end_of(run.log(rank)):
        return 3
    return 1 if code is None else 2 if code == -signal.SIGTERM else 0


def port_was_taken(run: RunDir) -> bool:
    """Whether torchrun found its port in use, before any rank began."""
    return "EADDRINUSE" in run.torchrun_output() and not run.has_failures


def _recorded(run: RunDir, record: FailureRecord) -> Failure:
    return _failure(run, record["rank"], record["coords"], record["error"], record["doing"])


def _silent(run: RunDir, job: JobSpec, rank: int, error: str) -> Failure:
    coords = Topology.of(job.sizes, order=job.parallel.order).coords(rank)
    doing = run.doing(rank) or f"step {run.last_step() + 1}"
    return _failure(run, rank, coords, error, doing)


def _failure(run: RunDir, rank: int, coords: dict[str, int], error: str, doing: str) -> Failure:
    log = run.log(rank)
    if not log.exists():  # it ended before it could open one
        log = run.torchrun_log
    return Failure(rank, coords, error, doing, str(log), _tail(log))


def _ending(run: RunDir, rank: int, codes: dict[int, int], evidence: AttemptEvidence) -> str:
    code = codes.get(rank)
    if _innocence(run, rank, codes) == 3:
        return f"waited for its peers until the time-out (NCCL: {WATCHDOG})"
    if code == -signal.SIGTERM or (code is None and not codes and evidence.code != 0):
        return "did not answer its peers, which timed out waiting for it"
    if code is None:
        return "ended with exit code 0 before the last step"
    if code >= 0:
        return f"ended with exit code {code} without a traceback"
    return f"killed by signal {-code} ({_signal_name(-code)}{_memory_hint(-code, evidence)})"


def _torchrun_ending(evidence: AttemptEvidence, *, has_started: bool) -> str:
    """What is known when no rank left anything."""
    when = "with its ranks" if has_started else "before its ranks had started"
    if evidence.code is not None and evidence.code < 0:
        number = -evidence.code
        why = f"{_signal_name(number)}{_memory_hint(number, evidence)}"
        return f"torchrun, {when}, was killed by signal {number} ({why})"
    why = f": {OUT_OF_MEMORY}" if evidence.memory_kills else ""
    return f"torchrun ended {when}{why}"


def _memory_hint(number: int, evidence: AttemptEvidence) -> str:
    if evidence.memory_kills:
        return f": {OUT_OF_MEMORY}"
    return ", often the kernel short of memory" if number == signal.SIGKILL else ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def _exit_codes(run: RunDir) -> dict[int, int]:
    """What torchrun's last summary says of each rank that did not end well."""
    found = ENTRY.findall(run.torchrun_output().rpartition("FAILED")[2])
    return {int(rank): int(code) for rank, code in found}


def _tail(log: Path) -> tuple[str, ...]:
    return tuple(_end_of(log).splitlines()[-LAST_LINES:])


def _end_of(log: Path) -> str:
    """The last TAIL_BYTES of a log."""
    if not log.exists():
        return ""
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - TAIL_BYTES))
        return stream.read().decode("utf-8", errors="replace")


def _nobody(run: RunDir, error: str) -> Failure:
    """A failure that is not one rank's."""
    log = run.torchrun_log
    return Failure(None, {}, error, "start", str(log), _tail(log))
