"""How long a rank may wait, learnt from the steps of the run."""

from __future__ import annotations

from typing import Any

import pytest

from mpctl.records.rundir.breadcrumb import BreadcrumbState
from mpctl.run.launch.attempt import RankState
from mpctl.run.launch.learnt_timeout import LEARNT_STEPS, LEAST_SECONDS, LearntTimeout
from mpctl.spec.launch import RANK_MARGIN_SECONDS, TIMEOUT_SECONDS, LaunchSpec


def learnt(*seconds: float, between: float = 0.0, **launch: Any) -> LearntTimeout:
    """After steps of so many seconds, with so much time between two."""
    timeout, now = LearntTimeout(LaunchSpec(**launch)), 1e9
    for number, length in enumerate(seconds, start=1):
        now += length + between
        timeout.learn(
            {
                "step": number,
                "loss": 1.0,
                "tokens": number,
                "step_seconds": length,
                "tokens_per_second": 1.0,
                "time": now,
            }
        )
    return timeout


def ranks(*doing: str, process: str = "running") -> list[RankState]:
    return [RankState(process, breadcrumb=BreadcrumbState(text)) for text in doing]


@pytest.mark.parametrize(("longest", "limit"), [(0.3, 30), (1.0, 30), (5.0, 50), (40.0, 300)])
def test_the_table_of_the_module(longest: float, limit: float) -> None:
    steps = (60.0, 20.0, 0.1, 0.1, longest, 0.1, 0.1)  # the first two compile
    assert learnt(*steps).seconds == pytest.approx(limit)


def test_nothing_is_learnt_from_few_steps_nor_where_the_key_is_set() -> None:
    assert learnt(*[1.0] * (LEARNT_STEPS - 1)).seconds == TIMEOUT_SECONDS
    assert learnt(*[1.0] * LEARNT_STEPS).seconds == LEAST_SECONDS
    assert learnt(*[1.0] * 50, timeout_seconds=120).seconds == 120
    assert learnt(*[1.0] * 50, timeout_seconds=300).seconds == 300


def test_saves_and_validations_between_steps_count() -> None:
    assert learnt(*[1.0] * 20, between=7.0).seconds == pytest.approx(80)


def test_a_clock_that_is_set_back_is_no_length_of_a_step() -> None:
    timeout = learnt(*[1.0] * 20)
    timeout.before = 2e9
    timeout.learn({"step": 21, "loss": 1.0, "tokens": 1, "step_seconds": 1.0, "tokens_per_second": 1.0, "time": 1e9})
    assert timeout.seconds == LEAST_SECONDS


@pytest.mark.parametrize(
    "other",
    [
        "validation after step 20",
        "saving step 20: 1 MiB of 2 MiB written",
        "loading step-20",
        "step 21; saving step 20: 1 MiB of 2 MiB written",
        "",
    ],
)
def test_whatever_is_no_step_has_the_whole_limit(other: str) -> None:
    """One rank does it for 100 s, for which another waits; then both are in steps again."""
    timeout = learnt(*[1.0] * 20)
    for _ in range(100):
        timeout.observe(ranks("step 21", other), 1.0)
    assert not timeout.is_over(100) and timeout.is_over(TIMEOUT_SECONDS)
    for _ in range(29):
        timeout.observe(ranks("step 21", "step 21, stage 1, forward of micro batch 2"), 1.0)
    assert not timeout.is_over(129)
    timeout.observe(ranks("step 21", "step 21"), 1.0)
    assert timeout.is_over(130)


def test_a_rank_that_waits_for_a_disk_has_the_whole_limit() -> None:
    timeout = learnt(*[1.0] * 20)
    for _ in range(100):
        timeout.observe(ranks("step 21", process="disk-sleep"), 1.0)
    assert not timeout.is_over(100)


def test_ranks_give_up_later_than_the_launcher() -> None:
    assert LaunchSpec().rank_timeout_seconds == TIMEOUT_SECONDS + RANK_MARGIN_SECONDS
    for seconds in (0.1, 3.0, 100.0):
        timeout = learnt(*[seconds] * 20)
        assert timeout.seconds + RANK_MARGIN_SECONDS <= timeout.launch.rank_timeout_seconds


def test_the_report_says_what_was_learnt() -> None:
    timeout = learnt(*[1.2] * 20)
    assert timeout.words(31) == (
        "; the limit of 30 s was set from 20 steps, the longest 1.2 s (launch.timeout_seconds sets another)"
    )
    assert timeout.words(300) == ""
