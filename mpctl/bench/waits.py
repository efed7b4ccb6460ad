"""The share of a step that ranks wait in collectives, as runs measured it and as the plan has it.

A rank that waits in a collective cannot tell a message from a rank that is late, so that its share
is held against planned messages and bubbles together.

By hand, two ranks that wait 0.1 and 0.3 of their steps: 0.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, median

from mpctl.bench.runner import CaseRun
from mpctl.estimate.step import StepTime


def communication_share(runs: Sequence[CaseRun]) -> float | None:
    """The share of a step in which a rank waits, on the average of the ranks and the median of the
    runs; None where no rank reported it."""
    shares = [
        mean(told) for run in runs
        if (told := [r["communication_share"] for r in run.reports if "communication_share" in r])
    ]  # fmt: skip
    return median(shares) if shares else None


def planned_share(time: StepTime) -> float:
    """The share of a planned step in messages that nothing hides, and in bubbles."""
    return (time.tp + time.cp + time.pp + time.dp + time.bubble) / time.total
