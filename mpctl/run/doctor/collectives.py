"""Starts the ranks of one host for a timed all-reduce: `python -m mpctl.run.doctor.collectives` reads a
CollectiveRequest from stdin (JSON) and prints a CollectiveReport.

Each rank is a process of train/runtime/probes/all_reduce.py, which imports torch. A rank that fails or
times out is killed with the others, and the report has its last error.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from mpctl.run.doctor.documents import CollectiveReport, CollectiveRequest, CollectiveTiming
from mpctl.run.hosts.modules import child_environment, end_with_parent

RANK_MODULE = "mpctl.train.runtime.probes.all_reduce"
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
TIMINGS = TypeAdapter(list[CollectiveTiming])
POLL_SECONDS = 0.05
AFTER_FAILURE_SECONDS = 2.0


@dataclass(frozen=True)
class StartedRank:
    """A rank's process and the files that its output goes to."""

    rank: int
    process: subprocess.Popen[bytes]
    output: Path
    errors: Path

    @property
    def has_failed(self) -> bool:
        """Whether it has ended with an exit code other than 0."""
        return bool(self.process.poll())

    def words(self) -> str:
        """Reason of the failure: the last line of its traceback, or that it did not end."""
        text = self.errors.read_text("utf-8", errors="replace")
        lines = [line.strip() for line in text.splitlines()]
        said = [line for line in lines if "Error" in line] or [line for line in lines if line]
        if self.process.returncode == -9 and not said:
            return "it did not end in time"
        return said[-1] if said else f"exit code {self.process.returncode}"


def run_ranks(request: CollectiveRequest) -> CollectiveReport:
    """Run this host's ranks to their end, at most `seconds`."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ranks = [_start(request, local, folder, stack) for local in range(request.ranks)]
        failed = _wait(ranks, request.seconds)
        errors = {str(rank.rank): rank.words() for rank in failed}
        measures = bool(ranks) and not errors and request.first_rank == 0
        timings = _timings(ranks[0]) if measures else []
    return CollectiveReport(
        backend=BACKENDS[request.device], hosts=1, world_size=request.world_size, timings=timings, errors=errors
    )


def rank_variables(request: CollectiveRequest, local: int) -> dict[str, str]:
    """The environment that torch's `env://` reads, for rank `local` of this host."""
    variables = {
        "RANK": str(request.first_rank + local),
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": str(request.world_size),
        "MASTER_ADDR": request.address,
        "MASTER_PORT": str(request.port),
        "OMP_NUM_THREADS": "1",
    }
    if request.interface:
        variables |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), request.interface)
    return variables


def _start(request: CollectiveRequest, local: int, folder: Path, stack: ExitStack) -> StartedRank:
    output, errors = folder / f"{local}.out", folder / f"{local}.err"
    with output.open("wb") as stdout, errors.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", RANK_MODULE, request.device],
            env={**child_environment(), **rank_variables(request, local)},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
        )
    stack.callback(process.wait)
    stack.callback(process.kill)
    return StartedRank(request.first_rank + local, process, output, errors)


def _wait(ranks: Sequence[StartedRank], seconds: float) -> list[StartedRank]:
    """Wait for all ranks; returns those that failed or timed out.

    Peers of a failed rank get a moment to report their errors; those that only waited are not
    failures.
    """
    deadline, first_failure = time.monotonic() + seconds, None
    while any(rank.process.poll() is None for rank in ranks):
        now = time.monotonic()
        if first_failure is None and any(rank.has_failed for rank in ranks):
            first_failure = now
        if now > deadline or (first_failure is not None and now > first_failure + AFTER_FAILURE_SECONDS):
            break
        time.sleep(POLL_SECONDS)
    failed = [rank for rank in ranks if rank.has_failed]
    late = [rank for rank in ranks if rank.process.poll() is None]
    for rank in late:
        rank.process.kill()
        rank.process.wait()
    return failed or late


def _timings(rank: StartedRank) -> list[CollectiveTiming]:
    """The timings that rank 0 has printed; [] if they cannot be parsed."""
    lines = rank.output.read_text("utf-8", errors="replace").splitlines()
    try:
        return TIMINGS.validate_json(lines[-1]) if lines else []
    except ValidationError:
        return []


def main() -> None:
    end_with_parent()
    report = run_ranks(CollectiveRequest.model_validate_json(sys.stdin.read()))
    print(report.model_dump_json(), flush=True)


if __name__ == "__main__":
    main()
