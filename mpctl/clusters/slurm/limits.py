"""Whether a job's time limit suffices, and when Slurm must announce its end.

Slurm sends SIGUSR1 `signal_seconds` before the limit, up to a minute earlier; from then on the
ranks finish their step and write a checkpoint. How fast a file system writes is not known before it
has written. A job is therefore refused only where even FASTEST_WRITE would not do, and the time for
saving is reckoned with SLOWEST_WRITE.

By hand, 2 nodes, a step of 10 s, a checkpoint of 80 GB: it takes 10 + 80 / (2 x 2) = 30 s at best.
Slowly it takes 10 + 80 / (2 x 0.2) = 210 s, and the signal comes 420 s before the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, inf

from mpctl.clusters.slurm.times import time_limit_text
from mpctl.errors import Issue
from mpctl.units import bytes_text, seconds_text

FASTEST_WRITE, SLOWEST_WRITE = 2e9, 2e8
"""Bytes per second that one node writes to a fast parallel file system, and to a busy NFS."""
LEAST_SIGNAL_SECONDS = 120
MOST_SIGNAL_SECONDS = 65_535  # of sbatch's --signal


@dataclass(frozen=True)
class SaveNeed:
    """What stopping with a checkpoint takes. step_seconds: 0 where no step time is estimated."""

    step_seconds: float
    checkpoint_bytes: int
    nodes: int

    def seconds(self, rate: float) -> float:
        """Seconds to finish a step and save, at so many bytes per second of each node."""
        return self.step_seconds + self.checkpoint_bytes / (rate * self.nodes)

    def __str__(self) -> str:
        step = f"a step of {seconds_text(self.step_seconds)} and " if self.step_seconds else ""
        return f"{step}a checkpoint of {bytes_text(self.checkpoint_bytes)}"


def default_signal_seconds(need: SaveNeed, limit: float) -> int:
    """Twice the seconds that a slow save takes, at least LEAST_SIGNAL_SECONDS, but no more than
    half of the time limit (seconds, infinity without one)."""
    wanted = max(LEAST_SIGNAL_SECONDS, ceil(2 * need.seconds(SLOWEST_WRITE)))
    half = MOST_SIGNAL_SECONDS if limit == inf else max(1, int(limit / 2))
    return min(wanted, half, MOST_SIGNAL_SECONDS)


def limit_issues(need: SaveNeed, limit: float, signal_seconds: int | None) -> Iterator[Issue]:
    """Why nothing could be saved within the limit. limit: seconds, infinity without one;
    signal_seconds: as set by the user, None where it is derived."""
    least = need.seconds(FASTEST_WRITE)
    rate = f"{FASTEST_WRITE / 1e9:g} GB/s a node"
    if limit < least:
        message = (
            f"{time_limit_text(limit)} is shorter than {need}, {seconds_text(least)} at {rate}"
        )
        hint = f"use {time_limit_text(ceil(4 * least / 60) * 60)} or more"
        yield Issue("slurm-time", "launch.slurm.time", message, hint)
    if signal_seconds is None:
        return
    where = "launch.slurm.signal_seconds"
    if signal_seconds < least:
        message = f"{signal_seconds} s are shorter than {need}, {seconds_text(least)} at {rate}"
        yield Issue("slurm-signal", where, message, f"use {ceil(2 * least)} or more")
    if signal_seconds >= limit:
        message = f"{signal_seconds} s, but the whole time limit is {time_limit_text(limit)}"
        hint = f"use {max(1, int(limit / 2))} or less, or a larger launch.slurm.time"
        yield Issue("slurm-signal", where, message, hint)
