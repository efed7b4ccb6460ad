"""Every rank of a run at this moment: its host, its coordinates, what it says that it is doing."""

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
    directory, states = RunDir(run.path), _reported(run)
    return [
        RankNow(
            rank=rank,
            host=hosts[min(rank // ranks_of_host, len(hosts) - 1)] if hosts else None,
            coords=topology.whole_coords(rank),
            breadcrumb=_newer(directory.breadcrumb(rank), states.get(rank)),
            process=states[rank].process if rank in states else "",
        )
        for rank in range(run.job.world_size)
    ]


def _reported(run: SavedRun) -> dict[int, RankState]:
    """What the launcher reported of the ranks of a run that goes on, by rank."""
    report = read_status(RunDir(run.path).status) if run.status == "running" else None
    return {} if report is None else report.state.ranks


def _newer(seen: BreadcrumbState, reported: RankState | None) -> BreadcrumbState:
    """A breadcrumb as its file has it here, or as the launcher reported it when that is newer."""
    if reported is None or reported.breadcrumb.beat_time <= seen.beat_time:
        return seen
    return reported.breadcrumb
