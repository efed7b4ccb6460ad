"""Experts against the blocks of transformers' models, with the same weights, in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mpctl.train.layers.experts import ExpertsConfig, ParallelExperts, RouterConfig
from mpctl.train.layers.routing_log import RoutingLog
from mpctl.train.layers.shard_context import ShardContext
from tests.train.layers.oracle import numbers

H, FFN, E, NAME = 16, 12, 8, "layers.0.mlp"
BIAS = (0.3, -0.2, 0.0, 0.1, -0.4, 0.2, 0.0, 0.1)
COMMON = {"hidden_size": H, "hidden_act": "silu", "num_experts_per_tok": 3}


def mixtral() -> tuple[torch.nn.Module, ExpertsConfig]:
    from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralSparseMoeBlock

    theirs = MixtralConfig(**COMMON, intermediate_size=FFN, num_local_experts=E)
    return MixtralSparseMoeBlock(theirs), ExpertsConfig(H, FFN, RouterConfig(E, 3))


def qwen2() -> tuple[torch.nn.Module, ExpertsConfig]:
    from transformers.models.qwen2_moe import modeling_qwen2_moe as qwen

    theirs = qwen.Qwen2MoeConfig(
        **COMMON, moe_intermediate_size=FFN, num_experts=E, norm_topk_prob=False, shared_expert_intermediate_size=20
    )
    router = RouterConfig(E, 3, renormalize=False)
    ours = ExpertsConfig(H, FFN, router, shared_ffn=20, shared_gate=True)
    return qwen.Qwen2MoeSparseMoeBlock(theirs), ours


def qwen3() -> tuple[torch.nn.Module, ExpertsConfig]:
    from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen

    theirs = qwen.Qwen3MoeConfig(**COMMON, moe_intermediate_size=FFN, num_experts=E, norm_topk_prob=True)
    return qwen.Qwen3MoeSparseMoeBlock(theirs), ExpertsConfig(H, FFN, RouterConfig(E, 3))


def deepseek() -> tuple[torch.nn.Module, ExpertsConfig]:
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3

    theirs = v3.DeepseekV3Config(
        **COMMON,
        moe_intermediate_size=FFN,
        n_routed_experts=E,
        n_group=4,
        topk_group=2,
        n_shared_experts=2,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
    )
    router = RouterConfig(E, 3, score="sigmoid", scale=2.5, has_bias=True, groups=4, groups_per_token=2)
    return v3.DeepseekV3MoE(theirs), ExpertsConfig(H, FFN, router, shared_ffn=2 * FFN)


def _weights(block: torch.nn.Module) -> dict[str, Tensor]:
    """Their parameters by our names and shapes: views, so that gradients are found through them."""
    theirs: dict[str, Any] = dict(block.named_parameters())
    up = theirs["experts.gate_up_proj"]
    named = {
        "router.weight": theirs["gate.weight"],
        "experts.up.weight": up.view(E, 2, FFN, H),
        "experts.down.weight": theirs["experts.down_proj"],
    }
    for name in ("shared_expert", "shared_experts"):
        if f"{name}.up_proj.weight" in theirs:
            halves = [theirs[f"{name}.{half}_proj.weight"] for half in ("gate", "up")]
            named["shared.up.weight"] = torch.cat(halves)
            named["shared.down.weight"] = theirs[f"{name}.down_proj.weight"]
    if "shared_expert_gate.weight" in theirs:
        named["shared_gate.weight"] = theirs["shared_expert_gate.weight"]
    return named


@pytest.mark.parametrize("made", [mixtral, qwen2, qwen3, deepseek], ids=lambda f: f.__name__)
def test_outputs_and_gradients_are_theirs(made: Any) -> None:
    block, config = made()
    for number, parameter in enumerate(block.parameters()):
        with torch.no_grad():
            parameter.copy_(numbers(*parameter.shape, seed=number) * 0.4)
    log = RoutingLog([NAME], E, bias_rate=0.1)
    if config.router.has_bias:
        log.load({NAME: BIAS})
        block.gate.e_score_correction_bias.copy_(torch.tensor(BIAS))
    ours: ParallelExperts = config.build(ShardContext(routing=log), NAME)
    weights = _weights(block)
    assert weights.keys() == dict(ours.named_parameters()).keys()
    for name, parameter in ours.named_parameters():
        with torch.no_grad():
            parameter.copy_(weights[name])
    x, grad = numbers(2, 20, H, seed=50).float(), numbers(2, 20, H, seed=51).float()
    results = []
    for module in (ours, block.train()):
        entered = x.clone().requires_grad_()
        y = module(entered)
        y.backward(grad)
        results.append((y.detach(), entered.grad))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    for parameter in block.parameters():  # their gradients, by our names
        parameter.data, parameter.grad = parameter.grad.clone(), None
    for name, expected in _weights(block).items():
        actual = ours.get_parameter(name).grad
        torch.testing.assert_close(actual, expected.detach(), rtol=1e-4, atol=1e-5)
