"""The processes of an attempt, torchrun and its ranks: finding them, their states, killing them.

Where /proc is hidden no rank can be found; torchrun is then killed alone, and the kernel kills each
rank with it (runtime/process.py).
"""

from __future__ import annotations

import subprocess
from contextlib import suppress
from pathlib import Path

import psutil

UNREADABLE = (psutil.Error, OSError)
STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


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

    def processor_seconds(self, rank: int) -> float:
        """Processor time that a rank has used, in seconds; 0 when it cannot be read."""
        try:
            times = self.ranks[rank].cpu_times()
        except (*UNREADABLE, KeyError):
            return 0.0
        return float(times.user + times.system)

    def major_faults(self, rank: int) -> int:
        """Page faults of a rank so far that had to wait for a disk; 0 when it cannot be read."""
        with suppress(*UNREADABLE, KeyError, ValueError, IndexError):
            # proc(5): majflt is field 12, and the name in field 2 may hold spaces.
            stat = Path(f"/proc/{self.ranks[rank].pid}/stat").read_text("utf-8", "replace")
            return int(stat.rpartition(")")[2].split()[9])
        return 0

    def swapped_bytes(self, rank: int) -> int:
        """Memory of a rank that lies in swap space, in bytes; 0 when it cannot be read."""
        with suppress(*UNREADABLE, KeyError, ValueError, IndexError):
            status = Path(f"/proc/{self.ranks[rank].pid}/status").read_text("utf-8", "replace")
            return 1024 * int(status.partition("VmSwap:")[2].split()[0])
        return 0

    def send_signal(self, rank: int, number: int) -> None:
        """Send a signal to a rank, unless it has ended."""
        with suppress(*UNREADABLE, KeyError):
            self.ranks[rank].send_signal(number)

    def stopped_ranks(self) -> tuple[int, ...]:
        """Ranks whose process is stopped, by SIGSTOP or a debugger: SIGTERM does not end them."""
        self.find()
        return tuple(rank for rank in sorted(self.ranks) if self.state(rank) in STOPPED)


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and everything it started; processes that have ended are left alone."""
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
