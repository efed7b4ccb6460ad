"""Frozen parameters: the same curve and gradients under any layout, exactly the planned messages,
not a bit changed, and a checkpoint that runs with other patterns read."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from mpctl.model.operators.grad_flow import frozen_by
from mpctl.records.checkpoint.verify import find_damage
from mpctl.run.launch.summary import planned_traffic
from mpctl.train.runtime.train import Trainer
from tests.train.checkpoint.shards import shard_record
from tests.train.runtime.test_axes import MODES, same_gradients, small_job
from tests.train.runtime.tiny import _train_rank, column, make_trainer, tiny_job, tiny_plan, train, whole_weights

BOTTOM = ["embedding.*", "layers.0.*"]
LAST_BIAS = ["[!l]*", "*.attention*", "*.mlp_norm*", "*.mlp.up*", "*.weight"]
NEXT_ALONE = ["[!pn]*"]  # BERT's pooler and next-sentence head, which one rank alone computes
CASES = [("bert", NEXT_ALONE, "tp2-sp"), ("llama", [*BOTTOM, "*norm*", "layers.1.mlp.*"], "tp4-sp")]
SLOW_CASES = [
    ("gpt", BOTTOM, "tp2-full-parts"),
    ("t5", ["embedding.*", "encoder.*"], "tp2-sp"),
    ("gpt", BOTTOM, "tp2-sp-cp2-full"),
    ("gpt", BOTTOM, "cp2-dp2"),
    ("gpt", ["*.weight"], "tp2-sp-cp2-full"),
    ("gpt", ["*.weight"], "tp2-full-no-dropout"),
    ("gpt", LAST_BIAS, "tp2-sp-cp2-full"),
    ("gpt", LAST_BIAS, "tp2-full-no-dropout"),
    ("gpt", ["*norm*"], "tp4-sp"),
    ("bert", LAST_BIAS, "tp2-full-no-dropout"),
    ("bert", [*BOTTOM, "layers.1.attention.qkv.*"], "tp2-sp-cp2-full"),
    ("bert-pre", BOTTOM, "tp2-sp-cp2-full"),
    ("t5", ["embedding.*", "encoder.*", "*.cross.key_value*"], "tp2-sp-cp2-full"),
    ("t5", ["embedding.*", "*layers.*"], "tp2-cp2"),
    ("t5", ["embedding.*", "decoder.*"], "tp2-full-no-dropout"),
    ("glm", ["embedding.word.*", "*.mlp.*"], "tp2-full-parts"),
    ("glm", ["embedding.*", "layers.?.attention*"], "tp4-sp"),
    ("llama", ["embedding.*", "head.*", "*norm*"], "tp2-full-no-dropout"),
]


@pytest.mark.parametrize(
    ("shape", "freeze", "mode"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES)],
    ids=lambda value: value if isinstance(value, str) else "+".join(value),
)
@pytest.mark.quick(1)
def test_a_frozen_run_sends_what_is_planned_and_learns_what_one_process_learns(
    data, tmp_path: Path, shape: str, freeze: list[str], mode: str
) -> None:
    tp, cp, dp, changes = MODES[mode]
    frozen = {"training__freeze": freeze}
    job = small_job(data, tp, cp, dp, shape, {**changes, **frozen})
    dropout = {key: changes[key] for key in changes if key == "training__dropout"}
    one = small_job(data, 1, 1, 1, shape, {**frozen, **dropout})
    ranks = train(job, tmp_path / "ranks")
    alone = [_train_rank(0, 1, one.model_dump(mode="json"), str(tmp_path / "one"))]
    assert column(ranks) == pytest.approx(column(alone), rel=1e-10)
    same_gradients(ranks, alone, vocab=job.model.vocab)
    estimate = tiny_plan(job).estimate
    for rank in ranks:
        assert rank["count"] == estimate.memory[0].parameters
        assert rank["traffic"] == planned_traffic(estimate.messages[0])
    _only_the_others_moved(ranks, make_trainer(one, tmp_path / "fresh"), freeze)


def _only_the_others_moved(ranks: list[Any], fresh: Trainer, freeze: list[str]) -> None:
    is_frozen, vocab = frozen_by(freeze), fresh.job.model.vocab
    held = whole_weights(ranks, vocab=vocab)
    for name, parameter in fresh.model.named_parameters():
        first = parameter.detach()[: len(held[name])]
        assert torch.equal(held[name], first) is is_frozen(name), name


# ---------------------------------------------------------------- checkpoints

FROZEN = ["embedding.word.*", "layers.0.*"]


def _job(data: Path, freeze: list[str], **changes: Any):
    settings = {
        "training__steps": 4,
        "checkpoint__interval": 2,
        "training__eval_samples": 0,
        "training__freeze": freeze,
    }
    return tiny_job(data, **{**settings, **changes})


def _values(trainer: Trainer) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def _trained(job, folder: Path) -> list[float]:
    return [record["loss"] for record in make_trainer(job, folder).run()]


def _continued(source: Path, folder: Path) -> Path:
    """A run directory with the checkpoint after step 2 of another."""
    shutil.copytree(source / "checkpoints/step-2", folder / "checkpoints/step-2")
    return folder


@pytest.fixture(scope="module")
def frozen_run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """4 steps in bfloat16 at tp 1, saved after 2 and 4; with its losses."""
    folder = tmp_path_factory.mktemp("frozen")
    job = _job(data, FROZEN, training__dtype="bf16")
    losses = _trained(job, folder)
    (folder / "job.json").write_text(job.model_dump_json())
    return folder, losses


def test_a_checkpoint_holds_all_values_and_the_moments_of_the_trained(frozen_run) -> None:
    step = frozen_run[0] / "checkpoints/step-2"
    assert find_damage(step) == []
    places = shard_record(step, 0).parameters
    with safe_open(step / "shard-0.safetensors", framework="pt") as file:
        keys = set(file.keys())
        dtypes = {name: file.get_tensor(f"{name}/value").dtype for name in places}
    is_frozen = frozen_by(FROZEN)
    assert {f"{name}/value" for name in places} <= keys
    for name, dtype in dtypes.items():
        assert (f"{name}/exp_avg" in keys) is not is_frozen(name)
        assert dtype == (torch.bfloat16 if is_frozen(name) else torch.float32), name


def test_a_frozen_run_goes_on_to_the_bit(frozen_run, data: Path, tmp_path: Path) -> None:
    run, losses = frozen_run
    job = _job(data, FROZEN, training__dtype="bf16")
    assert _trained(job, _continued(run, tmp_path)) == losses[2:]


def test_what_was_frozen_can_be_trained_later(frozen_run, data: Path, tmp_path: Path) -> None:
    """Its moments start at 0, with a step count of their own."""
    trainer = make_trainer(_job(data, [], training__dtype="bf16"), _continued(frozen_run[0], tmp_path))
    fresh = _values(make_trainer(_job(data, [], training__dtype="bf16"), tmp_path / "fresh"))
    values, is_frozen = _values(trainer), frozen_by(FROZEN)
    assert all(torch.equal(values[name], fresh[name]) is is_frozen(name) for name in values)
    next(trainer.run())
    for name, parameter in trainer.model.named_parameters():
        value = trainer.optimizer.full_value(parameter)
        count = float(trainer.optimizer.rule.state[value]["step"])
        assert count == (1 if is_frozen(name) else 3), name
        assert not torch.equal(value.detach(), values[name].float()), name


def test_what_was_trained_can_be_frozen_later(data: Path, tmp_path: Path) -> None:
    """As published: the masters' values, rounded to what the model computed with."""
    _trained(_job(data, [], training__dtype="bf16", training__steps=2), tmp_path / "first")
    whole = make_trainer(_job(data, [], training__dtype="bf16"), tmp_path / "first")
    job = _job(data, FROZEN, training__dtype="bf16")
    trainer = make_trainer(job, _continued(tmp_path / "first", tmp_path / "second"))
    before, is_frozen = _values(trainer), frozen_by(FROZEN)
    assert all(torch.equal(value, _values(whole)[name]) for name, value in before.items())
    assert len(list(trainer.run())) == 2
    after = _values(trainer)
    assert all(torch.equal(after[n], before[n]) for n in before if is_frozen(n))
    assert not torch.equal(after["final_norm.weight"], before["final_norm.weight"])


@pytest.mark.parametrize("freeze", [[], FROZEN, ["layers.1.*"]])
def test_weights_of_a_frozen_run_are_a_start(frozen_run, data: Path, tmp_path: Path, freeze: list[str]) -> None:
    job = _job(data, freeze, training__dtype="bf16", training__init_from=str(frozen_run[0]))
    last = tmp_path / "last"
    shutil.copytree(frozen_run[0] / "checkpoints/step-4", last / "checkpoints/step-4")
    expected = _values(make_trainer(_job(data, FROZEN, training__dtype="bf16"), last))
    found = _values(make_trainer(job, tmp_path / "start"))
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_frozen_run_starts_from_a_trained_one(data: Path, tmp_path: Path) -> None:
    job = _job(data, [], training__steps=2)
    _trained(job, tmp_path / "trained")
    (tmp_path / "trained/job.json").write_text(job.model_dump_json())
    expected = _values(make_trainer(job, tmp_path / "trained"))
    start = _job(data, BOTTOM, training__init_from=str(tmp_path / "trained"))
    trainer = make_trainer(start, tmp_path / "start")
    assert all(torch.equal(value, expected[name]) for name, value in _values(trainer).items())
    assert trainer.step == 0 and len(list(trainer.run())) == 4


@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_another_layout_continues_the_same_curve(data: Path, tmp_path: Path, tp: int) -> None:
    """The frozen word table is padded to another height."""
    job = _job(data, FROZEN)
    losses = column(train(_job(data, FROZEN, tp=tp), tmp_path / "split"))
    assert _trained(job, _continued(tmp_path / "split", tmp_path / "one")) == pytest.approx(losses[2:], rel=1e-6)
