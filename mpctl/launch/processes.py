"""The processes of an attempt, torchrun and its ranks: found, looked at, killed.

Where /proc is hidden no rank is found; torchrun is then killed alone, and each rank by the kernel
with it (runtime/process.py).
"""

from __future__ import annotations

import subprocess
from contextlib import suppress

import psutil

UNREADABLE = (psutil.Error, OSError)
STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


class ProcessTree:
    """torchrun and its ranks; `ranks` fills as they appear."""

    def __init__(self, torchrun: int, world_size: int) -> None:
        self.pid, self.world_size = torchrun, world_size
        self.ranks: dict[int, psutil.Process] = {}

    def find(self) -> None:
        """Look for ranks that have started since; nothing is read once all are known."""
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
        """psutil's name of a rank's state, of torchrun's for None; empty when it cannot be read."""
        try:
            process = psutil.Process(self.pid) if rank is None else self.ranks[rank]
            return str(process.status())
        except (*UNREADABLE, KeyError):
            return ""

    def processor_seconds(self, rank: int) -> float:
        """Processor time that a rank has used; 0 when it cannot be read."""
        try:
            times = self.ranks[rank].cpu_times()
        except (*UNREADABLE, KeyError):
            return 0.0
        return float(times.user + times.system)

    def stopped_ranks(self) -> tuple[int, ...]:
        """Ranks whose process is stopped (SIGSTOP) or held by a debugger: deaf to SIGTERM."""
        self.find()
        return tuple(rank for rank in sorted(self.ranks) if self.state(rank) in STOPPED)


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """End a process and everything it started; nothing happens when all have ended."""
    try:
        tree = psutil.Process(process.pid).children(recursive=True)
    except UNREADABLE:
        tree = []
    if process.poll() is None:
        process.kill()
    for child in tree:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    with suppress(*UNREADABLE):
        psutil.wait_procs(tree, timeout=10)
    process.wait()
