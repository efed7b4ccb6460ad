"""Products of adapters in the operator table: names, shapes, what is frozen, which gradients are needed."""

from __future__ import annotations

import pytest

from mpctl.model.families import get_table
from mpctl.model.operators.adapters import is_of_adapter
from mpctl.model.operators.matmul import MatMul
from mpctl.model.operators.table import OperatorTable
from mpctl.spec.adapter import AdapterSpec
from mpctl.spec.model import ModelSpec

LLAMA = ModelSpec.model_validate(
    {"family": "gpt", "layers": 2, "hidden": 64, "heads": 8, "kv_heads": 2, "ffn": 128, "vocab": 1000, "seq_length": 32}
    | {"activation": "swiglu", "position": "rotary", "norm": "rmsnorm", "bias": False, "tied_embeddings": False}
)
EXPERTS = LLAMA.model_copy(update={"experts": 4, "expert_ffn": 16, "experts_per_token": 2})


def table(model: ModelSpec = LLAMA, **adapter: object) -> OperatorTable:
    return get_table(model, tp=1, adapter=AdapterSpec.model_validate({"rank": 4, **adapter}))


def adapters_of_first_layer(found: OperatorTable) -> dict[str, tuple[int, ...]]:
    prefix, ending = "layers.0.", ".weight"
    named = (weight for weight in found.weights() if is_of_adapter(weight.name) and weight.name.startswith(prefix))
    return {weight.name.removeprefix(prefix).removesuffix(ending): weight.shape for weight in named}


def test_every_output_of_a_fused_product_has_an_adapter() -> None:
    assert adapters_of_first_layer(table(targets=["q_proj", "v_proj", "up_proj", "o_proj"])) == {
        "attention.qkv.lora.query.A": (4, 64),
        "attention.qkv.lora.query.B": (64, 4),
        "attention.qkv.lora.value.A": (4, 64),
        "attention.qkv.lora.value.B": (16, 4),
        "attention.output.lora.A": (4, 64),
        "attention.output.lora.B": (64, 4),
        "mlp.up.lora.up.A": (4, 64),
        "mlp.up.lora.up.B": (128, 4),
    }


def test_a_fused_module_has_one_adapter_for_all_its_outputs() -> None:
    assert adapters_of_first_layer(table(targets="linear_qkv")) == {
        "attention.qkv.lora.A": (4, 64),
        "attention.qkv.lora.B": (96, 4),
    }


def test_experts_have_an_adapter_each() -> None:
    found = adapters_of_first_layer(table(EXPERTS, targets="mlp"))
    assert found["mlp.experts.up.lora.gate.A"] == (4, 4, 64)
    assert found["mlp.experts.up.lora.gate.B"] == (4, 16, 4)
    assert found["mlp.experts.down.lora.B"] == (4, 64, 4)
    assert not any("router" in name for name in found)


def test_all_but_the_adapter_and_modules_to_save_is_frozen() -> None:
    found = table(modules_to_save="lm_head")
    trained = {w.name for w in found.weights() if not found.is_frozen(w.name)}
    assert {name for name in trained if not is_of_adapter(name)} == {"head.weight"}


def test_layers_of_one_kind_stay_one_object() -> None:
    stack = table().stacks[0]
    assert stack.block_of(0) is stack.block_of(1)


def test_nothing_below_the_first_adapter_needs_a_gradient() -> None:
    first, second = (flow for _, flow in table().flows[0].runs)
    assert not first.needs["attention.qkv"].x and first.needs["attention.qkv"].y
    assert first.needs["attention.output"].x and not first.needs["attention.output"].w
    assert second.needs["attention.qkv"].x and not second.needs["attention.qkv"].w
    assert second.needs["attention.qkv.lora.query.A"].w


@pytest.mark.parametrize("target", ["all-linear", "attention", "mlp"])
def test_an_adapter_follows_its_product(target: str) -> None:
    products = list(table(targets=target).stacks[0].block_of(0).products)
    seen: dict[str, MatMul] = {}
    for product in products:
        if product.adapts:
            assert seen[product.adapts].is_frozen
        seen[product.name] = product
    assert any(product.adapts for product in products)
