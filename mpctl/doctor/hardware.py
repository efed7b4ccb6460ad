"""Probes of processors, memory and limits of this host."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import psutil

from mpctl.cores import usable_cores
from mpctl.doctor.documents import Limits, Memory, Processor
from mpctl.hosts.machine import memory_headroom

GROUPS = Path("/sys/fs/cgroup")


def probe_processor() -> Processor:
    """The processors that this process may use."""
    text = _text(Path("/proc/cpuinfo"))
    return Processor(
        model=_first_value(text, "model name"),
        cores=len(usable_cores()),
        logical=os.cpu_count() or 1,
        physical=psutil.cpu_count(logical=False),
        sockets=len(_values(text, "physical id")) or None,
        numa_nodes=len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or None,
        quota=cpu_quota(_text(GROUPS / "cpu.max")),
        load=os.getloadavg()[0],
    )


def cpu_quota(text: str) -> float | None:
    """`150000 100000` (cpu.max: microseconds of a period) as 1.5 processors; None for `max`."""
    words = text.split()
    if len(words) != 2 or not all(word.isdecimal() for word in words) or words[1] == "0":
        return None
    return int(words[0]) / int(words[1])


def probe_memory() -> Memory:
    """Memory that is free on this host and within its control group."""
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    shm = _space(Path("/dev/shm"))
    return Memory(
        total=memory.total,
        available=memory.available,
        group_free=memory_headroom(),
        swap_total=swap.total,
        swap_used=swap.used,
        shm_total=None if shm is None else shm[0],
        shm_free=None if shm is None else shm[1],
    )


def probe_limits() -> Limits:
    """Limits of this process, which its children inherit."""
    soft, hard = (_limit(limit) for limit in resource.getrlimit(resource.RLIMIT_NOFILE))
    return Limits(
        open_files=soft,
        open_files_hard=hard,
        processes=_limit(resource.getrlimit(resource.RLIMIT_NPROC)[0]),
        locked_memory=_limit(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
        group_processes=_group_processes(GROUPS),
    )


def _limit(value: int) -> int | None:
    return None if value in (resource.RLIM_INFINITY, -1) else value


def _group_processes(root: Path) -> int | None:
    """Processes that the control group may still add (pids.max and pids.current)."""
    most, now = (_text(root / name).strip() for name in ("pids.max", "pids.current"))
    return max(0, int(most) - int(now)) if most.isdecimal() and now.isdecimal() else None


def _space(path: Path) -> tuple[int, int] | None:
    """Total and free bytes of the file system at `path`."""
    try:
        status = os.statvfs(path)
    except OSError:
        return None
    return status.f_frsize * status.f_blocks, status.f_frsize * status.f_bavail


def _first_value(text: str, key: str) -> str | None:
    return next(iter(_values(text, key)), None)


def _values(text: str, key: str) -> dict[str, None]:
    """The different values of a key in /proc/cpuinfo, in order."""
    pairs = (line.partition(":") for line in text.splitlines())
    return {value.strip(): None for name, _, value in pairs if name.strip() == key}


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", errors="replace")
    except OSError:
        return ""
