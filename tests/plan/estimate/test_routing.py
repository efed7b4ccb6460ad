"""Amounts of models with experts and latent attention, by hand and by simulation."""

from __future__ import annotations

from random import Random
from statistics import mean
from typing import Any

import pytest

from mpctl.model.layout.job_layout import JobLayout
from mpctl.plan.estimate.activation_shapes import activation_shapes
from mpctl.plan.estimate.flops import model_and_hardware_flops
from mpctl.plan.estimate.job import Estimate
from mpctl.plan.estimate.routing import (
    HELD_LOAD,
    LOADS,
    balanced_layout,
    expert_load,
    largest_of_normals,
    loaded_layout,
)
from mpctl.plan.estimate.saved import layer_activations
from mpctl.spec.load import load_job

SHAPE = {
    "model.family": "gpt",
    "model.position": "rotary",
    "model.bias": False,
    "model.tied_embeddings": False,
    "model.activation": "swiglu",
    "model.norm": "rmsnorm",
    "model.seq_length": 4096,
    "cluster.nodes": 1,
    "cluster.gpus_per_node": 8,
    "training.dtype": "bf16",
}
MIXTRAL = SHAPE | {
    "model.layers": 32,
    "model.hidden": 4096,
    "model.heads": 32,
    "model.kv_heads": 8,
    "model.vocab": 32000,
    "model.ffn": 14336,
    "model.experts": 8,
    "model.experts_per_token": 2,
}
QWEN2_MOE = SHAPE | {
    "model.layers": 24,
    "model.hidden": 2048,
    "model.heads": 16,
    "model.vocab": 151936,
    "model.ffn": 5632,
    "model.bias": "qkv",
    "model.experts": 60,
    "model.experts_per_token": 4,
    "model.expert_ffn": 1408,
    "model.shared_expert_ffn": 5632,
    "model.shared_expert_gate": True,
}
DEEPSEEK = SHAPE | {
    "model.layers": 61,
    "model.hidden": 7168,
    "model.heads": 128,
    "model.vocab": 129280,
    "model.ffn": 18432,
    "model.dense_layers": 3,
    "model.experts": 256,
    "model.experts_per_token": 8,
    "model.expert_ffn": 2048,
    "model.shared_expert_ffn": 2048,
    "model.attention_kind": "mla",
    "model.q_lora_rank": 1536,
    "model.kv_lora_rank": 512,
    "model.qk_nope_head_dim": 128,
    "model.qk_rope_head_dim": 64,
    "model.v_head_dim": 128,
}


def layout_of(*settings: dict[str, Any]) -> JobLayout:
    """The layout of a job of these settings, the last ones first."""
    merged: dict[str, Any] = {}
    for own in settings:
        merged |= own
    return JobLayout.of(load_job(None, merged))


@pytest.mark.parametrize(
    ("shape", "total", "active"), [(MIXTRAL, 46.70, 12.88), (QWEN2_MOE, 14.32, 2.69), (DEEPSEEK, 671.03, 37.55)]
)
def test_total_and_active_parameters_are_as_published(shape: dict[str, Any], total: float, active: float) -> None:
    estimate = Estimate(layout_of(shape))
    assert estimate.parameters / 1e9 == pytest.approx(total, abs=0.005)
    assert estimate.active_parameters / 1e9 == pytest.approx(active, abs=0.005)


@pytest.mark.parametrize(
    "parallel",
    [
        {},
        {"parallel.ep": 8},
        {"parallel.ep": 4, "parallel.etp": 2},
        {"parallel.tp": 2, "parallel.sequence_parallel": True, "parallel.ep": 4},
    ],
)
def test_flop_are_those_of_the_active_parameters(parallel: dict[str, Any]) -> None:
    """6 for each active parameter of a product and token, and 12 s a d for its scores."""
    layout = layout_of(MIXTRAL, parallel)
    estimate, model = Estimate(layout), layout.model
    norms = (2 * model.layers + 1) * model.hidden
    multiplied = estimate.active_parameters - norms - model.vocab * model.hidden
    scores = 12 * model.layers * model.seq_length * model.heads * model.head_size
    plain, _ = model_and_hardware_flops(layout)
    assert plain * 8 == pytest.approx((6 * multiplied + scores) * layout.tokens_per_step)


def test_flop_of_latent_attention_by_hand() -> None:
    """A layer of DeepSeek-V3's attention: 187.1 million parameters in products, and scores of 192
    columns of keys and 128 of values."""
    layout, without = (layout_of(DEEPSEEK, {"model.layers": n}) for n in (2, 1))  # dense layers
    plain = model_and_hardware_flops(layout)[0] - model_and_hardware_flops(without)[0]
    attention = 7168 * (1536 + 576) + 1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168
    assert attention == pytest.approx(187.1e6, rel=1e-3)
    products, scores = 6 * (attention + 3 * 7168 * 18432), 6 * 4096 * 128 * (192 + 128)
    assert plain == pytest.approx((products + scores) * 4096)


def simulated(ranks: int, chosen: int, tokens: int, draws: int) -> float:
    """The fullest rank over the mean where each token goes to `chosen` of 8 experts a rank."""
    random, found = Random(7), []
    for _ in range(draws):
        rows = [0] * ranks
        for _ in range(tokens):
            for expert in random.sample(range(8 * ranks), chosen):
                rows[expert // 8] += 1
        found.append(max(rows) * ranks / (chosen * tokens))
    return mean(found)


@pytest.mark.parametrize("ranks", [2, 8, 32])
def test_random_routing_loads_the_fullest_rank_as_simulated(ranks: int) -> None:
    layout = layout_of(
        MIXTRAL | {"model.experts": 8 * ranks, "cluster.nodes": 4},
        {"parallel.ep": ranks, "model.seq_length": 512 // ranks},
    )
    expected = simulated(ranks, 2, 512, draws=160) - 1
    assert expert_load(layout).random - 1 == pytest.approx(expected, rel=0.12)


def test_the_load_is_stated_or_random_and_never_beyond_the_largest() -> None:
    ep = {"parallel.ep": 8}
    even, random, stated, most = (
        expert_load(layout_of(MIXTRAL, own))
        for own in ({}, ep, {**ep, "training.moe_load": 1.5}, {**ep, "training.moe_load": 99})
    )
    assert (even.load, even.rows) == (1, 2 * 4096)
    assert 1 < random.load < 1.02 and random.largest == 4
    assert (stated.load, stated.rows) == (1.5, 3 * 4096)
    assert (most.load, most.rows) == (4, 8 * 4096)  # every token to the experts of one rank


def test_memory_holds_more_than_balanced_routing_unless_the_load_is_stated() -> None:
    """By hand: 1.2 times 2 x 4096 rows are 9830.4; of two ranks of which each token meets both, 1."""
    ep = {"parallel.ep": 8}
    for own, held in (
        ({}, 1.0),  # one rank has all experts
        (ep, HELD_LOAD),
        ({**ep, "training.moe_load": 1.05}, 1.05),
        ({**ep, "training.moe_load": 1.5}, 1.5),
        ({**ep, "model.experts": 8, "model.experts_per_token": 8}, 1.0),  # each token meets all
    ):
        layout = layout_of(MIXTRAL, own)
        assert expert_load(layout).held == held
        assert expert_load(loaded_layout(layout)).load == pytest.approx(held)
    assert expert_load(loaded_layout(layout_of(MIXTRAL, ep))).rows == 9831
    for own in ({}, ep, {**ep, "training.moe_load": 1.5}):
        found = expert_load(balanced_layout(layout_of(MIXTRAL, own)))
        assert found.load == found.random


def test_the_default_load_is_about_what_was_measured() -> None:
    assert 0.95 * HELD_LOAD < max(one.mean for one in LOADS) < HELD_LOAD < min(one.most for one in LOADS)


def test_each_row_goes_to_all_ranks_of_an_expert() -> None:
    split = layout_of(MIXTRAL, {"parallel.etp": 2, "training.moe_load": 1})
    assert expert_load(split).rows == 2 * 2 * 4096


def test_the_largest_of_normals_is_on_lines_between_the_table() -> None:
    assert [largest_of_normals(n) for n in (1, 8, 64, 1024)] == [0, 1.42, 2.34, 3.25]
    assert largest_of_normals(3) == pytest.approx(0.85, abs=0.02)
    assert largest_of_normals(4096) == pytest.approx(3.65)


# Megatron keeps of a layer of DeepSeek-V3 and 4096 tokens, in bytes of 2: what --recompute-modules
# computes again.
TOKENS, HEADS = 4096, 128
BY_HAND = {
    "mla_up_proj": 2 * TOKENS * (HEADS * (192 + 192 + 128) + 1536 + 512) + 2 * 4 * TOKENS,
    "moe_act": 2 * 8 * TOKENS * 2048,
    "shared_experts": 2 * TOKENS * 3 * 2048,
    "layernorm": 2 * 2 * TOKENS * 7168,
    "mlp": 0,
}


@pytest.mark.parametrize("module", BY_HAND)
def test_recomputed_modules_keep_less_by_hand(module: str) -> None:
    megatron = DEEPSEEK | {"training.runtime": "megatron-core", "training.recompute": "selective"}
    shapes = [
        activation_shapes(layout_of(megatron, {"training.recompute_modules": modules})) for modules in ([], [module])
    ]
    block = layout_of(megatron).table.stacks[0].block_of(60)
    before, now = (layer_activations(one, block) for one in shapes)
    again = shapes[1].bytes_of(now.recomputed)
    assert again == BY_HAND[module]
    assert shapes[1].bytes_of(now.saved) == shapes[0].bytes_of(before.saved) - again


def test_recomputed_modules_repeat_their_products() -> None:
    """Of a layer, the products that make queries, keys and values of latents once more."""
    megatron = DEEPSEEK | {"training.runtime": "megatron-core", "training.recompute": "selective"}
    own = {"training.recompute_modules": ["mla_up_proj"]}
    model, hardware = model_and_hardware_flops(layout_of(megatron, own))
    products = 2 * 61 * TOKENS * HEADS * (1536 * 192 + 512 * 256)
    assert hardware - model == pytest.approx(products)
    none = {"training.recompute": "none"}
    plain, again = (Estimate(layout_of(megatron, H100, one)).step_seconds for one in (none, own))
    assert plain is not None and again is not None and plain < again < 1.1 * plain


H100 = {"cluster": "dgx-h100", "cluster.nodes": 1}
