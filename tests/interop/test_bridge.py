"""Megatron-Bridge: every assigned field is one of its config classes; the values are the plan's."""

from __future__ import annotations

import pytest

from mpctl.interop.emitted import emit_plan
from tests.interop.jobs import EXAMPLE, GRID, LAYOUTS, plan_of
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
    assert fields["cfg.model.pipeline_model_parallel_layout"].startswith("Et")


def test_what_it_cannot_say() -> None:
    assert set(refusals(LAYOUTS["shape"], "megatron-bridge")) == {"emit-position"}
    found = refusals({**GRID, "training.seed": 0}, "megatron-bridge")
    assert set(found) == {"emit-tensor-mode", "emit-seed"}
    assert all("Megatron-Bridge" in message for message in found.values())
