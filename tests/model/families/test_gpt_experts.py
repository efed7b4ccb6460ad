"""A decoder some of whose layers have experts: the table's parameters, and every layout's loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mpctl.core.sharding import DENSE, EXPERTS, View
from mpctl.model.families import get_table
from mpctl.model.families.gpt.ops import operator_table
from mpctl.spec.model import ModelSpec
from mpctl.spec.training import TrainingSpec
from mpctl.train.families.implementation import Batch, build_module
from mpctl.train.kernels.counter_rng import CounterRNG
from mpctl.train.layers.experts import ExpertsConfig
from mpctl.train.layers.fp8 import CastsToFp8
from mpctl.train.layers.parameters import partial_kind, shard_of
from mpctl.train.layers.routing_log import RoutingLog
from mpctl.train.layers.shard_context import ShardContext
from mpctl.train.transport.group import Group
from tests.threads import run_ranks
from tests.train.layers.oracle import NO_PEERS, close, context_split, fill, gradients, whole
from tests.train.layers.test_experts import ALONE, LAYOUTS, Layout, _sum_gradients

S, B = 8, 2
MODEL = {
    "layers": 4,
    "hidden": 16,
    "heads": 4,
    "vocab": 120,
    "seq_length": S,
    "vocab_divisor": 2,
    "activation": "swiglu",
    "bias": False,
    "norm": "rmsnorm",
    "position": "rotary",
    "experts": 4,
    "experts_per_token": 2,
    "expert_ffn": 12,
}
SHAPES: dict[str, dict[str, Any]] = {
    "every second layer": {"moe_layer_every": 2, "router_renormalize": False},
    "behind a dense one": {
        "dense_layers": 1,
        "shared_expert_ffn": 8,
        "shared_expert_gate": True,
        "router_score": "sigmoid",
        "router_bias": True,
        "router_scale": 2.5,
        "router_groups": 2,
    },
    "sandwich": {"norm_order": "sandwich", "shared_expert_ffn": 8},
}
TRAINING = {"recompute": "full", "dropout": 0.1, "moe_aux_loss_coeff": 0.5, "moe_z_loss_coeff": 0.1}
SPLIT = ("ep 2", "tp 2 x ep 2", "cp 2 x ep 2", "tp 2, cp 2, etp 2, ep 2")


def _context(layout: Layout, groups: dict[str, Group], routing: RoutingLog) -> ShardContext:
    return ShardContext(
        groups["tp"],
        groups["cp"],
        layout.tp > 1,
        torch.float64,
        groups=groups,
        expert_view=layout.view,
        routing=routing,
    )


def _run(rank: int, _: int, layout: Layout, shape: dict[str, Any]) -> list[Any]:
    groups, model = layout.groups(rank), ModelSpec.model_validate({**MODEL, **shape})
    names = [f"layers.{n}.mlp" for n in range(4) if model.has_experts(n)]
    log = RoutingLog(names, 4, bias_rate=0.1 if model.router_bias else None)
    log.begin(0.5)
    context = _context(layout, groups, log)
    module = build_module(model, TrainingSpec.model_validate(TRAINING), context)
    fill(module)
    text = torch.randint(0, 120, (B, S + 1), generator=torch.Generator().manual_seed(5))
    dp = groups["dp"]
    parts = {"tokens": text[:, :-1], "targets": text[:, 1:]}
    own = {name: context_split(part.chunk(dp.size)[dp.rank], groups["cp"]) for name, part in parts.items()}
    samples = torch.tensor([12, 7]).chunk(dp.size)[dp.rank]
    (loss,) = module.stage_forward((), Batch(samples, own), CounterRNG(5, 6, samples))
    loss.backward()
    _sum_gradients(module, groups)
    totals = log.end(groups["world"])
    total = groups["dp"].all_reduce(groups["cp"].all_reduce(loss.detach().clone()))
    return [total, gradients(module), totals.counts]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("layout", SPLIT)
def test_a_split_model_has_the_loss_and_gradients_of_one_rank(layout: str, shape: dict[str, Any]) -> None:
    loss, of_one, counts = _run(0, 1, ALONE, shape)
    ranks = run_ranks(_run, LAYOUTS[layout].world, LAYOUTS[layout], shape)
    for rank in ranks:
        close(rank[0], loss)
        assert torch.equal(rank[2], counts)
    for name, (value, _) in of_one.items():
        close(whole([rank[1][name] for rank in ranks]), value)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_module_has_the_parameters_of_the_table(shape: dict[str, Any]) -> None:
    layout = LAYOUTS["tp 2, cp 2, etp 2, ep 2"]
    groups = {"tp": Group(0, 2), "cp": Group(0, 2), "etp_ep": Group(1, 4, NO_PEERS)}
    context = _context(layout, groups, RoutingLog())
    views = {DENSE: View(grid=context.grid), EXPERTS: layout.view}
    model = ModelSpec.model_validate({**MODEL, **shape})
    module = build_module(model, TrainingSpec.model_validate(TRAINING), context)
    planned = {w.name: w for w in operator_table(model, tp=2).weights()}
    assert planned.keys() == dict(module.named_parameters()).keys()
    for name, parameter in module.named_parameters():
        spec = planned[name]
        assert shard_of(parameter).shape == spec.shape
        assert parameter.numel() == spec.local_numel(views)
        assert partial_kind(parameter) == spec.partial_kind(views)
    linear = [name for name, part in module.named_modules() if isinstance(part, CastsToFp8)]
    assert linear == [*get_table(model, tp=2).linear_layers]


def test_settings_of_a_job_reach_the_router() -> None:
    model = ModelSpec.model_validate({**MODEL, **SHAPES["behind a dense one"]})
    training = TrainingSpec.model_validate({**TRAINING, "moe_load_balancing": "global"})
    module = build_module(model, training, ShardContext(dtype=torch.float64))
    configs = [layer.config.mlp for layer in module.layers.values()]
    assert [isinstance(config, ExpertsConfig) for config in configs] == [False, True, True, True]
    config = configs[1]
    router = config.router
    assert (config.ffn, config.shared_ffn, config.shared_gate) == (12, 8, True)
    assert (router.score, router.renormalize, router.scale) == ("sigmoid", True, 2.5)
    assert (router.has_bias, router.groups, router.groups_per_token) == (True, 2, 1)
    assert (router.balancing, router.aux_coefficient, router.z_coefficient) == ("global", 0.5, 0.1)
