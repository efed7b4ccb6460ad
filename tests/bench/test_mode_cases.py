"""The modes that some ranks can be timed in, and the ways out of those that they cannot."""

from __future__ import annotations

from typing import Any

import pytest

from mpctl.bench.tensor_modes import ModeCases, layer_job, mode_cases
from mpctl.errors import InputError
from mpctl.hosts.machine import Machine
from mpctl.render.bench import print_mode_cases

TWO_CORES = Machine(cores=2, gpus=0, memory_bytes=8 * 2**30)
SMALL: dict[str, Any] = {
    "model.family": "gpt", "model.layers": 2, "model.hidden": 32, "model.heads": 8,
    "model.ffn": 128, "model.vocab": 64, "model.seq_length": 8, "training.micro_batch_size": 4,
    "launch.device": "cpu",
}  # fmt: skip


def cases_of(ranks: int, **settings: Any) -> ModeCases:
    named = {key.replace("__", "."): value for key, value in settings.items()}
    return mode_cases(layer_job(None, {**SMALL, **named}), ranks, TWO_CORES, device="cpu")


def test_the_modes_of_some_ranks_and_why_not_the_others() -> None:
    four = cases_of(4)
    assert [(case.mode, dict(case.axes)) for case in four.cases] == [
        ("1d", {"tp": 4}), ("2d", {"col": 2, "row": 2}),
    ]  # fmt: skip
    assert [mode for mode, _ in four.refused] == ["2.5d", "3d"]
    assert "which is 2d" in four.refused[0][1].message
    eight = cases_of(8)
    assert [(case.mode, case.depth) for case in eight.cases] == [
        ("1d", None), ("2.5d", 2), ("3d", None),
    ]  # fmt: skip


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
