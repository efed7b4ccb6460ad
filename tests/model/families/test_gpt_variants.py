"""Decoders that differ from the common shape compute the same however they are split."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from mpctl.core.sharding import DENSE, View
from mpctl.core.tensor_grid import TensorGrid
from mpctl.model.families import get_table
from mpctl.model.families.gpt.ops import operator_table
from mpctl.spec.model import ModelSpec
from mpctl.spec.training import TrainingSpec
from mpctl.train.families.gpt.module import GPT
from mpctl.train.families.implementation import Batch, build_module
from mpctl.train.kernels.counter_rng import CounterRNG
from mpctl.train.layers.config import LayerConfig
from mpctl.train.layers.linear import ParallelLinear
from mpctl.train.layers.mlp import MLPConfig
from mpctl.train.layers.parameters import partial_kind, shard_of
from mpctl.train.layers.shard_context import ShardContext
from mpctl.train.transport.group import Group
from tests.threads import run_ranks
from tests.train.layers.oracle import axes, close, context_split, fill, gradients, sum_gradients, whole

S = 8
COMMON = {"layers": 3, "hidden": 16, "heads": 4, "vocab": 120, "seq_length": S, "vocab_divisor": 2}
LATENT = {
    "attention_kind": "mla",
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "position": "rotary",
}
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "alibi": ({"position": "alibi", "embedding_norm": True}, {"recompute": "selective"}),
    "alibi with dropout": ({"position": "alibi", "attention_window": 3}, {"dropout": 0.1, "attention_dropout": 0.1}),
    "windows": (
        {
            "position": "rotary",
            "attention_window": 3,
            "full_attention_every": 2,
            "window_rotary_base": 100.0,
            "kv_heads": 2,
            "bias": "qkv",
            "activation": "relu2",
        },
        {"recompute": "full"},
    ),
    "norms of heads": (
        {"position": "rotary", "qk_norm": True, "kv_heads": 1, "norm": "rmsnorm", "bias": "attention"},
        {},
    ),
    "norms over all heads": (
        {"position": "rotary", "qk_norm": "width", "kv_heads": 2, "norm": "rmsnorm", "norm_order": "output"},
        {"recompute": "full"},
    ),
    "layernorms over all heads": ({"qk_norm": "width", "kv_heads": 1}, {}),
    "parallel": (
        {"position": "rotary", "parallel_residual": True, "rotary_fraction": 0.5, "qk_norm": True},
        {"dropout": 0.1},
    ),
    "one norm": (
        {
            "position": "rotary",
            "parallel_residual": True,
            "shared_norm": True,
            "attention_window": 2,
            "attention_window_every": 2,
        },
        {"recompute": "full"},
    ),
    "norms of results": (
        {"norm_order": "output", "norm": "nonparametric", "bias": "mlp", "activation": "swiglu"},
        {"recompute": "full"},
    ),
    "latent": (
        {**LATENT, "q_lora_rank": 12, "norm": "rmsnorm", "bias": False, "activation": "swiglu"},
        {"dropout": 0.1, "attention_dropout": 0.1},
    ),
    "latent of keys alone": (
        {
            **LATENT,
            "attention_window": 3,
            "attention_scale": 0.3,
            "full_attention_every": 2,
            "window_rotary_base": 100.0,
        },
        {"recompute": "full"},
    ),
    "sandwich": (
        {
            "norm_order": "sandwich",
            "norm": "rmsnorm",
            "bias": False,
            "embedding_multiplier": 4.0,
            "attention_scale": 0.3,
            "activation": "geglu_tanh",
        },
        {},
    ),
}


def _run(rank: int, _: int, layout: tuple[int, int, bool]) -> list[list[Any]]:
    """The loss and the gradients of each variant on one rank."""
    (tp, cp), results = axes(rank, *layout[:2]), []
    text = torch.randint(0, 120, (2, S + 1), generator=torch.Generator().manual_seed(5))
    parts = {"tokens": text[:, :-1], "targets": text[:, 1:]}
    batch = Batch(torch.arange(2), {name: context_split(part, cp) for name, part in parts.items()})
    context = ShardContext(tp, cp, layout[2], torch.float64)
    for shape, training in VARIANTS.values():
        model = ModelSpec.model_validate({**COMMON, **shape})
        module = build_module(model, TrainingSpec.model_validate(training), context)
        fill(module)
        (loss,) = module.stage_forward((), batch, CounterRNG(5, 6, torch.tensor([12, 7])))
        loss.backward()
        sum_gradients(module, tp, cp)
        results.append([cp.all_reduce(loss.detach().clone()), gradients(module)])
    return results


@pytest.mark.parametrize(
    "layout",
    [
        (2, 1, True),
        (1, 2, False),
        pytest.param((2, 1, False), marks=pytest.mark.slow),
        pytest.param((2, 2, True), marks=pytest.mark.slow),
        pytest.param((4, 1, False), marks=pytest.mark.slow),
    ],
)
def test_a_split_model_has_the_loss_and_gradients_of_the_whole(layout: tuple[int, int, bool]) -> None:
    expected = _run(0, 1, (1, 1, False))
    ranks = run_ranks(_run, layout[0] * layout[1], layout)
    for number in range(len(VARIANTS)):
        loss, of_whole = expected[number]
        for rank in ranks:
            close(rank[number][0], loss)
        for name, (value, _) in of_whole.items():
            close(whole([rank[number][1][name] for rank in ranks]), value)


def test_the_module_has_the_parameters_of_the_table() -> None:
    """Names and shapes, of every variant that is launched, on one of two ranks."""
    context = ShardContext(Group(1, 2), sequence_parallel=True, dtype=torch.float64)
    views = {DENSE: View(grid=context.grid)}
    for shape, training in VARIANTS.values():
        model = ModelSpec.model_validate({**COMMON, **shape})
        module = build_module(model, TrainingSpec.model_validate(training), context)
        planned = {w.name: w for w in operator_table(model, tp=2).weights()}
        assert planned.keys() == dict(module.named_parameters()).keys()
        for name, parameter in module.named_parameters():
            spec = planned[name]
            assert shard_of(parameter).shape == spec.shape
            assert parameter.numel() == spec.local_numel(views)
            assert partial_kind(parameter) == spec.partial_kind(views)
        linear = [name for name, m in module.named_modules() if isinstance(m, ParallelLinear)]
        assert linear == [*get_table(model, tp=2).linear_layers]


def test_a_window_hides_what_lies_before_it() -> None:
    """The last of 8 tokens with windows of 3 in 2 layers sees tokens 3 to 7, and no others."""
    shape = {**COMMON, "layers": 2, "attention_window": 3, "position": "none"}
    module = build_module(ModelSpec.model_validate(shape), TrainingSpec(), ShardContext(dtype=torch.float64))
    fill(module)
    tokens = torch.arange(S)[None]

    def last(changed: int) -> torch.Tensor:
        other = tokens.clone()
        other[0, changed] = 99
        with torch.no_grad():
            return module(Batch(torch.arange(1), {"tokens": other}))[0, -1]

    with torch.no_grad():
        whole_text = module(Batch(torch.arange(1), {"tokens": tokens}))[0, -1]
    assert [bool((last(at) == whole_text).all()) for at in range(S)] == [True] * 3 + [False] * 5


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_each_rank_has_its_part_of_the_projection_of_multi_token_prediction(tp: int) -> None:
    """eh_proj of Megatron-Core 0.19: 2 h -> h by columns, without a bias."""
    model = ModelSpec(**{**COMMON, "mtp_layers": 1, "position": "rotary"})
    table = operator_table(model, tp=tp)
    grid = TensorGrid.of("1d", tp)
    found = [w for w in table.stacks[0].exit.weights if ".projection." in w.name]
    assert [w.name for w in found] == ["mtp.0.projection.weight"]
    assert found[0].local_numel({DENSE: View(grid=grid)}) == 2 * 16 * 16 // tp


class NarrowSecond(GPT):
    """A stack whose second layer has another MLP than the others."""

    def layer_config(self, training: TrainingSpec, layer: int) -> LayerConfig:
        config = super().layer_config(training, layer)
        assert isinstance(config.mlp, MLPConfig)
        return replace(config, mlp=replace(config.mlp, ffn=8)) if layer == 1 else config


def test_layers_of_one_stack_may_differ_in_kind() -> None:
    model = ModelSpec.model_validate(COMMON)
    (part,) = get_table(model, tp=1).stage_slices([(0, 3)])
    module = NarrowSecond(model, TrainingSpec(), ShardContext(dtype=torch.float64), part)
    fill(module)
    widths = [len(layer.get_submodule("mlp.up").weight) for layer in module.layers.values()]
    assert widths == [64, 8, 64]
    tokens = torch.arange(2 * S).view(2, S)
    batch = Batch(torch.arange(2), {"tokens": tokens, "targets": tokens})
    module.loss(batch, None).backward()
    assert all(p.grad is not None for p in module.parameters())
