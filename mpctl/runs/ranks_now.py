"""Every rank of a run at this moment: its host, its coordinates, what it says that it is doing."""

from __future__ import annotations

from dataclasses import dataclass

from mpctl.rundir.breadcrumb import BreadcrumbState
from mpctl.rundir.directory import RunDir
from mpctl.runs.documents import SavedLauncher
from mpctl.runs.saved import SavedRun
from mpctl.topology import Topology

MOST_RANKS = 1 << 16


@dataclass(frozen=True)
class RankNow:
    """A rank. host: None when it is not known; process: the state of its process by psutil's name,
    empty when it is not known; breadcrumb: an empty one for a rank that has ended or not begun."""

    rank: int
    host: str | None
    coords: dict[str, int]
    breadcrumb: BreadcrumbState
    process: str = ""


def ranks_now(run: SavedRun, launcher: SavedLauncher | None) -> list[RankNow]:
    """All ranks, in order; none when the job cannot be read."""
    if run.job is None or run.job.world_size > MOST_RANKS:
        return []
    topology = Topology.of(run.job.sizes, order=run.job.parallel.order)
    hosts = [] if launcher is None else launcher.hosts or [launcher.host]
    ranks_of_host = max(1, run.job.world_size // max(1, len(hosts)))
    directory = RunDir(run.path)
    return [
        RankNow(
            rank=rank,
            host=hosts[min(rank // ranks_of_host, len(hosts) - 1)] if hosts else None,
            coords=topology.coords(rank),
            breadcrumb=directory.breadcrumb(rank),
        )
        for rank in range(run.job.world_size)
    ]
