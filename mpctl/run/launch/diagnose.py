"""Find the rank that ended a run, and the reason, from the traces of all ranks.

A rank that fails by an exception leaves a record, which says whether it only reports a lost peer. A
rank killed by a signal leaves none; torchrun's log then has its exit code. A rank that exited with
code 0 too early has neither. A stopped rank (SIGSTOP, a debugger) is recognised by its process
state. A torchrun that something killed took its ranks with it. Ranks that torchrun terminated
afterwards, and ranks that NCCL's watchdog aborted because they waited too long, are the cause only
when there is no other. What a rank without a record was doing is in its breadcrumb
(mpctl/records/rundir/breadcrumb.py). A rank of a program that ended well is the cause where others lost it
after that; one of mpctl's own does so after the last step.

When a rank of 512 dies, 511 ranks record that they lost a peer, each with another address. Only the
first failure and those that are not secondary are reported in full, the others counted
(`other_failures`). A full disk looks like other failures: ranks that end without a record, a
torchrun that cannot write its log. It is detected by writing a file, which also finds what free
bytes do not show, a quota or a lack of inodes.

A failure is blamed on a host (Failure.blamed) where its cause lies there, as far as is known: a
rank or a torchrun that was killed, a rank that was stopped or held up the others, a host that was
lost, an error of a device or a disk. Not an error of the program, which another host would raise
too, nor a rank that the kernel killed for its memory, nor a peer's time-out; and no host where
several show the same at once: then the network, the power or the program is the likelier cause.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path

from mpctl.core.units import bytes_text
from mpctl.model.layout.topology import job_topology
from mpctl.records.rundir.directory import RunDir
from mpctl.records.rundir.logs import STEP, merge_logs
from mpctl.records.rundir.rank_files import LOST_PEER_TEXTS, FailureRecord
from mpctl.records.rundir.summary import Failure, OtherFailure
from mpctl.run.hosts.probes import write_probe
from mpctl.run.launch.attempt import LAUNCHER_ABSENT, AttemptPhase, AttemptState, RankState
from mpctl.run.launch.verdict import WATCHDOG, Verdict, WaitGraph, ended_verdict, nccl_verdict
from mpctl.run.launch.watch import stopped_text
from mpctl.spec.job import JobSpec

PROBE_BYTES = 1 << 16
FULL = (errno.ENOSPC, errno.EDQUOT)
UNSAID = "an error without words"
LAST_LINES, LONGEST_LINE = 15, 1000
TAIL_BYTES = 65536
OUT_OF_MEMORY = (
    "memory ran out, and the kernel killed a process of this control group; use a smaller model or "
    "micro batch, fewer ranks, or a higher limit"
)
HOST_FAULTS = re.compile(
    r"uncorrectable (?:ECC|NVLink) error|CUDA error: (?:unknown error|unspecified launch failure|"
    r"hardware stack error|an illegal instruction|no CUDA-capable device)|busy or unavailable|"
    r"fallen off the bus|system not yet initialized|Input/output error|Read-only file system|"
    r"Stale file handle|Remote I/O error|Transport endpoint is not connected|Host is down|"
    r"No such device|Structure needs cleaning"
)
"""Errors of a device or a disk: CUDA's (cudaGetErrorString), and those of errno(3) that no program
causes."""
FAILED, EXITED, SECONDARY, TERMINATED, TIMED_OUT = range(5)
CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)


def full_disk_text(folder: Path) -> str:
    """Return `the disk of /runs/a is full: No space left on device; 0 B of 8.0 MiB are free`; empty if PROBE_BYTES can
    be written into the folder."""
    try:
        write_probe(folder, PROBE_BYTES)
    except OSError as error:
        if error.errno in FULL:
            return f"the disk of {folder} is full: {error.strerror}{_free(folder)}"
    return ""


def _free(folder: Path) -> str:
    with suppress(OSError):
        usage = shutil.disk_usage(folder)
        return f"; {bytes_text(usage.free)} of {bytes_text(usage.total)} are free"
    return ""


def other_failures(state: AttemptState, first: int | None) -> tuple[OtherFailure, ...]:
    """The failures other than that of rank `first`; None: the first failure was of no rank. Those
    that are not secondary come first."""
    records = [record for record in state.failures if record["rank"] != first]
    causes = {record["rank"]: record["error"] for record in records if not record["is_echo"]}
    secondary = {record["rank"]: record["error"] for record in records if record["is_echo"]}
    known = {record["rank"] for record in state.failures} | {first}
    killed = {rank: code for rank, code in state.ended_ranks.items() if rank not in known}
    return (*_alike(causes), *_endings(killed), *_secondary(secondary))


def _alike(errors: dict[int, str]) -> Iterator[OtherFailure]:
    """Merge errors that differ only in values of the rank."""
    for entry in merge_logs({rank: [error or UNSAID] for rank, error in errors.items()}):
        yield OtherFailure(entry.ranks, entry.text, is_echo=False)


def _secondary(errors: dict[int, str]) -> Iterator[OtherFailure]:
    """All secondary failures together, with the words that most of them have in common."""
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
    """Observations of an attempt by the supervisor.

    phase: its last one, ENDED if the supervisor ended it; stop_requested: whether its ranks were
    asked to save and end; stopped: ranks whose process was stopped when it failed; hang: why the
    supervisor ended it; state: of all hosts and ranks at the end.
    """

    phase: AttemptPhase = AttemptPhase.ENDED
    stopped: tuple[int, ...] = ()
    hang: Verdict | None = None
    state: AttemptState = field(default_factory=AttemptState)
    stop_requested: bool = False


def without_ranks(error: str, run: RunDir) -> Failure:
    """The failure of an attempt that ended before a rank was started."""
    return Failure(None, error, log=str(run.launcher_log))


def find_failure(run: RunDir, job: JobSpec, evidence: AttemptEvidence) -> Failure:
    """Find the most likely cause, in this order: a recorded error, that of a full disk before others, a lost host, a
    stopped rank, a hang that the supervisor saw, a killed torchrun, a rank that ended without a record, the first
    secondary failure by a lost peer. If the disk of the run is full, that comes before all, and only a recorded error
    is named with it."""
    state = evidence.state
    failure = FailedAttempt(run, job, evidence).cause()
    if full := full_disk_text(run.path):
        is_known = any(not record["is_echo"] for record in state.failures)
        failure = failure if is_known else without_ranks("", run)
        error = f"{full}; {failure.error}" if is_known else full
        failure = replace(failure, error=error, would_repeat=True, blamed="")
    failure = replace(failure, others=other_failures(state, failure.rank))
    if failure.rank is None or len(state.nodes) < 2:
        return failure
    host = next((n.host for n in state.nodes if failure.rank in n.ranks), "")
    return replace(failure, host=host)


class FailedAttempt:
    """The records of all ranks and hosts of a failed attempt, and the cause found in them."""

    def __init__(self, run: RunDir, job: JobSpec, evidence: AttemptEvidence) -> None:
        self.run, self.job, self.evidence, self.state = run, job, evidence, evidence.state
        progress = evidence.state.collectives()
        self.graph = WaitGraph(progress, queued=job.launch.device == "cuda")
        self.runs_program = bool(job.launch.program)
        nodes = evidence.state.nodes
        self.hosts = {rank: node.host for node in nodes for rank in node.ranks}

    def cause(self) -> Failure:
        """The most likely cause; `find_failure` has the order."""
        evidence, state, records = self.evidence, self.state, self.state.failures
        if causes := [record for record in records if not record["is_echo"]]:
            full = [os.strerror(number) for number in FULL]
            causes.sort(key=lambda r: not any(words in r["error"] for words in full))
            is_of_host = HOST_FAULTS.search(causes[0]["error"]) is not None
            failure = self._recorded(causes[0])
            return self._blamed(failure, (r["rank"] for r in causes)) if is_of_host else failure
        if lost := state.lost:
            if lost[0].lost.startswith(LAUNCHER_ABSENT):
                return self._of_no_rank(lost[0].lost)
            error = f"host {lost[0].host} (node {lost[0].node}): {lost[0].lost}"
            blamed = lost[0].host if len(lost) == 1 else ""
            return replace(self._of_no_rank(error), blamed=blamed)
        if evidence.stopped:
            rank = evidence.stopped[0]
            error = self._with_wait(rank, stopped_text(evidence.stopped))
            return self._blamed(self._unrecorded(rank, error), evidence.stopped)
        if evidence.hang is not None:
            hung, error = evidence.hang.rank, f"{evidence.hang.error}{self._ended_before()}"
            if hung is None:
                return self._of_no_rank(error)
            return self._blamed(self._unrecorded(hung, error), [hung])
        if killed := next((node for node in state.nodes if node.killed_by), None):
            where = f" on host {killed.host}" if len(state.nodes) > 1 else ""
            why = _signal_text(killed.killed_by, killed.memory_kills)
            error = f"torchrun{where}, {_when(killed.ranks)}, was killed by {why}"
            several = sum(node.killed_by > 0 for node in state.nodes) > 1
            blamed = "" if several or killed.memory_kills else killed.host
            return replace(self._of_no_rank(error, self.run.node_log(killed.node)), blamed=blamed)
        if (silent := self._likeliest_without_record(records)) is not None:
            return self._ended(silent)
        if records:
            return self._recorded(records[0])
        memory = f": {OUT_OF_MEMORY}" if state.memory_kills else ""
        return self._of_no_rank(f"torchrun ended {_when(state.ranks)}{memory}")

    def _ended_before(self) -> str:
        """`; rank 1 had ended with exit code 0 at step 15`, where ranks of a program that hung wait
        for it, perhaps; empty where no rank had."""
        if not self.runs_program or not (ended := self.state.finished_ranks):
            return ""
        first = min(ended, key=self._end_time)
        doing = self.state.ranks[first].breadcrumb.doing
        at = f" at {doing}" if doing else ""
        more = f" (and {len(ended) - 1} more)" if len(ended) > 1 else ""
        return f"; rank {first}{more} had ended with exit code 0{at}"

    def _likeliest_without_record(self, records: Sequence[FailureRecord]) -> int | None:
        """The likeliest cause among the ranks that left neither a report nor a record; None when
        nothing shows that a rank ended by itself."""
        began = records[0]["time"] if records else inf
        known = {record["rank"] for record in records} | {
            rank for rank in self.state.finished_ranks if not self.runs_program or self._end_time(rank) > began
        }
        unknown = [rank for rank in range(self.job.world_size) if rank not in known]
        has_succeeded = self.evidence.phase is AttemptPhase.SUCCEEDED
        if not (unknown and (records or has_succeeded or self.state.ended_ranks)):
            return None
        return min(unknown, key=lambda rank: (self._kind_of_ending(rank), self._end_time(rank)))

    def _end_time(self, rank: int) -> float:
        """Return when a rank of a program ended well, as far as its host knows."""
        is_known = rank in self.state.finished_ranks
        return self.state.ranks[rank].breadcrumb.text_time if is_known else 0.0

    def _kind_of_ending(self, rank: int) -> int:
        """Classify the end of a rank without a record, the likeliest cause first: killed or failed, exited with code 0,
        lost a peer by the last words of its program, terminated by torchrun or with it, aborted because it waited too
        long."""
        state = self.state
        if rank in state.exit_codes:
            code = state.ended_ranks.get(rank)
            if code == -signal.SIGABRT and WATCHDOG in end_of(self.run.log(rank)):
                return TIMED_OUT
            if self.runs_program and (code or 0) > 0 and self._has_lost_a_peer(rank):
                return SECONDARY
            return TERMINATED if code is None else FAILED
        if rank in state.finished_ranks:
            return EXITED
        # A torchrun that ended by itself names every rank that did not exit with code 0.
        complete = (node for node in state.nodes if node.exit_codes or node.code == 0)
        return EXITED if any(rank in node.ranks for node in complete) else TERMINATED

    def _has_lost_a_peer(self, rank: int) -> bool:
        """Whether the last lines of a rank's log say so; a program that is no script of the rank's
        own Python leaves no record."""
        words = "\n".join(_last_lines(self.run.log(rank))).lower()
        return any(text in words for text in LOST_PEER_TEXTS)

    def _ended(self, rank: int) -> Failure:
        """A rank that ended without a record, and the collective that it did not join. Where no
        rank ended by itself, the one that the others waited for."""
        kind, code = self._kind_of_ending(rank), self.state.exit_codes.get(rank, 0)
        kills = self.state.memory_kills
        if kind in (TERMINATED, TIMED_OUT):
            logs = {r: end_of(self.run.log(r)) for r in range(self.job.world_size)}
            verdict = ended_verdict(self.graph) or nccl_verdict(logs)
            if verdict is not None and verdict.rank is not None:
                held_up = self._unrecorded(verdict.rank, verdict.error)
                return self._blamed(held_up, [verdict.rank])
        if kind == TIMED_OUT:
            error = f"timed out waiting for its peers (NCCL: {WATCHDOG})"
        elif kind == TERMINATED:
            error = "did not answer its peers, which timed out waiting for it"
        elif kind == EXITED and self.runs_program:
            error = "ended with exit code 0, before the others"
        elif kind == EXITED:
            error = "exited with code 0 before the last step"
        elif code >= 0:
            error = f"exited with code {code} without a traceback"
        else:
            error = f"killed by {_signal_text(-code, kills)}"
        crashed = code > 0 or -code in CRASHES or (code == -signal.SIGKILL and kills)
        failure = self._unrecorded(rank, self._with_wait(rank, error))
        failure = replace(failure, would_repeat=bool(crashed))
        if kind != FAILED or code >= 0 or kills:
            return failure
        return self._blamed(failure, (r for r, c in self.state.ended_ranks.items() if c < 0))

    def _blamed(self, failure: Failure, ranks: Iterable[int]) -> Failure:
        """The failure, blamed on the host of these ranks where it is one."""
        hosts = {self.hosts.get(rank, "") for rank in ranks}
        return replace(failure, blamed=hosts.pop()) if len(hosts) == 1 else failure

    def _with_wait(self, rank: int, error: str) -> str:
        """The error, and the collective in which others wait for the rank."""
        missed = self.graph.missed_by(rank)
        return f"{error}; it {missed}" if missed else error

    def _recorded(self, record: FailureRecord) -> Failure:
        failure = self._of_rank(record["rank"], record["coords"], record["error"], record["doing"])
        is_cause = not record["is_echo"]
        return replace(failure, would_repeat=is_cause, rollback=record.get("rollback"))

    def _unrecorded(self, rank: int, error: str) -> Failure:
        coords = job_topology(self.job).whole_coords(rank)
        seen = self.state.ranks.get(rank, RankState()).breadcrumb
        return self._of_rank(rank, coords, error, seen.doing or f"step {self.run.last_step() + 1}")

    def _of_rank(self, rank: int, coords: dict[str, int], error: str, doing: str) -> Failure:
        log = self.run.log(rank)
        if not log.exists():  # it ended before it could open one
            log = self.run.torchrun_log
        return Failure(rank, error, coords, doing, str(log), _last_lines(log))

    def _of_no_rank(self, error: str, log: Path | None = None) -> Failure:
        """A failure of no single rank; doing: that of the first rank that has written one."""
        log = log or self.run.torchrun_log
        said = (state.breadcrumb.doing for _, state in sorted(self.state.ranks.items()))
        doing = next(filter(None, said), "start")
        return Failure(None, error, {}, doing, str(log), _last_lines(log))


def _when(ranks: Mapping[int, RankState]) -> str:
    has_started = any(rank.breadcrumb.start for rank in ranks.values())
    return "with its ranks" if has_started else "before its ranks had started"


def _signal_text(number: int, memory_kills: int) -> str:
    """`signal 9 (SIGKILL, often sent by the kernel when memory runs out)`."""
    hint = ""
    if memory_kills:
        hint = f": {OUT_OF_MEMORY}"
    elif number == signal.SIGKILL:
        hint = ", often sent by the kernel when memory runs out"
    return f"signal {number} ({signal_name(number)}{hint})"


def signal_name(number: int) -> str:
    """`SIGKILL`; the number of a signal that has no name."""
    return next((known.name for known in signal.Signals if known == number), f"{number}")


def _last_lines(log: Path) -> tuple[str, ...]:
    """The last LAST_LINES of a log, from the last step on: losses of earlier steps do not help. Of
    a longer line its last LONGEST_LINE characters."""
    lines = [line[-LONGEST_LINE:] for line in end_of(log).splitlines()[-LAST_LINES:]]
    steps = [index for index, line in enumerate(lines) if STEP.match(line)]
    return tuple(lines[steps[-1] :] if steps else lines)


def end_of(log: Path) -> str:
    """Read the last TAIL_BYTES of a log; empty if there is none."""
    try:
        with log.open("rb") as stream:
            stream.seek(max(0, log.stat().st_size - TAIL_BYTES))
            return stream.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
