"""The processor cores that this process may run on, and how much of them it is granted.

By hand, a process bound to cores 2 and 3 (taskset -c 2,3) has [2, 3], however many the machine has.
A container or batch system may grant less than its cores by a quota of a control group: the
processor time of a period, in microseconds. Version 2 has cpu.max (`150000 100000` is 1.5
processors, `max 100000` no quota), version 1 cpu.cfs_quota_us and cpu.cfs_period_us (-1 is no
quota). The groups above a group bound it too. Source: the kernel's documentation of cgroup-v2 and
of scheduler/sched-bwc. With 8 cores, and 6 processors granted by a group in one of 3.5, a process
has the processor time of 3 whole cores.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def usable_cores() -> list[int]:
    """Numbers of the cores that this process may use, ascending; all of the machine's where the
    operating system does not bind processes to cores."""
    affinity = getattr(os, "sched_getaffinity", None)
    return sorted(affinity(0)) if affinity else list(range(os.cpu_count() or 1))


def core_count() -> int:
    """Return the number of cores that this process may keep busy: its usable cores, within its quota."""
    return within_quota(len(usable_cores()), cpu_quota())


def within_quota(cores: int, quota: float | None) -> int:
    """Return the smaller of `cores` and the full processors of a quota; at least 1."""
    return max(1, cores if quota is None else min(cores, int(quota)))


def cpu_quota(root: Path = CGROUPS, own: Path = OWN_CGROUP) -> float | None:
    """Processors that the control group of this process and the groups above it grant, the least of
    them; None without a quota. root: where the groups are mounted; own: the file that names the
    group of this process."""
    granted = (_granted(group) for group in control_groups("cpu", root, own))
    return min((quota for quota in granted if quota is not None), default=None)


def control_groups(controller: str, root: Path, own: Path) -> Iterator[Path]:
    """The group of this process that limits by this controller and those above it, innermost
    first."""
    for line in _text(own).splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and controller not in controllers.split(","):
            continue
        base = root / controller if controllers else root
        group = base / path.lstrip("/")
        while group != base:
            yield group
            group = group.parent
        yield base


def _granted(group: Path) -> float | None:
    version_1 = (_text(group / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    words = _text(group / "cpu.max").split() or [*version_1]
    if len(words) != 2 or not all(word.isdecimal() for word in words) or words[1] == "0":
        return None
    return int(words[0]) / int(words[1])


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text("utf-8", errors="replace").strip()
    return ""
