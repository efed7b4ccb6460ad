"""Time limit of a rank in a collective before it counts as hung, fitted to the run's steps.

`launch.timeout_seconds` is 300 s where it is not set: the first step may compile, and the launcher
knows nothing of the run. After LEARNT_STEPS steps it does. A step that goes on for FACTOR times as
long as the longest step so far will not end by itself, and nor will a wait in it. So the limit is
FACTOR times the longest time from one record of a step to the next (which includes saving,
validation and reading data between them), at least LEAST_SECONDS and at most 300 s:

    longest step      0.3 s    1 s     5 s      40 s
    limit             30 s     30 s    50 s     300 s

LEAST_SECONDS is above what the network repairs by itself: an InfiniBand queue tries again for some
20 s, a TCP connection sends again for longer, but within that.

The learnt limit counts only time in which every rank is in a step and saves nothing. Whatever else
a rank does (starting, loading a checkpoint, a validation, a save) has 300 s as before, and so have
the first LEARNT_STEPS steps of every attempt, which compile, and a rank that is found waiting for a
disk or a network file system (state D), which may be away for longer and come back. Where
`launch.timeout_seconds` is set, nothing is learnt.

A rank gives up by itself later than the launcher in any case: RANK_MARGIN_SECONDS after the limit
that is not learnt (spec/launch.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import psutil

from mpctl.records.rundir.metrics import is_number
from mpctl.records.rundir.rank_files import StepRecord
from mpctl.records.rundir.summary import WARM_UP_STEPS
from mpctl.run.launch.attempt import RankState
from mpctl.spec.launch import LaunchSpec

FACTOR, LEAST_SECONDS = 10.0, 30.0
LEARNT_STEPS = WARM_UP_STEPS + 5
IN_STEP, SAVING = "step ", "saving"


@dataclass
class LearntTimeout:
    """The limit of one attempt. steps: that it has recorded; longest: seconds from one record to
    the next, after the first WARM_UP_STEPS; before: when the last was written, seconds since 1970;
    training: seconds for which all ranks have been in steps without a break.
    """

    launch: LaunchSpec
    steps: int = 0
    longest: float = 0.0
    before: float | None = None
    training: float = 0.0

    def learn(self, record: StepRecord) -> None:
        """Count a step of this attempt."""
        written = record.get("time")
        self.steps += 1
        if self.steps > WARM_UP_STEPS:
            between = written - self.before if is_number(written) and self.before else 0.0
            self.longest = max(self.longest, record["step_seconds"], between)
        self.before = written if is_number(written) else None

    def observe(self, ranks: Iterable[RankState], elapsed: float) -> None:
        """Count the seconds since the last check, by what the ranks do now."""
        self.training = self.training + elapsed if all(map(_is_in_step, ranks)) else 0.0

    @property
    def seconds(self) -> float:
        """The limit while ranks train."""
        most = self.launch.longest_wait_seconds
        if self.launch.timeout_seconds is not None or self.steps < LEARNT_STEPS:
            return most
        return min(most, max(LEAST_SECONDS, FACTOR * self.longest))

    def is_over(self, waited: float) -> bool:
        """Whether a rank that has been in one wait for so many seconds is hung."""
        if waited >= self.launch.longest_wait_seconds:
            return True
        return min(waited, self.training) >= self.seconds

    def words(self, waited: float) -> str:
        """Describe the limit in the report of a hang after so many seconds; empty if it was not derived from steps."""
        if waited >= self.launch.longest_wait_seconds:
            return ""
        return (
            f"; the limit of {self.seconds:.0f} s was set from {self.steps} steps, the longest "
            f"{self.longest:.1f} s (launch.timeout_seconds sets another)"
        )


def _is_in_step(rank: RankState) -> bool:
    doing = rank.breadcrumb.doing
    is_in_step = doing.startswith(IN_STEP) and SAVING not in doing
    return is_in_step and rank.process != psutil.STATUS_DISK_SLEEP
