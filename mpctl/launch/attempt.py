"""The state of an attempt, as the supervisor sees it, whether on one host or on many.

An attempt starts torchrun anew on every host, in the order of the plan's nodes. What a host knows
of its share is one NodeState: the processes of its ranks, what they write about themselves, how
torchrun ended. The supervisor, the watch for hangs and the diagnosis read these states and nothing
else of a host, so that they are the same for ranks below this process (node/torchrun.py) and for
ranks that a node agent reports (control/cluster.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import psutil

from mpctl.rundir.breadcrumb import BreadcrumbState
from mpctl.rundir.collective_log import CollectiveProgress
from mpctl.rundir.rank_files import FailureRecord

STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


@dataclass(frozen=True)
class RankState:
    """A rank as its host sees it.

    process: the state of its process by psutil's name, empty when there is none or it cannot be
    read; processor_seconds: processor time used so far; breadcrumb: what it wrote about itself.
    major_faults: page faults so far that had to wait for a disk; swapped_bytes: of its memory that
    lie in swap space.
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
    """What one host last reported of an attempt.

    node: its index in the plan; torchrun: the state of torchrun's process; ranks: of this host, by
    rank. code: torchrun's exit code, None while it runs; killed_by: the signal that killed it, 0
    where none did or where the launcher sent it. exit_codes: of the ranks that torchrun names as
    failed, by rank; terminated: those of them that torchrun ended itself, after another one had
    failed; port_taken: torchrun found its port in use. failures: records of ranks that an exception
    ended. memory_kills: processes that the kernel killed since the attempt began because memory ran
    out. lost: why the host no longer answers, empty while it does. unkilled: ids of processes that
    ran on after SIGKILL when the attempt was ended.
    """

    node: int = 0
    host: str = ""
    torchrun: str = ""
    ranks: Mapping[int, RankState] = field(default_factory=dict)
    code: int | None = None
    killed_by: int = 0
    exit_codes: Mapping[int, int] = field(default_factory=dict)
    terminated: Sequence[int] = ()
    port_taken: bool = False
    failures: Sequence[FailureRecord] = ()
    memory_kills: int = 0
    lost: str = ""
    unkilled: Sequence[int] = ()

    @property
    def has_failed(self) -> bool:
        """Whether the attempt cannot succeed any more because of this host."""
        return bool(self.failures or self.code or self.lost)


@dataclass(frozen=True)
class AttemptState:
    """All hosts of an attempt at one moment, in the order of the plan's nodes."""

    nodes: Sequence[NodeState] = ()

    @property
    def ranks(self) -> dict[int, RankState]:
        """Every rank that a host has reported, by rank."""
        return {rank: state for node in self.nodes for rank, state in sorted(node.ranks.items())}

    @property
    def failures(self) -> list[FailureRecord]:
        """The failures that ranks recorded, the first one first, by the launcher's clock."""
        records = chain.from_iterable(node.failures for node in self.nodes)
        return sorted(records, key=lambda record: record["time"])

    @property
    def exit_codes(self) -> dict[int, int]:
        """The exit codes of the ranks that torchrun names as failed, by rank."""
        return {rank: code for node in self.nodes for rank, code in node.exit_codes.items()}

    @property
    def ended_ranks(self) -> dict[int, int]:
        """The exit codes of those that no torchrun ended: they failed by themselves, or were killed
        by something else."""
        terminated = {rank for node in self.nodes for rank in node.terminated}
        return {rank: code for rank, code in self.exit_codes.items() if rank not in terminated}

    @property
    def lost(self) -> list[NodeState]:
        """The hosts that no longer answer."""
        return [node for node in self.nodes if node.lost]

    @property
    def has_failed(self) -> bool:
        """Whether the attempt cannot succeed any more."""
        return any(node.has_failed for node in self.nodes)

    @property
    def memory_kills(self) -> int:
        """Processes that the kernels of all hosts killed because memory ran out."""
        return sum(node.memory_kills for node in self.nodes)

    @property
    def port_taken(self) -> bool:
        """Whether torchrun found the port in use at which ranks meet."""
        return any(node.port_taken for node in self.nodes) and not self.failures

    @property
    def code(self) -> int | None:
        """None while any host still runs; 0 when all succeeded, else the first other exit code. A
        host that was lost counts as one that failed."""
        codes = [1 if node.lost else node.code for node in self.nodes]
        if None in codes:
            return None
        return next((code for code in codes if code), 0)

    def stopped_ranks(self) -> tuple[int, ...]:
        """Ranks whose process is stopped: SIGTERM does not end them."""
        return tuple(rank for rank, state in sorted(self.ranks.items()) if state.is_stopped)

    def collectives(self) -> dict[int, CollectiveProgress]:
        """How far each rank is in the collectives of its groups, by rank."""
        return {rank: state.breadcrumb.collectives for rank, state in self.ranks.items()}

    def doing(self) -> Iterator[tuple[int, str]]:
        """Each rank, with what it says that it is doing."""
        return ((rank, state.breadcrumb.doing) for rank, state in self.ranks.items())
