"""Adapters over a base in nf4: one curve in every layout, planned bytes, and the values of bitsandbytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mpctl.model.layout.job_layout import JobLayout
from mpctl.plan.estimate.base_weights import held_weights
from mpctl.run.launch.preflight import packed_base_issues
from mpctl.run.launch.summary import planned_traffic
from mpctl.spec.job import JobSpec
from mpctl.train.layers.parameters import stored_of
from tests.train.runtime.test_adapters import FULL, LAYOUTS, LORA, MODELS, PP2
from tests.train.runtime.tiny import column, make_trainer, tiny_job, tiny_plan, train

functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")

QLORA: dict[str, Any] = {**LORA, "kind": "qlora"}
PACKED = ("llama", "gpt", "latent", "experts")
LAYOUT_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dp2-zero3": ("llama", LAYOUTS["dp2-zero3"]),
    "pp2-full": ("llama", {**PP2, **FULL}),
    "dp2": ("gpt", {"dp": 2}),
    "dp2-zero1": ("llama", LAYOUTS["dp2-zero1"]),
    "dp2-zero2": ("latent", LAYOUTS["dp2-zero2"]),
    "cp2-full": ("llama", LAYOUTS["cp2-full"]),
    "zero-bubble": ("llama", {**PP2, "parallel__schedule": "zero-bubble"}),
}


def job_of(data: Path, model: str, changes: dict[str, Any], **adapter: Any) -> JobSpec:
    ranks = changes.get("dp", 1) * changes.get("parallel__cp", 1) * changes.get("parallel__pp", 1)
    shape, lora = MODELS[model]
    usual = {"training__dtype": "fp64", "training__steps": 3, "checkpoint__at_end": False}
    own = {"training__adapter": {**lora, "kind": "qlora", **adapter}, "cluster__gpus_per_node": ranks}
    return tiny_job(data, **{**usual, **shape, **own, "checkpoint__interval": 0, **changes})


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory):
    done: dict[str, list[dict[str, Any]]] = {}

    def trained(model: str) -> list[dict[str, Any]]:
        if model not in done:
            done[model] = train(job_of(data, model, {}), tmp_path_factory.mktemp("alone"))
        return done[model]

    return trained


@pytest.mark.parametrize("case", LAYOUT_CASES)
@pytest.mark.quick(1)
def test_every_layout_trains_over_the_same_base(data: Path, tmp_path: Path, alone, case: str) -> None:
    """Losses and norms are those of one process, weights the same to the bit; messages are the planned."""
    model, changes = LAYOUT_CASES[case]
    job, one = job_of(data, model, changes), alone(model)
    ranks = train(job, tmp_path, timeout=240)
    for name in ("loss", "grad_norm"):
        assert column(ranks, name) == pytest.approx(column(one, name), rel=1e-10), name
    estimate = tiny_plan(job).estimate
    for rank in ranks:
        assert rank["traffic"] == planned_traffic(estimate.messages[rank["coords"]["pp"]])
    base = {name: value for name, (_, value) in one[0]["weights"].items() if ".lora." not in name}
    for rank in ranks:
        own = {name: value for name, (_, value) in rank["weights"].items() if name in base}
        assert own and all(torch.equal(value, base[name]) for name, value in own.items())


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("model", PACKED)
def test_bytes_and_values_are_the_planned(data: Path, tmp_path: Path, model: str, double: bool) -> None:
    """A rank holds the planned bytes; values are those that bitsandbytes makes of the unpacked weights."""
    job = job_of(data, model, {}, double_quantization=double)
    trainer = make_trainer(job, tmp_path)
    plain = job.training.model_copy(update={"adapter": job.training.adapter.model_copy(update={"kind": "lora"})})
    before = dict(make_trainer(job.model_copy(update={"training": plain}), tmp_path).model.named_parameters())
    layout = JobLayout.of(job)
    packed = {n: held for n, p in trainer.model.named_parameters() if (held := stored_of(p)) is not None}
    assert len(packed) >= 4 * job.model.layers
    assert sum(t.nbytes for held in packed.values() for t in held.tensors) == held_weights(layout, 0).stored_bytes
    assert not any(trainer.model.get_parameter(name).untyped_storage().nbytes() for name in packed)
    for name, held in packed.items():
        value = before[name].detach()
        for one, whole in zip(*((t if t.dim() > 2 else t[None]) for t in (value, held.whole())), strict=True):
            bits, state = functional.quantize_4bit(
                one.float(), blocksize=64, compress_statistics=double, quant_type="nf4"
            )
            assert torch.equal(functional.dequantize_4bit(bits, state).double(), whole), name
        error = (held.whole() - value).square().mean().sqrt() / value.square().mean().sqrt()
        assert 0.08 < error < 0.1  # 0.092 of a normal distribution


@pytest.mark.parametrize("changes", [{}, FULL], ids=["kept", "recomputed"])
def test_a_peak_is_as_planned(data: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    """W is made for one product at a time: the peak of a step is the plan's to 5 %, states to the byte."""
    wide = {"model__hidden": 128, "model__ffn": 256, "training__micro_batch_size": 4, "training__dtype": "bf16"}
    job = job_of(data, "llama", {**wide, **changes, "launch__track_memory": True, "training__steps": 2}, dropout=0.0)
    trainer = make_trainer(job, tmp_path)
    list(trainer.run())
    found, memory = trainer.memory_watch.measured, tiny_plan(job).estimate.memory[0]
    assert found["parameters"] == memory.parameter_bytes
    assert found["peak"] == pytest.approx(memory.tensor_bytes, rel=0.05)


def test_a_launch_needs_the_package_and_weights(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(data, "llama", {})
    assert [issue.where for issue in packed_base_issues(job)] == ["training.init_from"]
    monkeypatch.setattr("mpctl.run.launch.preflight.find_spec", lambda name: None)
    first, *_ = packed_base_issues(job)
    assert first.rule == "extra-missing" and "pip install 'mpctl[quantized]'" in str(first)
    assert not list(packed_base_issues(job_of(data, "llama", {}, kind="lora")))
