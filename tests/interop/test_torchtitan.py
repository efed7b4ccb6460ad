"""torchtitan's config: its fields, its own classes, groups and stages where it is installed.

By hand: `pip install --no-deps torchtitan==0.3.0 tyro docstring-parser typeguard shtab
spmd_types==0.2.3`; its trainer also wants `pip install torchdata torch_checkpointing "datasets<4.8"
einops wandb pillow`. What needs them is skipped elsewhere.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import re
from typing import Any

import pytest
import torch.distributed as dist

from mpctl.core.errors import InputError
from mpctl.interop.emitted import emit_plan
from mpctl.plan.planning.plan import Plan
from mpctl.train.runtime.optimizer import learning_rate
from tests.interop.jobs import EXAMPLE, LATENT, LLAMA, MIXTURE, Settings, plan_of
from tests.interop.snippets import assigned_in, calls_in, fields_of
from tests.interop.test_megatron import refusals
from tests.interop.test_torch_mesh import fake_ranks

SHAPE: Settings = {
    "model.position": "rotary",
    "model.norm": "rmsnorm",
    "model.activation": "swiglu",
    "model.bias": False,
    "model.tied_embeddings": False,
    "training.dtype": "bf16",
}
UNBALANCED: Settings = {**MIXTURE, "training.moe_load_balancing": "none"}
LAYOUTS: dict[str, Settings] = {
    "replicas": {},
    "tp dp": {"parallel.tp": 4, "parallel.zero": 3, "parallel.sequence_parallel": True},
    "all": {"parallel.tp": 2, "parallel.cp": 2, "parallel.pp": 2, "parallel.zero": 1},
    "chunks": {"parallel.pp": 4, "parallel.vpp": 3, "parallel.zero": 2},
    "by cost": {"parallel.pp": 4, "parallel.stage_balance": "cost", "model.vocab": 4000},
    "ends": {"parallel.pp": 4, "parallel.first_stage_layers": 2, "parallel.last_stage_layers": 4},
    "ends as layers": {
        "model.layers": 14,
        "parallel.pp": 4,
        "parallel.embedding_is_layer": True,
        "parallel.loss_is_layer": True,
    },
    "recompute": {"training.recompute": "full", "training.micro_batch_size": 2},
    "gpipe": {"parallel.pp": 4, "parallel.schedule": "gpipe"},
    "experts": {**UNBALANCED, "parallel.ep": 4, "parallel.zero": 3},
    "experts in a pipeline": {
        **UNBALANCED,
        "parallel.ep": 8,
        "parallel.tp": 2,
        "parallel.sequence_parallel": True,
        "parallel.pp": 2,
        "parallel.zero": 1,
    },
    "latents": {**LATENT, "parallel.tp": 2, "parallel.zero": 3},
    "hybrid": {"parallel.tp": 2, "parallel.cp": 2, "parallel.zero": 3, "parallel.zero_size": 4},
    "hybrid experts": {**UNBALANCED, "parallel.ep": 4, "parallel.zero": 2, "parallel.zero_size": 8},
}


def said(plan: Plan) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of ParallelismConfig, and what is assigned to config.training."""
    text = emit_plan(plan, "torchtitan").text
    training = {
        name.removeprefix("config.training."): value
        for name, value in assigned_in(text).items()
        if name.startswith("config.training.")
    }
    return calls_in(text)["ParallelismConfig"], training


@pytest.mark.parametrize("name", LAYOUTS)
def test_fields_sizes_and_batch(name: str) -> None:
    plan = plan_of({**SHAPE, **LAYOUTS[name]})
    job, (sizes, training) = plan.job, said(plan)
    assert set(sizes) <= fields_of("torchtitan", "ParallelismConfig")
    assert set(training) <= fields_of("torchtitan", "TrainingConfig")
    ways = ("data_parallel_shard_degree", "data_parallel_replicate_degree")
    assert sizes[ways[0]] * sizes[ways[1]] == job.sizes["dp"]
    shares = job.parallel.zero_size or job.sizes["dp"] * job.sizes["cp"]
    if job.parallel.zero:
        assert sizes[ways[0]] * job.sizes["cp"] == shares
    passes = job.num_microbatches if job.parallel.pp == 1 else 1
    local = training["local_batch_size"]
    assert local * passes * job.sizes["dp"] == training["global_batch_size"]
    captures = job.parallel.pp == job.parallel.ep == 1
    assert captures is not training.get("disable_cuda_graphs", False)


def test_schedules_of_the_shape_of_a_v() -> None:
    """torchtitan deals out parts of the model in their order, wherever these are."""
    pipe = {"parallel.pp": 4, "parallel.vpp": 2, "parallel.tp": 1, "parallel.sequence_parallel": False}
    for ours, theirs in (("zbv", "ZBVZeroBubble"), ("dualpipev", "DualPipeV")):
        sizes, _ = said(plan_of({**pipe, "parallel.schedule": ours}, base=EXAMPLE))
        assert sizes["pipeline_parallel_schedule"] == theirs
        assert sizes["pipeline_parallel_layers_per_stage"] == 10
    with pytest.raises(InputError, match="torchtitan does not have this schedule"):
        said(plan_of({**pipe, "parallel.schedule": "v-half"}, base=EXAMPLE))


def test_the_example_is_a_config_of_its_own() -> None:
    emitted = emit_plan(plan_of({}, base=EXAMPLE), "torchtitan")
    sizes, training = said(plan_of({}, base=EXAMPLE))
    assert sizes["pipeline_parallel_layers_per_stage"] == 4
    assert sizes["pipeline_parallel_schedule"] == "Interleaved1F1B"
    assert training["local_batch_size"] == 64
    assert "config = llama3_70b()\n    return lay_out(config)" in emitted.body
    assert any(note.startswith("approximated: SelectiveAC") for note in emitted.notes)
    other = emit_plan(plan_of({"model.layers": 40}, base=LLAMA), "torchtitan")
    assert "llama3_70b" not in other.body
    assert any("no config of this model" in note for note in other.notes)


@pytest.mark.parametrize(
    ("settings", "rules"),
    [
        ({"parallel.zero": 1}, {"emit-zero"}),
        ({"parallel.cp": 2}, {"emit-zero"}),
        ({"parallel.tp": 2, "parallel.pp": 2, "parallel.order": "tp-cp-pp-dp"}, {"emit-order"}),
        ({"parallel.cp": 4, "parallel.zero": 3, "parallel.zero_size": 2}, {"emit-zero-size"}),
        ({"training.dtype": "fp16"}, {"emit-dtype"}),
        ({"training.dropout": 0.1}, {"emit-dropout"}),
        ({"model.position": "learned", "model.norm": "layernorm"}, {"emit-position", "emit-norm"}),
        (MIXTURE, {"emit-moe-load-balancing"}),
        ({**UNBALANCED, "parallel.ep": 4}, {"emit-ep"}),
        ({**UNBALANCED, "parallel.etp": 2}, {"emit-etp"}),
        (
            {
                **UNBALANCED,
                "training.moe_z_loss_coeff": 1e-3,
                "model.shared_expert_ffn": 64,
                "model.shared_expert_gate": True,
                "model.router_groups": 4,
                "model.router_groups_per_token": 2,
                "model.mtp_layers": 1,
            },
            {"emit-moe-z-loss-coeff", "emit-shared-expert-gate", "emit-router-groups", "emit-mtp-layers"},
        ),
    ],
)
def test_what_it_cannot_say(settings: Settings, rules: set[str]) -> None:
    assert set(refusals({**SHAPE, **settings}, "torchtitan")) == rules


@pytest.mark.parametrize("name", LAYOUTS)
def test_its_own_classes_have_the_plan_s_groups_and_stages(name: str) -> None:
    reason = "torchtitan is not installed"
    configs = pytest.importorskip("torchtitan.config.configs", reason=reason, exc_type=ImportError)
    dims = pytest.importorskip("torchtitan.distributed.parallel_dims", reason=reason, exc_type=ImportError)
    plan = plan_of({**SHAPE, **LAYOUTS[name]})
    job, topology = plan.job, plan.require_legal()
    sizes, training = said(plan)
    is_cut = job.parallel.zero_size is not None
    # Its default backend has no group of dp_shard x cp under a name.
    backend = {"spmd_backend": "partial_dtensor"} if is_cut else {}
    config = configs.ParallelismConfig(**sizes, **backend)
    configs.TrainingConfig(**training)
    for rank in fake_ranks(topology.world_size):
        made = dims.ParallelDims.from_config(config, topology.world_size)
        assert (made.tp, made.cp, made.pp) == (job.sizes["tp"], job.sizes["cp"], job.sizes["pp"])
        made.build_mesh()
        for axis in ("tp", "cp", "pp"):
            if job.sizes[axis] > 1:
                group = made.get_mesh(axis).get_group()
                assert dist.get_process_group_ranks(group) == list(topology.group(rank, axis))
        if is_cut:
            group = made.get_mesh("fsdp").get_group()
            assert dist.get_process_group_ranks(group) == list(topology.group(rank, "zero"))
        for theirs, axis in (("ep", "ep"), ("efsdp", "edp_zero" if is_cut else "edp")):
            if job.parallel.ep > 1:
                group = made.get_mesh(theirs).get_group()
                assert dist.get_process_group_ranks(group) == list(topology.group(rank, axis))


@pytest.mark.parametrize("name", LAYOUTS)
def test_its_own_trainer_takes_the_config(name: str) -> None:
    """With what it checks between the parts of a config, as where a run starts."""
    plan = plan_of({**SHAPE, **LAYOUTS[name]})
    names, model = names_in(emit_plan(plan, "torchtitan").body), plan.job.model
    assert model is not None
    family = "deepseek_v3" if model.is_mla or model.experts else "llama3"
    registry = importlib.import_module(f"torchtitan.models.{family}.config_registry")
    config = names["lay_out"](getattr(registry, f"{family}_debugmodel")())
    dataclasses.replace(config)


# """Optimizer, learning rate, RoPE and precision of the emitted config: the plan's, by torchtitan's
# own classes where they are installed (tests/interop/test_torchtitan.py says how; the flavours also
# take `torchdata datasets tokenizers tensorboard`)."""

SIZES: Settings = {
    "model": "llama-3-8b",
    "cluster.nodes": 1,
    "cluster.gpus_per_node": 8,
    "parallel.zero": 3,
    "training.dtype": "bf16",
    "training.global_batch_size": 64,
}
SCALING = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position": 8192.0}
RATES: dict[str, Settings] = {
    "cosine": {},
    "linear": {"training.lr_schedule": "linear", "training.min_learning_rate": 0.0},
    "constant": {"training.lr_schedule": "constant", "training.warmup_steps": 0},
    "wsd": {
        "training.lr_schedule": "wsd",
        "training.lr_wsd_decay_steps": 17,
        "training.lr_wsd_decay_style": "minus_sqrt",
        "training.steps": 60,
    },
    "longer decay": {"training.lr_decay_steps": 150, "training.learning_rate": 1e-6},
    "all warm-up": {"training.warmup_steps": 130},
}


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
    check_fields(text)


ASSIGNED = re.compile(r"(config(?:\.\w+)?|rope|router|layer\.moe)\.(\w+)(?:,| = (?!layer))")


def check_fields(text: str) -> None:
    """Every field that is assigned is one of its class."""
    classes = {
        "config": "Trainer.Config",
        "config.training": "TrainingConfig",
        "rope": "RoPE.Config",
        "config.debug": "DebugConfig",
        "config.compile": "CompileConfig",
        "layer.moe": "MoE.Config",
        "router": "TokenChoiceTopKRouter.Config",
    }
    for target, field in ASSIGNED.findall(text):
        assert field in fields_of("torchtitan", classes[target]), (target, field)


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"training.lr_schedule": "wsd", "training.lr_wsd_decay_steps": 10}, "emit-lr-wsd-decay-style"),
        ({"training.lr_decay_steps": 50}, "emit-lr-decay-steps"),
    ],
)
def test_a_schedule_that_it_lacks_is_refused(settings: Settings, rule: str) -> None:
    assert set(refusals({**SHAPE, **settings}, "torchtitan")) == {rule}


def test_norms_of_a_first_stage_without_layers_decay_as_a_note_says() -> None:
    """torchtitan refuses a group of parameters of which a stage has none."""
    settings = {**SHAPE, **LAYOUTS["ends as layers"], "parallel.vpp": 4}
    emitted = emit_plan(plan_of(settings), "torchtitan")
    assert "norm" not in calls_in(emitted.body)["ParamGroupConfig"]["pattern"]
    assert emitted.body.count("ParamGroupConfig(") == 1
    assert any("norms decay too" in note for note in emitted.notes)


def names_in(body: str) -> dict[str, Any]:
    """What an emitted file defines, where torchtitan is installed with what it imports."""
    reason = "torchtitan with what its flavours import is not installed"
    pytest.importorskip("torchtitan.models.llama3.config_registry", reason=reason, exc_type=ImportError)
    names: dict[str, Any] = {}
    exec(body, names)  # what this package wrote, from settings of this file
    return names


def made_by(body: str) -> Any:
    """The config that torchtitan's own classes make of an emitted file with its model."""
    return names_in(body)["mpctl_plan"]()


@pytest.mark.parametrize("name", RATES)
def test_its_own_scheduler_has_the_plan_s_rate_at_every_step(name: str) -> None:
    config = made_by(body_of(**RATES[name]))
    import torch

    training = plan_of(RATES[name], base=SIZES).job.training
    kwargs = config.optimizer.param_groups[-1].optimizer_kwargs
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], **kwargs)
    schedule = config.lr_scheduler.build(optimizers=[optimizer], training_steps=training.steps)
    for step in range(training.steps):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(learning_rate(training, step), rel=1e-9, abs=1e-18)
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize("name", ["llama-3-8b", "llama-3-70b", "llama-3-405b"])
def test_its_own_model_is_the_plan_s(name: str) -> None:
    config = made_by(body_of(model=name, **{"model.rotary_scaling": SCALING}))
    plan = plan_of({"model": name}, base=LLAMA)
    model, theirs = plan.job.model, config.model_spec.model
    assert model is not None
    assert (theirs.dim, theirs.vocab_size, len(theirs.layers)) == (model.hidden, model.vocab, model.layers)
    for layer in theirs.layers:
        rope = layer.attention.rope
        assert (rope.theta, rope.scaling, rope.scaling_factor) == (500000.0, "llama", 32.0)
        assert "Float8" not in repr(type(layer.feed_forward.w1))


# DeepSeek-V3 (arXiv 2412.19437), DeepSeek-V2-Lite and Qwen3-30B-A3B.
V3_HEADS: Settings = {
    "model.attention_kind": "mla",
    "model.kv_lora_rank": 512,
    "model.qk_nope_head_dim": 128,
    "model.qk_rope_head_dim": 64,
    "model.v_head_dim": 128,
}
MIXTURES: dict[str, Settings] = {
    "deepseek_v3_671b": {
        **UNBALANCED,
        **V3_HEADS,
        "model.q_lora_rank": 1536,
        "model.layers": 61,
        "model.hidden": 7168,
        "model.ffn": 18432,
        "model.heads": 128,
        "model.vocab": 129280,
        "model.experts": 256,
        "model.experts_per_token": 8,
        "model.expert_ffn": 2048,
        "model.shared_expert_ffn": 2048,
        "model.dense_layers": 3,
        "model.router_score": "sigmoid",
        "model.router_bias": True,
        "model.router_groups": 8,
        "model.router_groups_per_token": 4,
        "model.router_scale": 2.5,
    },
    "deepseek_v3_16b": {
        **UNBALANCED,
        **V3_HEADS,
        "model.layers": 27,
        "model.hidden": 2048,
        "model.ffn": 10944,
        "model.heads": 16,
        "model.vocab": 102400,
        "model.experts": 64,
        "model.experts_per_token": 6,
        "model.expert_ffn": 1408,
        "model.shared_expert_ffn": 2816,
        "model.dense_layers": 1,
        "model.router_renormalize": False,
    },
    "qwen3_30b_a3b": {
        **UNBALANCED,
        "model.layers": 48,
        "model.hidden": 2048,
        "model.heads": 32,
        "model.kv_heads": 4,
        "model.head_dim": 128,
        "model.vocab": 151936,
        "model.experts": 128,
        "model.experts_per_token": 8,
        "model.expert_ffn": 768,
        "model.qk_norm": True,
        "model.norm_epsilon": 1e-6,
        "model.rotary_base": 1e6,
    },
}
SHARDED: Settings = {
    "model.seq_length": 4096,
    "cluster.nodes": 2,
    "cluster.gpus_per_node": 8,
    "parallel.zero": 3,
    "parallel.ep": 8,
    "training.dtype": "bf16",
    "training.global_batch_size": 64,
}


@pytest.mark.parametrize("name", MIXTURES)
def test_a_flavor_with_experts(name: str) -> None:
    emitted = emit_plan(plan_of(MIXTURES[name], base=SHARDED), "torchtitan")
    assert f"config = {name}()" in emitted.body
    check_fields(emitted.body)
    assert "router.score_func" in emitted.body
    other = emit_plan(plan_of({**MIXTURES[name], "model.experts_per_token": 4}, base=SHARDED), "torchtitan")
    assert name not in other.body
    assert any("experts of width" in note for note in other.notes)
    assert any("centres" in note for note in emitted.notes) == (name == "deepseek_v3_671b")


@pytest.mark.parametrize("name", MIXTURES)
def test_its_own_model_with_experts_is_the_plan_s(name: str) -> None:
    plan = plan_of(MIXTURES[name], base=SHARDED)
    config, model = made_by(emit_plan(plan, "torchtitan").body), plan.job.model
    assert model is not None
    theirs = config.model_spec.model
    assert (theirs.dim, theirs.vocab_size, len(theirs.layers)) == (model.hidden, model.vocab, model.layers)
    assert config.parallelism.expert_parallel_degree == 8
    for number, layer in enumerate(theirs.layers):
        assert (layer.moe is not None) == model.has_experts(number)
        assert (layer.attention.rope.scaling, layer.attention.rope.theta) == ("none", model.rotary_base)
        if layer.moe is None:
            assert layer.feed_forward.w1.out_features == model.ffn
            continue
        experts, router = layer.moe.routed_experts.inner_experts, layer.moe.router
        assert (experts.num_experts, experts.hidden_dim) == (model.experts, model.expert_width)
        assert (router.top_k, router.score_func, router.route_norm, router.route_scale) == (
            model.experts_per_token,
            model.router_score,
            model.router_renormalize,
            model.router_scale,
        )
        shared = layer.moe.shared_experts
        assert (shared.w1.out_features if shared else 0) == model.shared_expert_ffn
        assert layer.moe.load_balance_coeff == (1e-3 if model.router_bias else None)


def test_yarn_of_latent_attention_is_torchtitan_s() -> None:
    """DeepSeek-V3's: the scale of the scores of its own layer, (0.1 ln 40 + 1)^2 / sqrt(192)."""
    yarn = {"factor": 40.0, "original_max_position": 4096.0, "attention_factor": 1.0}
    scale = 0.1352337788608801
    settings = {"model.yarn_scaling": yarn, "model.attention_scale": scale}
    body = emit_plan(plan_of({**MIXTURES["deepseek_v3_671b"], **settings}, base=SHARDED), "torchtitan").body
    check_fields(body)
    layer = made_by(body).model_spec.model.layers[0].attention
    rope = layer.rope
    assert (rope.scaling, rope.rope_factor, rope.original_seq_len) == ("yarn", 40.0, 4096)
    magnitude = 0.1 * layer.mscale * math.log(rope.rope_factor) + 1.0
    assert 192**-0.5 * magnitude**2 == pytest.approx(scale, rel=1e-12)


def test_its_own_optimizer_leaves_norms_without_weight_decay() -> None:
    config = made_by(body_of())
    import torch
    from torchtitan.components.optimizer import OptimizersContainer

    with torch.device("meta"):
        layer = config.model_spec.model.layers[0].build()
    config.optimizer.implementation = "for-loop"  # fused is of CUDA
    (adamw,) = OptimizersContainer(config.optimizer, model_parts=[layer])
    decays = {name: group["weight_decay"] for group in adamw.param_groups for name in group["param_names"]}
    dims = {name: value.dim() for name, value in layer.named_parameters()}
    assert decays == {name: 0.1 if dim > 1 else 0.0 for name, dim in dims.items()}
    assert {(g["lr"], g["betas"], g["eps"]) for g in adamw.param_groups} == {(3e-4, (0.9, 0.95), 1e-8)}
