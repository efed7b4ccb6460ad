"""Time limits: what a checkpoint takes, and when Slurm announces the end."""

from __future__ import annotations

from math import inf

import pytest

from mpctl.clusters.slurm.limits import SaveNeed, default_signal_seconds, limit_issues

# By hand, of the module's docstring: 10 + 80 / (2 x 2) = 30 s at best, 10 + 80 / (2 x 0.2) = 210 s.
NEED = SaveNeed(step_seconds=10, checkpoint_bytes=80 * 10**9, nodes=2)


@pytest.mark.parametrize(
    ("need", "limit", "seconds"),
    [
        (NEED, inf, 420),
        (NEED, 3600, 420),
        (NEED, 600, 300),  # half of the limit
        (SaveNeed(0.1, 1000, 1), inf, 120),
        (SaveNeed(0.1, 1000, 1), 60, 30),
        (SaveNeed(1e6, 1000, 1), inf, 65_535),
    ],
)
def test_the_signal_comes_early_enough_for_a_slow_save(
    need: SaveNeed, limit: float, seconds: int
) -> None:
    assert default_signal_seconds(need, limit) == seconds


def test_a_limit_shorter_than_one_save_is_refused() -> None:
    assert list(limit_issues(NEED, 31, None)) == []
    (issue,) = limit_issues(NEED, 29, None)
    assert issue.where == "launch.slurm.time"
    assert "0:00:29 is shorter than a step of 10.00 s and a checkpoint of 74.5 GiB, 30.00 s" in (
        issue.message
    )
    assert issue.hint == "use 0:02:00 or more"


def test_a_signal_must_leave_time_and_come_before_the_end() -> None:
    assert list(limit_issues(NEED, 3600, 60)) == []
    (short,) = limit_issues(NEED, 3600, 29)
    assert (short.where, short.hint) == ("launch.slurm.signal_seconds", "use 60 or more")
    (late,) = limit_issues(NEED, 3600, 3600)
    assert late.message == "3600 s, but the whole time limit is 1:00:00"
    assert len(list(limit_issues(NEED, 20, 25))) == 3
