"""Accuracy by hand, rows and findings of hand-made runs, a bench that ends early."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from mpctl.core.errors import RunFailed
from mpctl.measure.bench.cases import plan_cases
from mpctl.measure.bench.runner import Budget, Watch
from mpctl.measure.bench.verify import (
    ALL,
    BEYOND,
    WITHIN,
    HeldFigure,
    Verification,
    VerifyRow,
    accuracy_of,
    disturbed,
    verify_findings,
    verify_row,
)
from mpctl.run.hosts.machine import Machine
from tests.measure.bench.small_jobs import small_case
from tests.measure.bench.verify_runs import TWO_CORES, case_of, forecast, rank_of, run_of, verification


def compared(*pairs: tuple[float, float], inside: str = "") -> list[HeldFigure]:
    """Comparisons of (predicted, measured); inside: y, n or - (no band) for each."""
    answers = [{"y": True, "n": False}.get(mark) for mark in inside.ljust(len(pairs), "-")]
    return [
        HeldFigure(f"layout {number}", *pair, is_inside=answer)
        for number, (pair, answer) in enumerate(zip(pairs, answers, strict=True))
    ]


def test_errors_are_relative_to_what_was_measured():
    found = accuracy_of(compared((1.1, 1.0), (1.8, 2.0), (4.0, 4.0)))
    assert found["layouts"] == 3
    assert found["mape"] == pytest.approx(0.2 / 3)
    assert found["bias"] == pytest.approx(0.0)
    assert found["spearman"] == pytest.approx(1.0)
    assert found["coverage"] is None


def test_the_worst_is_named_with_its_sign():
    found = accuracy_of(compared((1.2, 1.0), (1.0, 2.0), (3.0, 3.0)))
    assert (found["worst"], found["worst_name"]) == (-0.5, "layout 1")


def test_equal_times_share_a_rank():
    """Predicted ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4: 4.5 / sqrt(4.5 x 5)."""
    found = accuracy_of(compared((1, 5), (2, 6), (2, 7), (3, 8)))
    assert found["spearman"] == pytest.approx(4.5 / (4.5 * 5) ** 0.5)


@pytest.mark.parametrize("pairs", [((1, 1), (2, 2)), ((1, 1), (1, 2), (1, 3))])
def test_two_layouts_or_equal_predictions_have_no_order(pairs: tuple[tuple[float, float], ...]):
    assert accuracy_of(compared(*pairs))["spearman"] is None


def test_coverage_counts_layouts_that_have_a_band():
    found = accuracy_of(compared((1, 1), (1, 2), (1, 3), (1, 4), inside="yyn-"))
    assert found["coverage"] == pytest.approx(2 / 3)


def test_nothing_measured_has_no_figures():
    found = accuracy_of([])
    assert found.pop("layouts") == 0 and set(found.values()) == {None}


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
    outside = [verify_row([run_of(case, end)])["is_inside"] for end in (ends[0] * 0.99, ends[1] * 1.01)]
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
def test_differences_from_the_plan_are_reported(rank: Any, words: str) -> None:
    row = verify_row([run_of(case_of("tp2"), 1.0, rank_of(), rank)])
    assert not row["agrees"] and words in row["differs"]


def test_a_run_without_ranks_to_compare_does_not_count_as_agreeing() -> None:
    run = run_of(case_of("1 rank"), 1.0)
    run.summary["plan_beside_run"] = []
    row = verify_row([run])
    assert not row["agrees"] and row["sent_bytes"] == 0


def row_of(name: str, error: float, *, inside: bool = True, rehearsal: bool = False) -> VerifyRow:
    return cast(
        VerifyRow,
        {
            "name": name,
            "seconds": 2.0,
            "predicted_seconds": 2.0 * (1 + error),
            "is_inside": inside,
            "is_rehearsal": rehearsal,
            "agrees": inside,
            "planned_memory_bytes": 110,
            "memory_bytes": 100,
        },
    )


def test_layouts_beyond_the_cores_are_checked_separately() -> None:
    rows = [
        row_of("1 rank", 0.02),
        row_of("tp2", -0.06),
        row_of("dp2", 0.04, inside=False),
        row_of("dp4", -0.5, inside=False, rehearsal=True),
    ]
    found = verify_findings(rows, within=0.041, left_out={})
    assert [found["groups"][name]["layouts"] for name in (WITHIN, BEYOND, ALL)] == [3, 1, 4]
    assert found["groups"][WITHIN]["mape"] == pytest.approx(0.04)
    assert found["groups"][WITHIN]["coverage"] == pytest.approx(2 / 3)
    assert found["groups"][ALL]["worst_name"] == "dp4"
    assert found["memory"]["mape"] == pytest.approx(0.1)
    assert found["agreeing"] == 2
    assert found["judged"] == WITHIN and found["passed"] is True
    assert verify_findings(rows, within=0.039, left_out={})["passed"] is False


def test_where_all_are_rehearsals_all_are_checked() -> None:
    found = verify_findings([row_of("dp4", 0.2, rehearsal=True)], within=0.1, left_out={})
    assert found["judged"] == ALL and found["passed"] is False


def test_nothing_measured_is_not_checked() -> None:
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


@pytest.mark.slow
def test_runs_before_a_failure_and_before_ctrl_c_are_in_the_report(tmp_path: Path, texts: Path) -> None:
    """The second run fails when its data are gone, and is interrupted before it begins."""
    out = tmp_path / "out"
    cases = [small_case(name, texts) for name in ("first", "second")]

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    causes: dict[type[BaseException], Callable[[Path], None]] = {RunFailed: shutil.rmtree, KeyboardInterrupt: interrupt}
    for error, cause in causes.items():

        def at_second(title: str, cause: Callable[[Path], None] = cause) -> None:
            if title.startswith("second"):
                cause(out / "data")

        planned = plan_cases(cases, out, Machine(2, 0, 2**40), overwrite=True)
        verification = Verification(TWO_CORES, "mpctl bench verify", 1, planned, None)
        watch = Watch(lambda *progress: None, at_second)
        with pytest.raises(error):
            verification.run(out, budget=Budget(), watch=watch)
        report = json.loads((out / "report.json").read_text())
        assert [row["name"] for row in report["results"]] == ["first"]
        assert not report["is_complete"] and report["results"][0]["agrees"]
