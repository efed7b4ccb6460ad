"""Tensor modes on a bench: which can be timed, rows by hand, and one real bench of four ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mpctl.cli.app import run
from mpctl.core.errors import InputError
from mpctl.measure.bench.report import bench_environment
from mpctl.measure.bench.tensor_modes import ModeBench, ModeCases, layer_job, mode_cases
from mpctl.records.rundir.directory import RunDir
from mpctl.render.bench import print_mode_cases, print_report
from mpctl.run.hosts.machine import Machine

TWO_CORES = Machine(cores=2, gpus=0, memory_bytes=8 * 2**30)
SMALL: dict[str, Any] = {
    "model.family": "gpt",
    "model.layers": 2,
    "model.hidden": 32,
    "model.heads": 8,
    "model.ffn": 128,
    "model.vocab": 64,
    "model.seq_length": 8,
    "training.micro_batch_size": 4,
    "launch.device": "cpu",
}


def cases_of(ranks: int, **settings: Any) -> ModeCases:
    named = {key.replace("__", "."): value for key, value in settings.items()}
    return mode_cases(layer_job(None, {**SMALL, **named}), ranks, TWO_CORES, device="cpu")


def test_the_modes_of_some_ranks_and_why_not_the_others() -> None:
    four = cases_of(4)
    assert [(case.mode, dict(case.axes)) for case in four.cases] == [("1d", {"tp": 4}), ("2d", {"col": 2, "row": 2})]
    assert [mode for mode, _ in four.refused] == ["2.5d", "3d"]
    assert "which is 2d" in four.refused[0][1].message
    eight = cases_of(8)
    assert [(case.mode, case.depth) for case in eight.cases] == [("1d", None), ("2.5d", 2), ("3d", None)]


def test_ways_out_name_ranks_that_the_model_can_be_cut_over() -> None:
    """8 heads are not cut three ways, so that 27 ranks are no cube of this model; and no number of
    ranks helps a family that never runs a grid."""
    settings = {"model": "demo-gpt", "training.micro_batch_size": 8}
    gpt = dict(mode_cases(layer_job(None, settings), 4, TWO_CORES, device="cpu").refused)
    assert gpt["3d"].hint == "use --ranks 8; or --ranks 64 with micro batch 16"
    assert gpt["2.5d"].hint == "use d q^2 ranks with d at least 2"
    job = layer_job(None, {**settings, "model": "demo-bert"})
    bert = mode_cases(job, 4, TWO_CORES, device="cpu").refused
    assert {(mode, issue.hint) for mode, issue in bert} == {
        (mode, "use a model of family gpt") for mode in ("2d", "2.5d", "3d")
    }


def test_a_job_that_lays_out_its_ranks_or_has_no_mode_is_refused() -> None:
    with pytest.raises(InputError, match="lays out its ranks itself"):
        layer_job(None, {**SMALL, "parallel.tp": 4})
    with pytest.raises(InputError, match="needs a model"):
        mode_cases(layer_job(None, {}), 4, TWO_CORES, device="cpu")
    with pytest.raises(InputError) as caught:
        cases_of(4, model__heads=5, model__head_dim=8)
    assert "tp-divides-heads" in {issue.rule for issue in caught.value.issues}


def test_a_micro_batch_that_a_grid_cannot_cut_leaves_1d() -> None:
    odd = cases_of(4, training__micro_batch_size=3)
    assert [case.mode for case in odd.cases] == ["1d"]
    assert "tensor-mode-samples" in {issue.rule for _, issue in odd.refused}


def test_a_dry_run_says_what_would_be_timed(capsys: pytest.CaptureFixture[str]) -> None:
    print_mode_cases(cases_of(4), rounds=2, steps=3)
    words = capsys.readouterr().out
    assert "2 rounds of 3 steps" in words and "2 x 2" in words and "✗ 3d" in words


def test_ranks_are_shared_evenly_by_the_nodes_of_the_job() -> None:
    """2 nodes of 2 ranks each; 3 nodes cannot share 4 ranks."""
    two = cases_of(4, cluster__nodes=2)
    assert (two.plan.job.cluster.nodes, two.plan.job.cluster.gpus_per_node) == (2, 2)
    with pytest.raises(InputError) as refused:
        cases_of(4, cluster__nodes=3)
    assert "world-size" in {issue.rule for issue in refused.value.issues}


def test_hosts_that_nothing_names_are_refused_once() -> None:
    with pytest.raises(InputError) as refused:
        cases_of(4, cluster__nodes=2, launch__on="ssh")
    assert [i.where for i in refused.value.issues].count("--hostfile") == 1


def measured_by_hand(rounds: dict[int, list[float]], *, asked: int = 1, machine: Machine = TWO_CORES) -> ModeBench:
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
    measured = bench_of(asked, machine)
    answers: list[Any] = [{"event": "sizes", "case": c, **entry} for c, entry in sizes.items()]
    for answer in (*answers, *(entry for own in timings.values() for entry in own)):
        measured.take(answer)
    return measured


def bench_of(asked: int, machine: Machine = TWO_CORES) -> ModeBench:
    return ModeBench(bench_environment(), "mpctl", asked, cases_of(4), 1, machine)


def test_rows_by_hand() -> None:
    """Rings of 4 send 2 x 3/4 of an all-reduce; of 2, half of a broadcast, all of an all-reduce."""
    row, square = measured_by_hand({0: [3.0, 1.0, 2.0], 1: [5.0]}).rows
    assert (row["seconds"], row["seconds_min"], row["seconds_max"]) == (2.0, 1.0, 3.0)
    assert (row["cpu_seconds"], row["rounds"], square["rounds"]) == (1.0, 3, 1)
    assert row["sent_bytes"] == 2 * 3 / 4 * 800 and square["sent_bytes"] == 400 / 2 + 8
    assert (row["collectives"], square["collectives"]) == (4, 10)
    assert (row["parameters_law"], row["activations_law"]) == (1.1, 2.5)
    assert (square["parameters_law"], square["activations_law"]) == (1.0, 1.0)


def test_a_bench_after_ctrl_c_is_reported_as_incomplete(capsys: pytest.CaptureFixture[str]) -> None:
    """A case that was not timed has no row; nor has anything where the ranks never answered."""
    measured = measured_by_hand({0: [1.0]}, asked=2)
    measured.is_stopped = True
    report = measured.report()
    assert [row["mode"] for row in report["results"]] == ["1d"] and not report["is_complete"]
    print_report(report, Path("out"))
    assert "not complete" in capsys.readouterr().out
    nothing = bench_of(2)
    nothing.is_stopped = True
    empty = nothing.report()
    assert empty["results"] == [] and not empty["is_complete"]


def test_a_bench_is_complete_when_every_case_had_every_round() -> None:
    """A budget that ended after the first of two rounds leaves two of four timings."""
    assert measured_by_hand({0: [1.0, 2.0], 1: [3.0, 4.0]}, asked=2).is_complete
    short = measured_by_hand({0: [1.0], 1: [3.0]}, asked=2)
    assert not short.is_complete and len(short.timings) == 2


def test_more_ranks_than_cores_are_a_rehearsal(capsys: pytest.CaptureFixture[str]) -> None:
    timed = {0: [1.0], 1: [1.0]}
    many = measured_by_hand(timed, machine=Machine(cores=8, gpus=0, memory_bytes=8 * 2**30))
    report, other = measured_by_hand(timed).report(), many.report()
    assert report["findings"]["is_rehearsal"] and not other["findings"]["is_rehearsal"]
    print_report(report, Path("out"))
    words = capsys.readouterr().out
    assert "rehearsal, not a measurement: 4 ranks share" in words and "2d" in words and "law, activations" in words


@pytest.mark.slow
def test_a_real_bench_finds_what_is_planned(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
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
