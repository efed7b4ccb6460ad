"""Megatron-Bridge: every assigned field is one of its config classes; the values are the plan's."""

from __future__ import annotations

import pytest

from mpctl.core.errors import InputError
from mpctl.interop.emitted import emit_plan
from mpctl.interop.from_bridge import read_bridge
from mpctl.model.families import get_table
from mpctl.model.pipeline.explicit import layout_parts
from mpctl.plan.planning.plan import Plan, load_plan
from mpctl.spec.layout_text import parse_layout
from tests.interop.jobs import EXAMPLE, GRID, LAYOUTS, Settings, plan_of
from tests.interop.snippets import assigned_in, fields_of
from tests.interop.test_megatron import refusals

SAID = [name for name in LAYOUTS if name != "shape"]  # its positions are none


@pytest.mark.parametrize("name", SAID)
def test_every_field_is_one_of_its_config(name: str) -> None:
    plan = plan_of(LAYOUTS[name])
    fields = assigned_in(emit_plan(plan, "megatron-bridge").text)
    for path in fields:
        _, part, *rest = path.split(".")
        if rest:
            assert rest[0] in fields_of("megatron-bridge", part), path
        assert part in fields_of("megatron-bridge", "cfg"), path
    p = plan.job.parallel
    sizes = [fields[f"cfg.model.{axis}_parallel_size"] for axis in ("tensor_model", "pipeline_model", "context")]
    assert sizes == [p.tp, p.pp, p.cp]
    assert (fields["cfg.model.virtual_pipeline_model_parallel_size"] or 1) == p.vpp
    assert fields["cfg.train.global_batch_size"] == plan.job.training.global_batch_size
    assert fields["cfg.optimizer.use_distributed_optimizer"] == (p.zero > 0)


def test_the_example() -> None:
    fields = assigned_in(emit_plan(plan_of({}, base=EXAMPLE), "megatron-bridge").text)
    assert fields["cfg.model.virtual_pipeline_model_parallel_size"] == 5
    assert fields["cfg.model.activation_func"] == "torch.nn.functional.silu"
    assert fields["cfg.mixed_precision"] == "bf16_mixed"


def test_experts_and_latents_are_fields_of_the_model() -> None:
    plan = plan_of(LAYOUTS["latents and experts"])
    emitted = emit_plan(plan, "megatron-bridge")
    fields = assigned_in(emitted.text)
    wanted = {
        "num_moe_experts": 16,
        "moe_router_topk": 4,
        "moe_layer_freq": [0] + [1] * 11,
        "moe_router_enable_expert_bias": True,
        "expert_model_parallel_size": 8,
        "expert_tensor_parallel_size": 1,
        "q_lora_rank": 48,
        "rotary_scaling_factor": 1.0,
    }
    assert {f"cfg.model.{key}": value for key, value in wanted.items()}.items() <= fields.items()
    assert any("MLAModelProvider" in note for note in emitted.notes)


def test_stages_by_cost_are_a_layout_text() -> None:
    fields = assigned_in(emit_plan(plan_of(LAYOUTS["by cost"]), "megatron-bridge").text)
    plan = plan_of(LAYOUTS["by cost"])
    parts = parse_layout(fields["cfg.model.pipeline_model_parallel_layout"]).parts
    assert parts == tuple(layout_parts(plan.stages or ()))


def test_an_explicit_layout_is_read() -> None:
    text = 'cfg.model.pipeline_model_parallel_size = 4\ncfg.model.pipeline_model_parallel_layout = "Ett|t|m|L"'
    settings = read_bridge(text, {"model": "x"}).settings
    assert (settings["parallel.pipeline_layout"], settings["parallel.vpp"]) == ("Ett|t|m|L", 1)
    with pytest.raises(InputError, match="position 2: 'x' is no item"):
        read_bridge(text.replace("Ett|", "Ex|"), {"model": "x"})


def test_what_it_cannot_say() -> None:
    assert set(refusals(LAYOUTS["shape"], "megatron-bridge")) == {"emit-position"}
    found = refusals({**GRID, "training.seed": 0}, "megatron-bridge")
    assert set(found) == {"emit-tensor-mode", "emit-seed"}
    assert all("Megatron-Bridge" in message for message in found.values())


BACK: dict[str, tuple[Settings, str]] = {
    "modules": (
        {"training.recompute": "selective", "training.recompute_modules": ["mlp"]},
        'cfg.model.recompute_modules = ["mlp"]',
    ),
    "full": ({"training.recompute": "full"}, 'cfg.model.recompute_method = "uniform"'),
    "instances": ({"parallel.zero": 1, "parallel.zero_size": 2}, "num_distributed_optimizer_instances = 4"),
    "tensorwise": ({"training.dtype": "fp8", "training.fp8_recipe": "tensorwise"}, "bf16_with_fp8_current_scaling"),
    "gradients": ({"training.dtype": "fp8", "training.gradient_dtype": "fp32"}, '= "bf16_with_fp8_delayed_scaling'),
    "narrow gradients": (
        {"training.dtype": "bf16", "training.gradient_dtype": "bf16"},
        'cfg.mixed_precision = get_mixed_precision_config("bf16_mixed")\n',
    ),
    "ZeRO 3": ({"parallel.zero": 3}, 'data_parallel_sharding_strategy = "optim_grads_params"'),
}


@pytest.mark.parametrize("name", BACK)
def test_settings_come_back(name: str) -> None:
    settings, words = BACK[name]
    ranks: Settings = {"model": "llama-3-8b", "cluster": "dgx-h100", "cluster.nodes": 1}
    base: Settings = {"training.runtime": "megatron-core", "training.dtype": "bf16"}
    text = emit_plan(load_plan(None, {**ranks, **base, **settings}), "megatron-bridge").text
    assert words in text
    read = read_bridge(text, ranks)
    for key, value in {**base, **settings}.items():
        assert key == "training.runtime" or read.settings[key] == value, key
    assert not any("recompute" in warning.message or "instances" in warning.message for warning in read.warnings)


def test_gradients_of_fp8_are_written_as_they_are_planned() -> None:
    """Megatron-Core's profile counts them in 2 bytes, as recipes set; those of mixed_precision overwrite ddp's."""
    job = {"model": "llama-3-8b", "cluster": "dgx-b200", "cluster.nodes": 1, "training.dtype": "mxfp8"}
    text = emit_plan(load_plan(None, {**job, "training.runtime": "megatron-core"}), "megatron-bridge").text
    assert "cfg.mixed_precision.grad_reduce_in_fp32 = False" in text
    assert read_bridge(text, {"model": "x"}).settings["training.gradient_dtype"] == "bf16"
    plain = 'cfg.mixed_precision = "bf16_with_mxfp8_mixed"\ncfg.train.train_iters = 1\n'
    assert read_bridge(plain, {"model": "x"}).settings["training.gradient_dtype"] == "fp32"
    read = read_bridge(f"{plain}cfg.ddp.grad_reduce_in_fp32 = False", {"model": "x"})
    assert read.settings["training.gradient_dtype"] == "fp32"
    assert "ddp.grad_reduce_in_fp32" in [warning.where for warning in read.warnings]


@pytest.mark.parametrize(
    ("strategy", "stage"), [("no_shard", 0), ("optim", 1), ("optim_grads", 2), ("optim_grads_params", 3), (None, 3)]
)
@pytest.mark.parametrize("table", ["ddp", "dist"])
def test_stages_of_fsdp(table: str, strategy: str | None, stage: int) -> None:
    text = f"cfg.{table}.use_megatron_fsdp = True\ncfg.train.train_iters = 1\n"
    if strategy:
        text += f'cfg.ddp.data_parallel_sharding_strategy = "{strategy}"\n'
    assert read_bridge(text, {"model": "x"}).settings["parallel.zero"] == stage
    with pytest.raises(InputError, match="'hybrid' is no strategy"):
        read_bridge(text + 'cfg.ddp.data_parallel_sharding_strategy = "hybrid"\n', {"model": "x"})


TUNED: Settings = {"model": "llama-3-8b", "cluster.nodes": 1, "cluster.gpus_per_node": 8, "training.dtype": "bf16"}
ADAPTERS: dict[str, tuple[Settings, str]] = {
    "all": ({}, "CanonicalLoRA"),
    "some": ({"training.adapter.targets": ["q_proj", "v_proj"]}, "CanonicalLoRA"),
    "fused": ({"training.adapter.targets": ["linear_qkv", "linear_fc2"], "training.adapter.alpha": 16.0}, "LoRA"),
    "output": ({"training.adapter.targets": ["o_proj"], "training.adapter.dropout": 0.1}, "LoRA"),
    "dora": ({"training.adapter.kind": "dora", "training.adapter.targets": ["linear_qkv"]}, "DoRA"),
}


def _tuned(settings: Settings) -> Plan:
    layout = {"parallel.tp": 2, "parallel.sequence_parallel": True, "parallel.zero": 1, "training.adapter.rank": 8}
    return load_plan(None, {**TUNED, **layout, "training.global_batch_size": 16, **settings})


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_are_its_classes_and_read_as_the_same(name: str) -> None:
    settings, word = ADAPTERS[name]
    plan = _tuned(settings)
    text = emit_plan(plan, "megatron-bridge").text
    assert f"cfg.peft = {word}(" in text and f" import {word}" in text
    read = load_plan(None, {**TUNED, **read_bridge(text, TUNED).settings})
    table, again = plan.job.training.adapter, read.job.training.adapter
    assert table is not None and again is not None
    assert (again.kind, again.rank, again.scale, again.dropout) == (table.kind, 8, table.scale, table.dropout)
    assert _parameters(read) == _parameters(plan)
    keys = ("micro_batch_size", "global_batch_size", "steps", "seed", "dtype", "learning_rate", "lr_schedule")
    assert all(getattr(read.job.training, key) == getattr(plan.job.training, key) for key in keys)
    assert (read.job.parallel.zero, read.job.sizes) == (1, plan.job.sizes)


def _parameters(plan: Plan) -> set[tuple[str, tuple[int, ...]]]:
    """The adapter's parameters by name, with their shapes."""
    job = plan.job
    assert job.model is not None
    table = get_table(job.model, tp=job.sizes["tp"], adapter=job.training.adapter)
    return {(spec.name, spec.shape) for spec in table.weights() if ".lora." in spec.name}


def test_its_yaml_names_the_class() -> None:
    text = "{model: {tensor_model_parallel_size: 4}, train: {micro_batch_size: 1}, peft: {_target_: "
    read = read_bridge(text + "megatron.bridge.peft.lora.LoRA, dim: 64}, mixed_precision: bf16_mixed}", TUNED)
    s = read.settings
    assert (s["parallel.tp"], s["training.adapter.rank"], s["training.adapter.alpha"]) == (4, 64, 32)
    assert (s["training.dtype"], s["training.runtime"]) == ("bf16", "megatron-bridge")


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"training.adapter.rslora": True}, "training.adapter.rslora"),
        ({"training.adapter.kind": "dora"}, "training.adapter.targets"),
        ({"training.adapter.kind": "qlora", "parallel.tp": 1, "parallel.sequence_parallel": False}, "training.adapter"),
        ({"training.adapter.targets": ["linear_qkv", "up_proj"]}, "training.adapter.targets"),
        ({"training.adapter.modules_to_save": ["lm_head"]}, "training.adapter.modules_to_save"),
        ({"model": "mixtral-8x7b"}, "training.adapter.targets"),
    ],
)
def test_adapters_that_it_has_not(settings: Settings, where: str) -> None:
    with pytest.raises(InputError) as caught:
        emit_plan(_tuned(settings), "megatron-bridge")
    assert where in [issue.where for issue in caught.value.issues]
