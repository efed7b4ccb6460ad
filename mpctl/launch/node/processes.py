"""The processes of an attempt, torchrun and its ranks: finding them, their states, killing them.

Where /proc is hidden no rank can be found; torchrun is then killed alone, and the kernel kills each
rank with it (runtime/process.py).
"""

from __future__ import annotations

import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil

from mpctl.launch.attempt import RankState
from mpctl.rundir.breadcrumb import BreadcrumbState

UNREADABLE = (psutil.Error, OSError)
KILL_SECONDS = 10.0


class ProcessTree:
    """torchrun, by its process id, and its ranks; `ranks` is filled as they appear."""

    def __init__(self, torchrun: int, world_size: int) -> None:
        self.pid, self.world_size = torchrun, world_size
        self.ranks: dict[int, psutil.Process] = {}

    def find(self) -> None:
        """Look for ranks that have started since the last call, until all are known."""
        if len(self.ranks) == self.world_size:
            return
        try:
            children = psutil.Process(self.pid).children()
        except UNREADABLE:
            return
        for child in children:
            with suppress(*UNREADABLE, KeyError, ValueError):  # one that is just starting or ending
                self.ranks[int(child.environ()["RANK"])] = child

    def state(self, rank: int | None) -> str:
        """psutil's name of the state of a rank, of torchrun for None; empty when it cannot be
        read."""
        try:
            process = psutil.Process(self.pid) if rank is None else self.ranks[rank]
            return str(process.status())
        except (*UNREADABLE, KeyError):
            return ""

    def rank_state(self, rank: int, breadcrumb: BreadcrumbState) -> RankState:
        """What this host sees of a rank."""
        return process_state(self.ranks.get(rank), breadcrumb)


def process_state(process: psutil.Process | None, breadcrumb: BreadcrumbState) -> RankState:
    """What this host sees of the process of a rank, None when there is none, and what the rank
    wrote about itself."""
    try:
        if process is None:
            return RankState(breadcrumb=breadcrumb)
        times = process.cpu_times()
        return RankState(
            str(process.status()),
            float(times.user + times.system),
            breadcrumb,
            major_faults(process.pid),
            swapped_bytes(process.pid),
        )
    except UNREADABLE:
        return RankState(breadcrumb=breadcrumb)


def major_faults(pid: int) -> int:
    """Page faults of a process so far that had to wait for a disk; 0 when it cannot be read."""
    with suppress(OSError, ValueError, IndexError):
        # proc(5): majflt is field 12; the name in field 2 may hold spaces and brackets.
        stat = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
        return int(stat.rpartition(")")[2].split()[9])
    return 0


def swapped_bytes(pid: int) -> int:
    """Memory of a process that lies in swap space, in bytes; 0 when it cannot be read."""
    with suppress(OSError, ValueError, IndexError):
        status = Path(f"/proc/{pid}/status").read_text("utf-8", "replace")
        return 1024 * int(status.partition("VmSwap:")[2].split()[0])
    return 0


def kill_tree(process: subprocess.Popen[bytes], seconds: float = KILL_SECONDS) -> tuple[int, ...]:
    """Kill a process and everything it started, and wait until they are gone; processes that have
    ended are left alone. The ids of those that run on so many seconds later: nothing ends a process
    in a system call that cannot be interrupted (state D: a file system that does not answer) until
    that call returns, and it does nothing else before."""
    try:
        tree = psutil.Process(process.pid).children(recursive=True)
    except UNREADABLE:
        tree = []
    if process.poll() is None:
        process.kill()
    for child in tree:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    deadline = time.monotonic() + seconds
    with suppress(*UNREADABLE):
        _, tree = psutil.wait_procs(tree, timeout=seconds)
    with suppress(subprocess.TimeoutExpired):
        process.wait(max(0.0, deadline - time.monotonic()))
    own = (process.pid,) if process.poll() is None else ()
    return (*own, *(child.pid for child in tree if not _has_ended(child)))


def _has_ended(process: psutil.Process) -> bool:
    """Whether a process is gone, or a zombie, which whoever should does not wait for."""
    try:
        return process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except UNREADABLE:
        return True
