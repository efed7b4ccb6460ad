"""The state of an attempt, as the supervisor sees it, whether on one host or on many.

An attempt starts a new torchrun on every host, in the order of the plan's nodes. The state of one
host is a NodeState: the processes of its ranks, what they write about themselves, how torchrun
ended. The supervisor, the watch for hangs and the diagnosis read only these states, so that they
work the same for child processes of the launcher (node/torchrun.py) and for ranks that a node agent
reports (control/cluster.py).

An attempt goes through the phases of AttemptPhase, never back (NEXT).

Only the host of a rank sees its process and its breadcrumb. The launcher gets both from the node
agents and writes them to RUN/nodes/status.json (status_file.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from errno import EADDRINUSE
from functools import cached_property
from itertools import chain
from typing import Literal

import psutil

from mpctl.records.rundir.breadcrumb import FINISHED, JOINED, BreadcrumbState
from mpctl.records.rundir.collective_log import CollectiveProgress
from mpctl.records.rundir.rank_files import FailureRecord
from mpctl.records.rundir.slow import SlowPart
from mpctl.records.rundir.summary import Failure, RunStatus

STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
REPORTS_PER_SECOND = 500
LAUNCHER_ABSENT = "the launcher did not run"
"""First words of the loss of a host that ended its ranks because the launcher did not run."""


def report_seconds(hosts: int) -> float:
    """Seconds between two reports of a host about ranks that run on: 1, with many hosts more, so
    that the launcher reads at most REPORTS_PER_SECOND. That ranks have joined, failed or ended is
    reported at once."""
    return max(1.0, hosts / REPORTS_PER_SECOND)


class AttemptPhase(StrEnum):
    """Progress of an attempt.

    starting: until all ranks have joined the others; running; stopping: the ranks were asked to
    finish their step, save and end; failing: a rank or a host has failed, and others still run;
    succeeded: torchrun ended with code 0 on every host; failed: it ended everywhere, or its host
    was lost, and not only with code 0; ended: the launcher ended what still ran.
    """

    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    FAILING = "failing"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    ENDED = "ended"

    @property
    def is_over(self) -> bool:
        """Whether no process of the attempt runs any more."""
        return not NEXT[self]

    def then(self, observed: AttemptPhase) -> AttemptPhase:
        """The next phase when the hosts are in phase `observed`: that one if the attempt can enter
        it from this one, else this one.

        >>> AttemptPhase.STOPPING.then(AttemptPhase.RUNNING)
        <AttemptPhase.STOPPING: 'stopping'>
        """
        return observed if observed in NEXT[self] else self

    @classmethod
    def of(cls, code: int | None, *, is_failing: bool, has_joined: bool) -> AttemptPhase:
        """The phase of one host. code: of torchrun, None while it runs; is_failing: whether a rank
        has recorded a failure; has_joined: whether all ranks have joined the others."""
        if code is not None:
            return cls.FAILED if code else cls.SUCCEEDED
        if is_failing:
            return cls.FAILING
        return cls.RUNNING if has_joined else cls.STARTING

    @classmethod
    def of_hosts(cls, phases: Iterable[AttemptPhase]) -> AttemptPhase:
        """Return the phase of an attempt from those of its hosts."""
        found = set(phases)
        if all(phase.is_over for phase in found):
            return cls.FAILED if found - {cls.SUCCEEDED} else cls.SUCCEEDED
        if found & {cls.FAILING, cls.FAILED, cls.ENDED}:
            return cls.FAILING
        return cls.STARTING if cls.STARTING in found else cls.RUNNING


_ENDS = frozenset({AttemptPhase.SUCCEEDED, AttemptPhase.FAILED, AttemptPhase.ENDED})
NEXT: Mapping[AttemptPhase, frozenset[AttemptPhase]] = {
    AttemptPhase.STARTING: _ENDS | {AttemptPhase.RUNNING, AttemptPhase.STOPPING, AttemptPhase.FAILING},
    AttemptPhase.RUNNING: _ENDS | {AttemptPhase.STOPPING, AttemptPhase.FAILING},
    AttemptPhase.STOPPING: _ENDS | {AttemptPhase.FAILING},
    AttemptPhase.FAILING: _ENDS,
    AttemptPhase.SUCCEEDED: frozenset(),
    AttemptPhase.FAILED: frozenset(),
    AttemptPhase.ENDED: frozenset(),
}
"""The phases that may follow each phase."""


@dataclass(frozen=True)
class RankState:
    """A rank as its host sees it.

    process: the state of its process by psutil's name, empty when there is none or it cannot be
    read; processor_seconds: processor time used so far; breadcrumb: what it wrote about itself.
    major_faults: page faults so far that had to wait for a disk; swapped_bytes: of its memory in
    swap space.
    """

    process: str = ""
    processor_seconds: float = 0.0
    breadcrumb: BreadcrumbState = field(default_factory=BreadcrumbState)
    major_faults: int = 0
    swapped_bytes: int = 0

    @property
    def is_stopped(self) -> bool:
        """Whether SIGSTOP or a debugger stopped the process."""
        return self.process in STOPPED


@dataclass(frozen=True)
class NodeState:
    """State of an attempt as last reported by one host.

    node: its index in the plan; torchrun: the state of torchrun's process; ranks: of this host, by rank. code:
    torchrun's exit code, None while it runs; killed_by: the signal that killed it, 0 if none did or the launcher sent
    it. exit_codes: of the ranks that torchrun reports as failed, by rank; terminated: those that torchrun ended itself
    after another had failed. failures: records of ranks that an exception ended. memory_kills: processes killed by the
    kernel since the attempt began because memory ran out. lost: why the host no longer answers, empty while it does.
    unkilled: ids of processes that ran on after SIGKILL when the attempt was ended. ended: leftover processes of a
    program that were ended, `sleep (4711)`.
    """

    node: int = 0
    host: str = ""
    torchrun: str = ""
    ranks: Mapping[int, RankState] = field(default_factory=dict)
    code: int | None = None
    killed_by: int = 0
    exit_codes: Mapping[int, int] = field(default_factory=dict)
    terminated: Sequence[int] = ()
    failures: Sequence[FailureRecord] = ()
    memory_kills: int = 0
    lost: str = ""
    unkilled: Sequence[int] = ()
    ended: Sequence[str] = ()

    @cached_property
    def phase(self) -> AttemptPhase:
        """The phase of the attempt on this host. A lost host counts as failed."""
        starts = [rank.breadcrumb.start for rank in self.ranks.values()]
        return AttemptPhase.of(
            1 if self.lost else self.code, is_failing=bool(self.failures), has_joined=min(starts, default=0) >= JOINED
        )


@dataclass(frozen=True)
class AttemptState:
    """All hosts of an attempt at one moment, in the order of the plan's nodes."""

    nodes: Sequence[NodeState] = ()

    @cached_property
    def ranks(self) -> Mapping[int, RankState]:
        """Every rank that a host has reported, by rank."""
        return {rank: state for node in self.nodes for rank, state in sorted(node.ranks.items())}

    @property
    def failures(self) -> list[FailureRecord]:
        """The failures that ranks recorded, earliest first by the launcher's clock."""
        records = chain.from_iterable(node.failures for node in self.nodes)
        return sorted(records, key=lambda record: record["time"])

    @property
    def exit_codes(self) -> dict[int, int]:
        """The exit codes of the ranks that torchrun names as failed, by rank."""
        return {rank: code for node in self.nodes for rank, code in node.exit_codes.items()}

    @property
    def ended_ranks(self) -> dict[int, int]:
        """The exit codes of the ranks that torchrun did not end: they failed by themselves, or were
        killed by something else."""
        terminated = {rank for node in self.nodes for rank in node.terminated}
        return {rank: code for rank, code in self.exit_codes.items() if rank not in terminated}

    @property
    def lost(self) -> list[NodeState]:
        return [node for node in self.nodes if node.lost]

    @property
    def phase(self) -> AttemptPhase:
        """The phase of the attempt, by the states of its hosts."""
        return AttemptPhase.of_hosts(node.phase for node in self.nodes)

    @property
    def finished_ranks(self) -> set[int]:
        return {r for r, state in self.ranks.items() if state.breadcrumb.start == FINISHED}

    @property
    def memory_kills(self) -> int:
        return sum(node.memory_kills for node in self.nodes)

    @property
    def port_taken(self) -> bool:
        """Whether torchrun found the rendezvous port in use."""
        return any(node.code == EADDRINUSE for node in self.nodes) and not self.failures

    def stopped_ranks(self) -> tuple[int, ...]:
        """Return the ranks with a stopped process: SIGTERM does not end them."""
        return tuple(rank for rank, state in sorted(self.ranks.items()) if state.is_stopped)

    def collectives(self) -> dict[int, CollectiveProgress]:
        """Return the progress of each rank in the collectives of its groups."""
        return {rank: state.breadcrumb.collectives for rank, state in self.ranks.items()}

    def doing(self) -> dict[int, str]:
        """Return the reported activity of each rank."""
        return {rank: state.breadcrumb.doing for rank, state in self.ranks.items()}


@dataclass(frozen=True)
class RunChange:
    """An attempt has failed, the run starts again, or it has ended; or what holds it up has
    changed. attempt: the one that has ended, or runs; status: how it ended; words: what the
    launcher does about a failure, and why, or what is slow or is no longer; slow: all that is."""

    event: Literal["failure", "restart", "end", "slow"]
    attempt: int
    status: RunStatus | Literal["running"]
    failure: Failure | None = None
    words: str = ""
    slow: Sequence[SlowPart] = ()
