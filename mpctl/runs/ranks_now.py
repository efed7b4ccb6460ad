"""Every rank of a run, as its launcher last reported it: its host, and what it is doing."""

from __future__ import annotations

from dataclasses import dataclass

from mpctl.launch.attempt import RankState
from mpctl.launch.status_file import read_status
from mpctl.layout.topology import job_topology
from mpctl.rundir.breadcrumb import BreadcrumbState
from mpctl.rundir.directory import RunDir
from mpctl.runs.documents import SavedLauncher
from mpctl.runs.saved import SavedRun

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
