"""Collectives on a bench: reports by hand, and benches of two and four real ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mpctl.bench.collective_cases import CollectiveOptions, collective_cases
from mpctl.bench.collectives import (
    CollectivesReport,
    MeasuredCollectives,
    collectives_report,
    measure_collectives,
)
from mpctl.bench.documents import read_report
from mpctl.bench.report import bench_environment
from mpctl.cli.app import run
from mpctl.hosts.machine import Machine
from mpctl.planning.plan import load_plan
from mpctl.rundir.directory import RunDir

TWO_CORES = Machine(cores=2, gpus=0, memory_bytes=8 * 2**30)


def measured(*rounds: float, asked: int = 1, wrong: int = 0) -> MeasuredCollectives:
    """Two sizes of a broadcast over two ranks, of which the first was timed."""
    options = CollectiveOptions((4096, 8192), ("broadcast",), transports=("gloo",), rounds=asked)
    plan = load_plan(None, {"parallel.tp": 2, "launch.device": "cpu"})
    made = MeasuredCollectives(collective_cases(plan, options, TWO_CORES))
    made.rounds[0] = [
        {"event": "timing", "case": 0, "round": n, "seconds": s, "wrong": wrong}
        for n, s in enumerate(rounds)
    ]
    return made


def report_of(made: MeasuredCollectives) -> CollectivesReport:
    return collectives_report(made, bench_environment(), "mpctl bench collectives")


def test_a_report_has_rows_and_fits() -> None:
    report = report_of(measured(2e-3, 1e-3, 3e-3, asked=3))
    (row,) = report["results"]
    assert row["name"] == "broadcast tp2 float32 4096 gloo" and row["seconds"] == 2e-3
    assert report["findings"]["fits"] == []  # of one size
    assert report["is_complete"] and report["findings"]["layout"] == {"tp": 2, "world": 2}


def test_fewer_rounds_than_asked_for_are_not_complete() -> None:
    assert not report_of(measured(1e-3, asked=2))["is_complete"]


def test_rows_with_wrong_results_are_named() -> None:
    assert [row["bytes"] for row in measured(1e-3, wrong=5).wrong] == [4096]
    assert measured(1e-3, wrong=-1).wrong == measured(1e-3).wrong == []


def test_two_ranks_measure_and_every_round_is_handed_out(tmp_path: Path) -> None:
    options = CollectiveOptions(
        (64,), ("all_reduce", "sendrecv"), rounds=2, iterations=2, warm_up=1
    )
    plan = load_plan(None, {"parallel.tp": 2, "launch.device": "cpu"})
    cases, seen, told = collective_cases(plan, options, TWO_CORES), [], []
    made = measure_collectives(
        cases, RunDir(tmp_path / "ranks-r1"),
        on_round=lambda so_far: seen.append([row["rounds"] for row in so_far.rows]),
        on_progress=lambda *at: told.append(at),
    )  # fmt: skip
    assert seen == [[1, 1, 1], [2, 2, 2]] and made.is_complete
    assert told[-1] == ("time the collectives", 6, 6)
    assert [row["wrong"] for row in made.rows] == [0, 0, 0]
    assert all(0 < row["seconds_min"] <= row["seconds"] for row in made.rows)


@pytest.mark.slow
def test_a_round_ends_where_the_last_way_to_send_is_absent(tmp_path: Path) -> None:
    options = CollectiveOptions(
        (64,), ("broadcast",), transports=("gloo", "shared"), rounds=1, iterations=1, warm_up=0
    )
    settings = {"parallel.tp": 2, "launch.device": "cpu", "launch.shared_memory": False}
    cases, seen = collective_cases(load_plan(None, settings), options, TWO_CORES), []
    made = measure_collectives(
        cases, RunDir(tmp_path / "ranks-r1"), on_round=lambda so_far: seen.append(so_far.timed)
    )
    assert seen == [[0]] and [row["transport"] for row in made.rows] == ["gloo"]
    assert report_of(made)["findings"]["absent"] == [{"axis": "tp", "transport": "shared"}]


SMALL = ["-b", "4K", "-e", "64K", "-f", "4", "-n", "2", "-w", "1", "--rounds", "2"]


def bench(*more: str) -> list[str]:
    return ["bench", "collectives", *SMALL, "--device", "cpu", *more]


@pytest.mark.slow
def test_a_real_bench_of_four_ranks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    layout = ["--tp", "2", "--dp", "2", "--out", str(out)]
    assert run(bench(*layout, "--json")) == 0
    report: Any = json.loads(capfd.readouterr().out)
    assert report == read_report(out, "OUT") and report["is_complete"]
    rows = report["results"]
    assert len(rows) == 2 * (6 * 2 + 1) * 3
    assert {row["axis"] for row in rows} == {"tp", "dp_cp"}
    assert all(row["wrong"] == 0 and row["rounds"] == 2 for row in rows)
    assert len(report["findings"]["fits"]) == len(rows) / 3
    assert (out / "report.csv").exists() and (out / "ranks-r1" / "answers.jsonl").exists()
    assert run(bench(*layout)) == 2  # the first report stays
    capfd.readouterr()
    assert run(bench(*layout, "--overwrite", "--kinds", "broadcast", "-c", "0")) == 0
    words = capfd.readouterr().out
    assert "busbw" in words and "N/A" in words and "broadcast over dp_cp, 2 ranks" in words


def test_a_dry_run_says_what_would_be_timed(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(bench("--tp", "2", "--dry-run", "--kinds", "all-to-all")) == 0
    words = capfd.readouterr().out
    assert "6 cases in 2 rounds of 2 calls" in words and "all_to_all" in words


@pytest.mark.parametrize(
    ("words", "rules"),
    [
        (["--tp", "1"], {"axis-of-one-rank"}),
        (["--tp", "2", "-b", "many", "-e", "0"], {"bad-size"}),
        (["--tp", "2", "--axes", "pp"], {"axis-of-one-rank"}),
        (["--tp", "2", "--budget", "0"], {"bad-budget"}),
        (["--tp", "2", "--kinds", "gossip", "-d", "quad"], {"unknown-word", "bad-datatype"}),
    ],
)
def test_bad_input_ends_before_anything_is_written(
    words: list[str], rules: set[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run(bench("--json", "--out", str(out), *words)) == 2
    issues = json.loads(capfd.readouterr().out)["issues"]
    assert {issue["rule"] for issue in issues} == rules and not out.exists()
    assert all(issue["hint"] for issue in issues)
