"""SGD, Lion and AdamW with narrow states: the arithmetic, every layout, what is held, checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from mpctl.core.topology import Topology
from mpctl.spec.load import load_job
from mpctl.train.rehearsal.worker import rehearse_rank
from mpctl.train.runtime.optimizer import ParameterGroup, UpdateRule
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

MOMENTUM = {"training__optimizer": "sgd", "training__momentum": 0.9, "training__learning_rate": 0.1}
NARROW, PURE = {"training__optimizer_dtype": "bf16"}, {"training__master_weights": False}
LION = {"training__optimizer": "lion", "training__learning_rate": 3e-4, "model__bias": False}
"""The gradient of a key's bias is 0 but for rounding, whose sign Lion would step by."""
SGD = {"training__optimizer": "sgd", "training__learning_rate": 0.1}
KINDS = {"narrow": NARROW, "momentum": MOMENTUM, "sgd": SGD, "lion": LION}


def stepped(rule: UpdateRule, value: Tensor, steps: int = 3) -> Tensor:
    """The value after steps with gradients that alternate in sign."""
    for step in range(1, steps + 1):
        value.grad = torch.sin(torch.arange(value.numel(), dtype=torch.float64) * step).to(value.dtype)
        rule.step(1e-2)
    return value.detach()


def start(dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.linspace(-1, 1, 1003, dtype=torch.float64).to(dtype))


def rule_of(value: Tensor, **changes: Any) -> UpdateRule:
    return UpdateRule([ParameterGroup([value], 0.1)], 0.9, 0.95, 1e-8, **changes)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_is_torchs(momentum: float) -> None:
    ours, theirs = start(torch.float64), start(torch.float64)
    sgd = torch.optim.SGD([theirs], lr=1e-2, momentum=momentum, weight_decay=0.1)
    stepped(rule_of(ours, optimizer="sgd", momentum=momentum), ours)
    for step in range(1, 4):
        theirs.grad = torch.sin(torch.arange(1003, dtype=torch.float64) * step)
        sgd.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=1e-15)


def test_lion_by_hand() -> None:
    """m 0, g 2: the sign of 0.2 is 1; decay takes a thousandth; m becomes a twentieth of 2."""
    value = nn.Parameter(torch.tensor([1.0]))
    rule = rule_of(value, optimizer="lion")
    value.grad = torch.tensor([2.0])
    rule.step(1e-2)
    assert value.item() == pytest.approx(1 - 1e-3 - 1e-2)
    assert rule.state[value]["exp_avg"].item() == pytest.approx(0.1)


def test_narrow_moments_are_rounded_once_a_step() -> None:
    """The first step of AdamW in float32, whose moments are then rounded."""
    narrow, wide = start(), start()
    of_narrow, of_wide = rule_of(narrow, dtype=torch.bfloat16), rule_of(wide)
    torch.testing.assert_close(stepped(of_narrow, narrow, 1), stepped(of_wide, wide, 1), rtol=1e-6, atol=1e-7)
    for name in ("exp_avg", "exp_avg_sq"):
        found, exact = of_narrow.state[narrow][name], of_wide.state[wide][name]
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.float(), exact, rtol=2**-8, atol=1e-30)
    assert float(of_narrow.state[narrow]["step"]) == 1


@pytest.mark.parametrize("found", [0.0, 1.0])
@pytest.mark.parametrize("changes", [{"dtype": torch.bfloat16}, {"optimizer": "sgd", "momentum": 0.9}])
def test_an_update_on_a_device_is_scaled_and_can_be_refused(found: float, changes: dict[str, Any]) -> None:
    value, other = start(), start()
    rule, plain = rule_of(value, **changes), rule_of(other, **changes)
    value.grad, other.grad = torch.full((1003,), 6.0), torch.full((1003,), 3.0)
    if found:
        value.grad[0] = torch.inf
    rule.step(1e-2, grad_scale=torch.tensor(2.0), found_inf=torch.tensor(found))
    plain.step(1e-2)
    expected = start().detach() if found else other.detach()
    assert torch.equal(value, expected)
    assert float(rule.state[value]["step"]) == 1 - found
    for name in rule.moments:
        assert torch.equal(rule.state[value][name], plain.state[other][name] * (1 - found))


@pytest.mark.parametrize(
    "changes",
    [{"dtype": torch.bfloat16}, {"optimizer": "sgd", "momentum": 0.9, "dtype": torch.bfloat16}, {"optimizer": "lion"}],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_cuts_do_not_change_an_update(changes: dict[str, Any], dtype: torch.dtype) -> None:
    """As ZeRO cuts buckets: into slices that are updated apart."""
    whole = start(dtype)
    slices = [nn.Parameter(part.clone()) for part in start(dtype).detach().split((320, 640, 43))]
    gradient = torch.sin(torch.arange(1003, dtype=torch.float64)).to(dtype)
    rule = UpdateRule([ParameterGroup(slices, 0.1)], 0.9, 0.95, 1e-8, **changes)
    one = rule_of(whole, **changes)
    for _ in range(3):
        whole.grad = gradient
        for part, own in zip(slices, gradient.split((320, 640, 43)), strict=True):
            part.grad = own
        one.step(1e-2)
        rule.step(1e-2)
    near = {"rtol": 0, "atol": 0} if dtype == torch.bfloat16 else {"rtol": 1e-13, "atol": 1e-15}
    torch.testing.assert_close(torch.cat([part.detach() for part in slices]), whole.detach(), **near)


# ---------------------------------------------------------------- layouts


LIGHT = {"model__layers": 2, "training__steps": 3, "training__eval_samples": 0}
SMALL = {"parallel__bucket_bytes": 40_000}
CASES = [("narrow", 3, layout(1, dp=2))]
SLOW = [
    (kind, zero, how)
    for kind in KINDS
    for zero, how in ((0, layout(1, tp=2)), (2, layout(2, dp=2)), (3, layout(1, tp=2, dp=2)), (1, layout(1, dp=2)))
    if (kind, zero, how) not in CASES
]


@pytest.mark.parametrize(("kind", "zero", "how"), [*CASES, *(pytest.param(*c, marks=pytest.mark.slow) for c in SLOW)])
@pytest.mark.quick(1)
def test_a_layout_changes_no_loss(data: Path, tmp_path: Path, kind: str, zero: int, how: dict[str, Any]) -> None:
    changes = {**LIGHT, **SMALL, **KINDS[kind]}
    ranks = train(pipeline_job(data, "gpt", how, {**changes, "parallel__zero": zero}), tmp_path / "ranks")
    one = pipeline_job(data, "gpt", {}, changes)
    single = [_train_rank(0, 1, one.model_dump(mode="json"), str(tmp_path / "one"))]
    assert len(set(column(single))) == 3
    for name in ("loss", "grad_norm"):
        assert column(ranks, name) == pytest.approx(column(single, name), rel=1e-10)
    vocab = one.model.vocab if one.model else 0
    found, expected = (whole_weights(r, vocab=vocab) for r in (whole_pipelines(ranks), single))
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.slow
def test_pure_bf16_is_equal_to_the_bit_under_zero(data: Path, tmp_path: Path) -> None:
    """Without clipping, whose factor is rounded as the norm's sum is."""
    changes = {**LIGHT, **SMALL, **PURE, "training__dtype": "bf16", "training__clip_norm": 0.0}
    changes |= {"training__global_batch_size": 4}
    curves = []
    for zero in range(4):
        ranks = train(tiny_job(data, 1, 2, **changes, parallel__zero=zero), tmp_path / str(zero))
        curves.append(column(ranks))
    assert curves[0] == curves[1] == curves[2] == curves[3] and len(set(curves[0])) == 3
    with_masters = train(tiny_job(data, 1, 2, **{**changes, **dict.fromkeys(PURE)}), tmp_path / "masters")
    assert curves[0] != column(with_masters)
    assert curves[0] == pytest.approx(column(with_masters), rel=0.05)


# ---------------------------------------------------------------- what is held and saved


HELD = {
    "narrow": (NARROW, 0),
    "pure": ({**PURE, "training__gradient_dtype": "bf16"}, 3),
    "sgd": (SGD, 1),
    "momentum": (MOMENTUM, 2),
    "lion-pure": ({**LION, **PURE}, 1),
    "pure-wide": ({**PURE, "training__optimizer_dtype": "fp32"}, 3),
}


@pytest.mark.parametrize("kind", [pytest.param(k, marks=[pytest.mark.slow] * (k != "pure")) for k in HELD])
def test_a_rank_holds_what_is_planned(kind: str) -> None:
    changes, zero = HELD[kind]
    gpus = {"launch__device": "cuda", "training__dtype": "bf16", "training__global_batch_size": 16}
    job = load_job(None, settings(1, 2, **gpus, **changes, **SMALL, parallel__zero=zero))
    account = rehearse_rank(job, Topology.of(job.sizes), 1)
    assert account["failure"] is None, "".join(account["failure"]["traceback"])
    memory = tiny_plan(job).estimate.memory[0]
    assert account["state_bytes"] == {
        "parameters": memory.parameter_bytes,
        "gradients": memory.gradient_bytes,
        "optimizer": memory.optimizer_bytes,
    }


@pytest.mark.parametrize(
    ("kind", "fields", "dtype"),
    [
        ("narrow", {"value": torch.float32, "exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16}, "bf16"),
        ("momentum", {"value": torch.float64, "momentum_buffer": torch.float64}, "fp64"),
        ("sgd", {"value": torch.float32}, "fp32"),
        ("pure", {"value": torch.bfloat16, "exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16}, "bf16"),
    ],
)
def test_a_checkpoint_has_the_moments_and_goes_on(
    data: Path, tmp_path: Path, kind: str, fields: dict[str, torch.dtype], dtype: str
) -> None:
    few = {**LIGHT, **(PURE if kind == "pure" else KINDS[kind]), "training__dtype": dtype, "training__steps": 4}
    job = tiny_job(data, **few, checkpoint__interval=3, checkpoint__at_end=False)
    whole = [record["loss"] for record in make_trainer(job, tmp_path).run()]
    (file,) = (tmp_path / "checkpoints/step-3").glob("*.safetensors")
    saved = load_file(file)
    kinds = {name.rsplit("/", 1)[1]: tensor.dtype for name, tensor in saved.items()}
    assert kinds == fields
    assert sum(tensor.nbytes for tensor in saved.values()) == tiny_plan(job).estimate.checkpoint_bytes
    again = make_trainer(job, tmp_path)
    assert [record["loss"] for record in again.run()] == whole[3:]


def test_another_optimizer_starts_its_moments_at_0(data: Path, tmp_path: Path) -> None:
    few = {**LIGHT, "training__steps": 2, "training__dtype": "fp64", "checkpoint__interval": 2}
    list(make_trainer(tiny_job(data, **few), tmp_path).run())
    trainer = make_trainer(tiny_job(data, **{**few, **MOMENTUM, "training__steps": 3}), tmp_path)
    assert trainer.step == 2
    assert not trainer.optimizer.rule.state
    list(trainer.run())
    assert {tuple(sorted(state)) for state in trainer.optimizer.rule.state.values()} == {("momentum_buffer", "step")}
    parameter = next(iter(trainer.optimizer.trained))
    assert trainer.optimizer.updates_of(parameter) == 1


@pytest.mark.slow
def test_a_checkpoint_of_narrow_moments_is_read_by_other_layouts(data: Path, tmp_path: Path) -> None:
    few = {**LIGHT, **NARROW, "training__dtype": "fp64", "training__steps": 4}
    saves = {"checkpoint__interval": 2, "checkpoint__at_end": False}
    whole = [record["loss"] for record in make_trainer(tiny_job(data, **few, **saves), tmp_path / "one").run()]
    for name, how in (("zero", {"dp": 2, "parallel__zero": 3}), ("tp", {"tp": 2})):
        folder = tmp_path / name
        shutil.copytree(tmp_path / "one/checkpoints/step-2", folder / "checkpoints/step-2")
        ranks = train(tiny_job(data, **how, **few, **SMALL), folder)
        assert column(ranks) == pytest.approx(whole[2:], rel=1e-10)
