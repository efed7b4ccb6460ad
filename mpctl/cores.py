"""The processor cores that this process may run on.

By hand, a process bound to cores 2 and 3 (taskset -c 2,3) has [2, 3], however many the machine has.
"""

from __future__ import annotations

import os


def usable_cores() -> list[int]:
    """Numbers of the cores that this process may use, ascending; all of the machine's where the
    operating system does not bind processes to cores."""
    affinity = getattr(os, "sched_getaffinity", None)
    return sorted(affinity(0)) if affinity else list(range(os.cpu_count() or 1))
