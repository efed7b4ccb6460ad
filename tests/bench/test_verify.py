"""Rows and findings of `mpctl bench verify` by hand-made runs."""

from __future__ import annotations

from typing import Any, cast

import pytest

from mpctl.bench.verify import (
    ALL,
    BEYOND,
    WITHIN,
    VerifyRow,
    disturbed,
    verify_findings,
    verify_row,
)
from tests.bench.verify_runs import case_of, forecast, rank_of, run_of, verification


def test_the_step_time_is_the_median_over_rounds() -> None:
    case = case_of("1 rank")
    planned = forecast(case)
    runs = [run_of(case, planned * n, number=i) for i, n in enumerate((1.25, 1.0, 5.0))]
    row = verify_row(runs)
    assert row["seconds"] == pytest.approx(1.25 * planned)
    assert (row["seconds_min"], row["seconds_max"]) == pytest.approx((planned, 5 * planned))
    assert row["rounds"] == 3
    assert row["predicted_seconds"] == planned
    assert row["error"] == pytest.approx(-0.2)
    assert row["cpu_seconds"] == pytest.approx(1.25 * planned / 2)
    assert row["low_seconds"] < planned < row["high_seconds"]


def test_the_band_holds_a_step_up_to_its_ends() -> None:
    case = case_of("1 rank")
    first = verify_row([run_of(case, 1.0)])
    ends = first["low_seconds"], first["high_seconds"]
    inside = [verify_row([run_of(case, end)])["is_inside"] for end in ends]
    outside = [
        verify_row([run_of(case, end)])["is_inside"] for end in (ends[0] * 0.99, ends[1] * 1.01)
    ]
    assert inside == [True, True] and outside == [False, False]


def test_memory_is_of_the_fullest_rank_and_bytes_of_the_average() -> None:
    ranks = [rank_of(0, peak=(300, 250), sent=(40, 40)), rank_of(1, peak=(200, 280), sent=(20, 20))]
    row = verify_row([run_of(case_of("tp2"), 1.0, *ranks)])
    assert (row["planned_memory_bytes"], row["memory_bytes"]) == (300, 280)
    assert row["memory_error"] == pytest.approx(300 / 280 - 1)
    assert (row["planned_sent_bytes"], row["sent_bytes"]) == (30, 30)
    assert row["agrees"] and row["differs"] == ""


def test_memory_that_was_not_measured_is_not_known() -> None:
    row = verify_row([run_of(case_of("1 rank"), 1.0, rank_of(peak=None))])
    assert row["memory_bytes"] is row["memory_error"] is row["planned_memory_bytes"] is None


@pytest.mark.parametrize(
    ("rank", "words"),
    [
        (rank_of(1, parameters=(10, 12)), "rank 1, parameters: planned 10, ran 12"),
        (rank_of(0, sent=(8, 9)), "rank 0, tp all_reduce: planned"),
    ],
)
def test_what_does_not_equal_the_plan_is_told(rank: Any, words: str) -> None:
    row = verify_row([run_of(case_of("tp2"), 1.0, rank_of(), rank)])
    assert not row["agrees"] and words in row["differs"]


def test_a_run_without_ranks_to_compare_does_not_count_as_agreeing() -> None:
    run = run_of(case_of("1 rank"), 1.0)
    run.summary["plan_beside_run"] = []
    row = verify_row([run])
    assert not row["agrees"] and row["sent_bytes"] == 0


def row_of(name: str, error: float, *, inside: bool = True, rehearsal: bool = False) -> VerifyRow:
    return cast(VerifyRow, {
        "name": name, "seconds": 2.0, "predicted_seconds": 2.0 * (1 + error),
        "is_inside": inside, "is_rehearsal": rehearsal, "agrees": inside,
        "planned_memory_bytes": 110, "memory_bytes": 100,
    })  # fmt: skip


def test_layouts_beyond_the_cores_are_judged_apart() -> None:
    rows = [
        row_of("1 rank", 0.02), row_of("tp2", -0.06), row_of("dp2", 0.04, inside=False),
        row_of("dp4", -0.5, inside=False, rehearsal=True),
    ]  # fmt: skip
    found = verify_findings(rows, within=0.041, left_out={})
    assert [found["groups"][name]["layouts"] for name in (WITHIN, BEYOND, ALL)] == [3, 1, 4]
    assert found["groups"][WITHIN]["mape"] == pytest.approx(0.04)
    assert found["groups"][WITHIN]["coverage"] == pytest.approx(2 / 3)
    assert found["groups"][ALL]["worst_name"] == "dp4"
    assert found["memory"]["mape"] == pytest.approx(0.1)
    assert found["agreeing"] == 2
    assert found["judged"] == WITHIN and found["passed"] is True
    assert verify_findings(rows, within=0.039, left_out={})["passed"] is False


def test_where_all_are_rehearsals_all_are_judged() -> None:
    found = verify_findings([row_of("dp4", 0.2, rehearsal=True)], within=0.1, left_out={})
    assert found["judged"] == ALL and found["passed"] is False


def test_nothing_measured_is_not_judged() -> None:
    found = verify_findings([], within=0.1, left_out={})
    assert found["passed"] is None and found["groups"][ALL]["layouts"] == 0
    assert verify_findings([row_of("tp2", 0.5)], within=None, left_out={})["passed"] is None


def test_a_report_of_some_runs_is_not_complete() -> None:
    report = verification().report()
    assert not report["is_complete"]
    assert [row["name"] for row in report["results"]] == ["1 rank", "tp4"]
    assert [row["is_rehearsal"] for row in report["results"]] == [False, True]
    whole = verification()
    whole.runs.append(run_of(whole.cases[2], 1.0))
    assert whole.report()["is_complete"]


def test_a_lone_rank_that_waited_for_its_core_was_disturbed() -> None:
    """By hand: 0.84 s of processor time in a step of 1 s, on CPU. GPUs let their process wait."""
    row = cast(VerifyRow, {"name": "1 rank", "world_size": 1, "device": "cpu", "seconds": 1.0})
    rows: list[VerifyRow] = [
        {**row, "cpu_seconds": 0.84},
        {**row, "name": "quiet", "cpu_seconds": 0.86},
        {**row, "name": "tp2", "world_size": 2, "cpu_seconds": 0.5},
        {**row, "name": "gpu", "device": "cuda", "cpu_seconds": 0.5},
    ]
    assert disturbed(rows) == ["1 rank"]


def test_what_the_allocator_took_is_of_the_fullest_rank() -> None:
    ranks = [{**rank_of(0), "reserved_memory_bytes": 7}, {**rank_of(1), "reserved_memory_bytes": 9}]
    assert verify_row([run_of(case_of("tp2"), 1.0, *ranks)])["reserved_bytes"] == 9
    assert verify_row([run_of(case_of("1 rank"), 1.0)])["reserved_bytes"] is None
