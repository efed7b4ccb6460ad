"""Which rank ended a run, and why, out of what every rank left behind.

A rank that fails by an exception leaves a record that says whether it is only an echo of a lost
peer. A rank killed by a signal leaves nothing; torchrun's summary then has its exit code. A stopped
one (SIGSTOP, a debugger) is seen in its process state. Ranks that torchrun itself terminated
afterwards (SIGTERM) are the cause only when their peers waited for them in vain. What a rank
without a record was doing is in its trail (runtime/process.py).
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpctl.launch.rundir import RunDir
from mpctl.spec.job import JobSpec
from mpctl.topology import Topology

LAST_LINES = 15
ENTRY = re.compile(r"rank\s*:\s*(\d+) \(local_rank.*?exitcode\s*:\s*(-?\d+)", re.S)


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
    run: RunDir, job: JobSpec, world_size: int, *, stopped: tuple[int, ...] = ()
) -> Failure:
    """The most likely cause: a real error, a stopped rank, a silent death, else the first echo."""
    records = sorted(run.documents("failures"), key=lambda record: record["time"])
    causes = [record for record in records if not record["is_echo"]]
    if causes:
        return _recorded(run, causes[0])
    if stopped:
        why = "its process is stopped (SIGSTOP, a debugger?), so its peers waited in vain"
        return _silent(run, job, stopped[0], why)
    done = {int(document["rank"]) for document in run.documents("ranks")}
    known = done | {int(record["rank"]) for record in records}
    codes = _exit_codes(run)
    silent = [rank for rank in range(world_size) if rank not in known]
    killed = [rank for rank in silent if codes.get(rank) not in (None, -signal.SIGTERM)]
    if killed or (silent and records):
        rank = (killed or silent)[0]
        return _silent(run, job, rank, _ending(codes.get(rank)))
    if records:
        return _recorded(run, records[0])
    log = run.torchrun_log
    return Failure(None, {}, "torchrun ended before its workers", "start", str(log), _tail(log))


def port_was_taken(run: RunDir) -> bool:
    """Whether torchrun found its port in use, before any rank began."""
    return "EADDRINUSE" in run.torchrun_words() and not run.has_failures


def _recorded(run: RunDir, record: dict[str, Any]) -> Failure:
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


def _ending(code: int | None) -> str:
    if code in (None, -signal.SIGTERM):
        return "did not answer its peers, who waited for it in vain"
    if code >= 0:
        return f"ended with exit code {code} without a word"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = str(-code)
    hint = ", often the kernel short of memory" if -code == signal.SIGKILL else ""
    return f"killed by signal {-code} ({name}{hint})"


def _exit_codes(run: RunDir) -> dict[int, int]:
    """What torchrun's last summary says of each rank that did not end well."""
    found = ENTRY.findall(run.torchrun_words().rpartition("FAILED")[2])
    return {int(rank): int(code) for rank, code in found}


def _tail(log: Path) -> tuple[str, ...]:
    text = log.read_text("utf-8", errors="replace") if log.exists() else ""
    return tuple(text.splitlines()[-LAST_LINES:])
