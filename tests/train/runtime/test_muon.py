"""Muon: Newton-Schulz steps, every layout on one curve, messages, states, checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mpctl.core.topology import Topology
from mpctl.run.launch.summary import planned_traffic
from mpctl.spec.load import load_job
from mpctl.spec.muon import MuonSpec
from mpctl.train.kernels.newton_schulz import orthogonalized
from mpctl.train.rehearsal.worker import rehearse_rank
from tests.train.runtime.test_axes import SHAPES
from tests.train.runtime.test_experts import LAYOUTS, moe_job
from tests.train.runtime.test_pipeline import layout, pipeline_job, whole_pipelines
from tests.train.runtime.tiny import (
    _train_rank,
    column,
    make_trainer,
    settings,
    tiny_job,
    tiny_plan,
    train,
    whole_weights,
)

MUON = {"training__optimizer": "muon", "training__learning_rate": 3e-3}
LIGHT = {"model__layers": 2, "training__steps": 3, "training__eval_samples": 0, "parallel__bucket_bytes": 40_000}


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (3, 2, 5, 4)])
def test_newton_schulz_leaves_the_vectors_and_brings_values_near_1(shape: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    matrices = torch.randn(shape, dtype=torch.float64)
    settings = MuonSpec(coefficients="polar_express", steps=12, scale_mode="unit_rms_norm", extra_scale=1.0)
    u, _, v = torch.linalg.svd(matrices, full_matrices=False)
    expected = (u @ v) * (shape[-2] / shape[-1]) ** 0.5
    torch.testing.assert_close(orthogonalized(matrices, settings, torch.float64), expected, rtol=1e-3, atol=1e-3)
    values = torch.linalg.svdvals(orthogonalized(matrices, MuonSpec(extra_scale=1.0), torch.float64))
    assert (values / max(shape[-2:]) ** 0.5 - 1).abs().max() < 0.4  # quintic's five steps


def test_a_matrix_of_zeros_stays() -> None:
    assert torch.equal(orthogonalized(torch.zeros(4, 3), MuonSpec(), torch.float32), torch.zeros(4, 3))


CASES = [("gpt", 1, layout(1, tp=2, dp=2)), ("llama", 3, layout(1, tp=2, dp=2))]
SLOW = [
    (shape, zero, how)
    for shape in ("gpt", "llama", "latent", "t5")
    for zero, how in (
        (0, layout(1, tp=2)),
        (0, layout(2, dp=2)),
        (1, layout(1, dp=4)),
        (2, layout(2, tp=2)),
        (2, layout(1, tp=2, dp=2)),
        (3, layout(1, tp=2, dp=2)),
        (3, layout(2, dp=2)),
    )
    if (shape, zero, how) not in CASES
]


@pytest.mark.parametrize(("shape", "zero", "how"), [*CASES, *(pytest.param(*c, marks=pytest.mark.slow) for c in SLOW)])
@pytest.mark.quick(1)
def test_a_layout_changes_no_loss(data: Path, tmp_path: Path, shape: str, zero: int, how: dict[str, Any]) -> None:
    even = {"model__decoder_layers": 2} if shape == "t5" else {}
    changes = {**SHAPES[shape], **LIGHT, **even, **MUON}
    job = pipeline_job(data, "gpt", how, {**changes, "parallel__zero": zero})
    ranks = train(job, tmp_path / "ranks")
    one = pipeline_job(data, "gpt", {}, changes)
    single = [_train_rank(0, 1, one.model_dump(mode="json"), str(tmp_path / "one"))]
    assert len(set(column(single))) == 3
    for name in ("loss", "grad_norm"):
        assert column(ranks, name) == pytest.approx(column(single, name), rel=1e-10)
    vocab = one.model.vocab if one.model else 0
    found, expected = (whole_weights(r, vocab=vocab) for r in (whole_pipelines(ranks), single))
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-10, atol=1e-11, msg=name)
    estimate = tiny_plan(job).estimate
    for rank in ranks:
        assert rank["traffic"] == planned_traffic(estimate.messages[rank["coords"]["pp"]])


# ---------------------------------------------------------------- what is held and saved


@pytest.mark.parametrize(("zero", "narrow"), [(0, False), (1, True), (3, False)])
def test_a_rank_holds_what_is_planned(zero: int, narrow: bool) -> None:
    """One moment of matrices, two of the rest; the slices of the last rank have the word table."""
    gpus = {"launch__device": "cuda", "training__dtype": "bf16", "training__global_batch_size": 16}
    narrowed = {"training__optimizer_dtype": "bf16"} if narrow else {}
    job = load_job(None, settings(1, 2, **gpus, **MUON, **narrowed, **LIGHT, parallel__zero=zero))
    accounts = [rehearse_rank(job, Topology.of(job.sizes), rank) for rank in range(2)]
    for account in accounts:
        assert account["failure"] is None, "".join(account["failure"]["traceback"])
    memory = tiny_plan(job).estimate.memory[0]
    assert max(account["state_bytes"]["optimizer"] for account in accounts) == memory.optimizer_bytes
    assert accounts[0]["state_bytes"]["parameters"] == memory.parameter_bytes
    assert accounts[0]["step_traffic"] == planned_traffic(tiny_plan(job).estimate.messages[0])
    peak = max(account["peak_bytes"] for account in accounts)
    assert peak == pytest.approx(memory.allocated_bytes - memory.workspace_bytes, rel=0.05)


def test_a_checkpoint_has_the_momentum_and_is_read_by_other_layouts(data: Path, tmp_path: Path) -> None:
    few = {**LIGHT, **MUON, "training__dtype": "fp64", "training__steps": 4}
    saves = {"checkpoint__interval": 2, "checkpoint__at_end": False}
    job = tiny_job(data, **few, **saves)
    whole = [record["loss"] for record in make_trainer(job, tmp_path / "one").run()]
    (file,) = (tmp_path / "one/checkpoints/step-2").glob("*.safetensors")
    saved = load_file(file)
    kinds = {name.rsplit("/", 1)[1] for name in saved if name.startswith("layers.0.mlp.up.weight/")}
    assert kinds == {"value", "momentum_buffer"}
    assert "embedding.word.weight/exp_avg_sq" in saved and "layers.0.mlp.up.bias/exp_avg" in saved
    assert sum(tensor.nbytes for tensor in saved.values()) == tiny_plan(job).estimate.checkpoint_bytes
    for name, how in (("zero", {"tp": 2, "dp": 2, "parallel__zero": 3}), ("tp", {"tp": 2})):
        folder = tmp_path / name
        shutil.copytree(tmp_path / "one/checkpoints/step-2", folder / "checkpoints/step-2")
        ranks = train(tiny_job(data, **how, **few), folder)
        assert column(ranks) == pytest.approx(whole[2:], rel=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ep2", "tp2-ep2", "tp2-dp2-ep2-etp2", "pp2-dp2-ep2", "zero1", "zero3"])
def test_each_expert_is_a_matrix_of_its_own(data: Path, tmp_path: Path, name: str) -> None:
    few = {**MUON, "training__steps": 3, "training__eval_samples": 0, "checkpoint__interval": 0}
    alone = train(moe_job(data, layout=few), tmp_path / "alone")
    ranks = train(moe_job(data, layout={**LAYOUTS[name], **few}), tmp_path / "ranks")
    for column_name in ("loss", "grad_norm"):
        assert column(ranks, column_name) == pytest.approx(column(alone, column_name), rel=1e-10)
