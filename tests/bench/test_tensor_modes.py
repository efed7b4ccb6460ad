"""Tensor modes on a bench: cases and rows by hand, and one real bench of four ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mpctl.bench.report import bench_environment
from mpctl.bench.tensor_modes import MeasuredModes, bench_report, mode_rows
from mpctl.cli.app import run
from mpctl.hosts.machine import Machine
from mpctl.render.bench import print_report
from mpctl.rundir.directory import RunDir
from tests.bench.test_mode_cases import SMALL, TWO_CORES, cases_of


def measured_by_hand(
    rounds: dict[int, list[float]], *, asked: int = 1, machine: Machine = TWO_CORES
) -> MeasuredModes:
    """1d keeps half of what it saves whole; a square keeps a quarter of everything."""
    traffic = {"tp all_reduce": {"count": 4, "bytes": 800}}
    grid = {"col broadcast": {"count": 8, "bytes": 400}, "col all_reduce": {"count": 2, "bytes": 8}}
    sizes = {
        0: {"parameter_bytes": 110, "saved_bytes": 250, "traffic": traffic},
        1: {"parameter_bytes": 100, "saved_bytes": 100, "traffic": grid},
        None: {"parameter_bytes": 400, "saved_bytes": 400, "traffic": {}},
    }
    timings = {
        case: [
            {"event": "timing", "case": case, "round": n, "seconds": s, "cpu_seconds": s / 2}
            for n, s in enumerate(seconds)
        ]
        for case, seconds in rounds.items()
    }
    measured = MeasuredModes(asked, machine)
    answers: list[Any] = [{"event": "sizes", "case": c, **entry} for c, entry in sizes.items()]
    for answer in (*answers, *(entry for own in timings.values() for entry in own)):
        measured.add(answer)
    return measured


def test_rows_by_hand() -> None:
    """Rings of 4 send 2 x 3/4 of an all-reduce; of 2, half of a broadcast, all of an all-reduce."""
    measured = measured_by_hand({0: [3.0, 1.0, 2.0], 1: [5.0]})
    row, square = mode_rows(cases_of(4), measured)
    assert (row["seconds"], row["seconds_min"], row["seconds_max"]) == (2.0, 1.0, 3.0)
    assert (row["cpu_seconds"], row["rounds"], square["rounds"]) == (1.0, 3, 1)
    assert row["sent_bytes"] == 2 * 3 / 4 * 800 and square["sent_bytes"] == 400 / 2 + 8
    assert (row["collectives"], square["collectives"]) == (4, 10)
    assert (row["parameters_law"], row["activations_law"]) == (1.1, 2.5)
    assert (square["parameters_law"], square["activations_law"]) == (1.0, 1.0)


def test_what_ctrl_c_leaves_is_told_as_incomplete(capsys: pytest.CaptureFixture[str]) -> None:
    """A case that was not timed has no row; nor has anything where the ranks never answered."""
    measured = measured_by_hand({0: [1.0]}, asked=2)
    measured.is_stopped = True
    report = bench_report(cases_of(4), measured, bench_environment(), steps=1, command="mpctl")
    assert [row["mode"] for row in report["results"]] == ["1d"] and not report["is_complete"]
    print_report(report, Path("out"))
    assert "not complete" in capsys.readouterr().out
    nothing = MeasuredModes(2, TWO_CORES, is_stopped=True)
    empty = bench_report(cases_of(4), nothing, bench_environment(), steps=1, command="mpctl")
    assert empty["results"] == [] and not empty["is_complete"]


def test_a_bench_is_complete_when_every_case_had_every_round() -> None:
    """A budget that ended after the first of two rounds leaves two of four timings."""
    assert measured_by_hand({0: [1.0, 2.0], 1: [3.0, 4.0]}, asked=2).is_complete
    short = measured_by_hand({0: [1.0], 1: [3.0]}, asked=2)
    assert not short.is_complete and short.done == 2


def test_more_ranks_than_cores_are_a_rehearsal(capsys: pytest.CaptureFixture[str]) -> None:
    cases, timed = cases_of(4), {0: [1.0], 1: [1.0]}
    many = measured_by_hand(timed, machine=Machine(cores=8, gpus=0, memory_bytes=8 * 2**30))
    report, other = (
        bench_report(cases, measured, bench_environment(), steps=1, command="mpctl")
        for measured in (measured_by_hand(timed), many)
    )
    assert report["findings"]["is_rehearsal"] and not other["findings"]["is_rehearsal"]
    print_report(report, Path("out"))
    words = capsys.readouterr().out
    assert (
        "rehearsal, not a measurement: 4 ranks share" in words
        and "2d" in words
        and "law, activations" in words
    )


@pytest.mark.slow
def test_a_real_bench_finds_what_is_planned(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    settings = [word for name, value in SMALL.items() for word in ("--set", f"{name}={value}")]
    asked = ["bench", "tensor-modes", "--ranks", "4", "--rounds", "2", "--steps", "1", *settings]
    assert run([*asked, "--json", "--out", str(tmp_path / "out")]) == 0
    report = json.loads(capfd.readouterr().out)
    assert json.loads((tmp_path / "out" / "report.json").read_text()) == report
    assert RunDir(tmp_path / "out" / "ranks-r1").answers.exists()
    assert report["schema"] == "mpctl.bench/2" and report["is_complete"]
    assert [row["mode"] for row in report["results"]] == ["1d", "2d"]
    for row in report["results"]:
        assert row["rounds"] == 2 and row["seconds"] > 0 and row["cpu_seconds"] > 0
        assert row["traffic"] == row["planned_traffic"]
        assert row["sent_bytes"] == row["planned_sent_bytes"]
        assert row["collectives"] == row["planned_collectives"]
        assert row["parameter_bytes"] == row["planned_parameter_bytes"]
        assert row["saved_bytes"] == row["planned_saved_bytes"]


def test_bad_input_ends_before_a_rank_starts(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "tensor-modes", "--ranks", "5"]) == 2
    assert run(["bench", "tensor-modes", "--on", "ssh", "--nodes", "2", "--ranks", "4"]) == 2
    assert run(["bench", "tensor-modes", "--tp", "4"]) == 2
    assert "start the ranks" not in capfd.readouterr().err
