"""What the kernel's control group of this process says about memory: its limit, processes killed.

Containers and batch systems limit memory by control groups; the machine's own figures do not show
the limit. Version 2 has memory.max, memory.current and memory.events, version 1
memory.limit_in_bytes, memory.usage_in_bytes and memory.oom_control. Source: the kernel's
documentation of cgroup-v1/memory and cgroup-v2. Hosts without control groups have no limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
NO_LIMIT = 1 << 60  # version 1 writes a number near 2^63 for "none"


def memory_kills(root: Path = ROOT, own: Path = OWN) -> int:
    """How many processes of this group the kernel has killed, since the group exists, because its
    memory ran out. root: where the groups are mounted; own: the file that names this process's."""
    for group in _groups(root, own):
        for name in ("memory.events", "memory.oom_control"):
            counts = _table(group / name)
            if "oom_kill" in counts:
                return counts["oom_kill"]
    return 0


def memory_headroom(root: Path = ROOT, own: Path = OWN) -> int | None:
    """Bytes that this process may still allocate within the limits of its group and the groups
    above it; None without a limit. Cached files do not count as used: the kernel gives them up."""
    free = [size for group in _groups(root, own) if (size := _free_bytes(group)) is not None]
    return min(free, default=None)


def _free_bytes(group: Path) -> int | None:
    limit = _number(group / "memory.max", group / "memory.limit_in_bytes")
    if limit is None or limit >= NO_LIMIT:
        return None
    used = _number(group / "memory.current", group / "memory.usage_in_bytes") or 0
    cached = _table(group / "memory.stat")
    return max(0, limit - used + cached.get("total_inactive_file", cached.get("inactive_file", 0)))


def _groups(root: Path, own: Path) -> Iterator[Path]:
    """The memory group of this process and those above it, innermost first."""
    for line in _text(own).splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and "memory" not in controllers.split(","):
            continue
        base = root / "memory" if controllers else root
        group = base / path.lstrip("/")
        while group != base:
            yield group
            group = group.parent
        yield base


def _number(*paths: Path) -> int | None:
    """The number in the first of these files that has one; `max` is not a number."""
    words = (_text(path).strip() for path in paths)
    return next((int(word) for word in words if word.isdecimal()), None)


def _table(path: Path) -> dict[str, int]:
    """The lines of the form `name number`."""
    pairs = (line.split() for line in _text(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", errors="replace")
    except OSError:
        return ""
