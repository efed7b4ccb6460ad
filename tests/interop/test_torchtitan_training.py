"""Optimizer, learning rate, RoPE and precision of the emitted config: the plan's, by torchtitan's
own classes where they are installed (tests/interop/test_torchtitan.py says how; the flavours also
take `torchdata datasets tokenizers tensorboard`)."""

from __future__ import annotations

import re
from typing import Any

import pytest

from mpctl.interop.registry import emit_plan
from mpctl.runtime.lr_schedule import learning_rate
from tests.interop.jobs import LLAMA, Settings, plan_of
from tests.interop.snippets import assigned_in, calls_in, fields_of
from tests.interop.test_megatron import refusals
from tests.interop.test_torchtitan import LAYOUTS, SHAPE

SIZES: Settings = {
    "model": "llama-3-8b", "cluster.nodes": 1, "cluster.gpus_per_node": 8, "parallel.zero": 3,
    "training.dtype": "bf16", "training.global_batch_size": 64,
}  # fmt: skip
SCALING = {
    "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position": 8192.0,
}  # fmt: skip
RATES: dict[str, Settings] = {
    "cosine": {},
    "linear": {"training.lr_schedule": "linear", "training.min_learning_rate": 0.0},
    "constant": {"training.lr_schedule": "constant", "training.warmup_steps": 0},
    "wsd": {
        "training.lr_schedule": "wsd", "training.lr_wsd_decay_steps": 17,
        "training.lr_wsd_decay_style": "minus_sqrt", "training.steps": 60,
    },
    "longer decay": {"training.lr_decay_steps": 150, "training.learning_rate": 1e-6},
    "all warm-up": {"training.warmup_steps": 130},
}  # fmt: skip


def body_of(**settings: Any) -> str:
    return emit_plan(plan_of(settings, base=SIZES), "torchtitan").body


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("training.learning_rate", 1e-6, '"lr": 1e-06'),
        ("training.beta2", 0.5, '"betas": (0.9, 0.5)'),
        ("training.weight_decay", 0.25, '"weight_decay": 0.25'),
        ("training.warmup_steps", 7, "warmup_steps=7"),
        ("training.lr_schedule", "constant", "decay_ratio=0.0"),
        ("training.clip_norm", 0.0, 'max_norm = float("inf")'),
        ("training.seed", 7, "debug.seed = 7"),
        ("model.rotary_scaling", SCALING, "rope.scaling_factor = 32.0"),
    ],
)
def test_a_setting_changes_the_text(setting: str, value: object, said: str) -> None:
    assert said in body_of(**{setting: value})
    assert said not in body_of()


@pytest.mark.parametrize("name", ["llama-3-8b", "llama-3-70b", "llama-3-405b"])
def test_no_flavor_brings_its_scaling_or_fp8(name: str) -> None:
    body = body_of(model=name)
    assert assigned_in(body)["rope.scaling"] == "none"
    assert "llama3_405b" not in body
    assert ('config.model_spec = model_registry("405B")' in body) == (name == "llama-3-405b")


def test_a_flavor_is_used_for_its_vocabulary_and_epsilon_alone() -> None:
    for key, value in (("vocab", 32000), ("norm_epsilon", 1e-6)):
        emitted = emit_plan(plan_of({f"model.{key}": value}, base=SIZES), "torchtitan")
        assert "mpctl_plan" not in emitted.body
        assert any("no config of this model" in note for note in emitted.notes)


@pytest.mark.parametrize("name", RATES)
def test_the_fields_are_torchtitan_s(name: str) -> None:
    text = body_of(**RATES[name])
    for call in ("OptimizersContainer.Config", "ParamGroupConfig", "LRSchedulersContainer.Config"):
        assert set(calls_in(text)[call]) <= fields_of("torchtitan", call)
    classes = {
        "config": "Trainer.Config", "config.training": "TrainingConfig", "rope": "RoPE.Config",
        "config.debug": "DebugConfig", "config.compile": "CompileConfig",
    }  # fmt: skip
    for target, field in re.findall(r"(config(?:\.\w+)?|rope)\.(\w+)(?:,| =)", text):
        assert field in fields_of("torchtitan", classes[target]), (target, field)


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"training.lr_schedule": "wsd", "training.lr_wsd_decay_steps": 10},
         "emit-lr-wsd-decay-style"),
        ({"training.lr_decay_steps": 50}, "emit-lr-decay-steps"),
    ],
)  # fmt: skip
def test_a_schedule_that_it_lacks_is_refused(settings: Settings, rule: str) -> None:
    assert set(refusals({**SHAPE, **settings}, "torchtitan")) == {rule}


def test_norms_of_a_first_stage_without_layers_decay_as_a_note_says() -> None:
    """torchtitan refuses a group of parameters of which a stage has none."""
    settings = {**SHAPE, **LAYOUTS["ends as layers"], "parallel.vpp": 4}
    emitted = emit_plan(plan_of(settings), "torchtitan")
    assert "norm" not in calls_in(emitted.body)["ParamGroupConfig"]["pattern"]
    assert emitted.body.count("ParamGroupConfig(") == 1
    assert any("norms decay too" in note for note in emitted.notes)


def made_by(body: str) -> Any:
    """The config that torchtitan's own classes make of an emitted file with its model."""
    reason = "torchtitan with what its flavours import is not installed"
    pytest.importorskip(
        "torchtitan.models.llama3.config_registry", reason=reason, exc_type=ImportError
    )
    names: dict[str, Any] = {}
    exec(body, names)  # what this package wrote, from settings of this file
    return names["mpctl_plan"]()


@pytest.mark.parametrize("name", RATES)
def test_its_own_scheduler_has_the_plan_s_rate_at_every_step(name: str) -> None:
    config = made_by(body_of(**RATES[name]))
    import torch

    training = plan_of(RATES[name], base=SIZES).job.training
    kwargs = config.optimizer.param_groups[-1].optimizer_kwargs
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], **kwargs)
    schedule = config.lr_scheduler.build(optimizers=[optimizer], training_steps=training.steps)
    for step in range(training.steps):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(
            learning_rate(training, step), rel=1e-9, abs=1e-18
        )
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize("name", ["llama-3-8b", "llama-3-70b", "llama-3-405b"])
def test_its_own_model_is_the_plan_s(name: str) -> None:
    config = made_by(body_of(model=name, **{"model.rotary_scaling": SCALING}))
    plan = plan_of({"model": name}, base=LLAMA)
    model, theirs = plan.job.model, config.model_spec.model
    assert model is not None
    assert (theirs.dim, theirs.vocab_size, len(theirs.layers)) == (
        model.hidden, model.vocab, model.layers,
    )  # fmt: skip
    for layer in theirs.layers:
        rope = layer.attention.rope
        assert (rope.theta, rope.scaling, rope.scaling_factor) == (500000.0, "llama", 32.0)
        assert "Float8" not in repr(type(layer.feed_forward.w1))


def test_its_own_optimizer_leaves_norms_without_weight_decay() -> None:
    config = made_by(body_of())
    import torch
    from torchtitan.components.optimizer import OptimizersContainer

    with torch.device("meta"):
        layer = config.model_spec.model.layers[0].build()
    config.optimizer.implementation = "for-loop"  # fused is of CUDA
    (adamw,) = OptimizersContainer(config.optimizer, model_parts=[layer])
    decays = {
        name: group["weight_decay"]
        for group in adamw.param_groups for name in group["param_names"]
    }  # fmt: skip
    dims = {name: value.dim() for name, value in layer.named_parameters()}
    assert decays == {name: 0.1 if dim > 1 else 0.0 for name, dim in dims.items()}
    assert {(g["lr"], g["betas"], g["eps"]) for g in adamw.param_groups} == {
        (3e-4, (0.9, 0.95), 1e-8)
    }
