"""GPT and Llama shapes as whole modules on a grid: the loss and all gradients of one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mpctl.core.shard import Shard
from mpctl.spec.model import ModelSpec
from mpctl.spec.training import TrainingSpec
from mpctl.train.families.implementation import Batch, build_module
from mpctl.train.kernels.counter_rng import CounterRNG
from mpctl.train.layers.parameters import initialise
from mpctl.train.layers.shard_context import ShardContext
from tests.threads import run_ranks
from tests.train.layers.grid.cases import GROUPS
from tests.train.layers.grid.grids import GRIDS, ONE, Where, compared, grid_context, summed_gradients
from tests.train.layers.oracle import Part

B, S, V = 12, 7, 31  # of the vocabulary 32 rows on 4 and 8 ranks, 36 on 9
SHAPE: dict[str, Any] = {"layers": 2, "hidden": 36, "vocab": V, "vocab_divisor": 1, "seq_length": S}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"ffn": 72, "heads": 6},
    "llama": {
        "ffn": 60,
        "norm": "rmsnorm",
        "position": "rotary",
        "activation": "swiglu",
        "kv_heads": 6,
        "heads": 12,
        "head_dim": 4,
        "bias": False,
        "tied_embeddings": False,
    },
}
TRAININGS: dict[str, dict[str, Any]] = {
    "plain": {"dropout": 0.0, "attention_dropout": 0.0},
    "dropout": {"dropout": 0.1, "attention_dropout": 0.1, "recompute": "selective"},
    "full": {"dropout": 0.1, "attention_dropout": 0.1, "recompute": "full"},
}
FAST = [("3d-8", "llama")]


def _batch() -> Batch:
    draw = torch.Generator().manual_seed(1)
    text = torch.randint(0, V, (B, S + 1), generator=draw)
    return Batch(torch.arange(40, 40 + B), {"tokens": text[:, :-1], "targets": text[:, 1:]})


def _trained(context: ShardContext, model: str, training: str) -> dict[str, Part]:
    """The loss of the whole micro batch, and the gradients as an optimizer takes them."""
    # init_std: with 0.02 the layers would hardly show in the loss
    spec = TrainingSpec(**TRAININGS[training], init_std=0.2)
    module = build_module(ModelSpec(**SHAPE, **MODELS[model]), spec, context)
    initialise(module, seed=11)
    batch = _batch()
    loss = module.loss(batch, CounterRNG(5, 6, batch.samples))
    loss.backward()
    if kind := context.grid.kind_of(context.grid.sample_axes(inside=True)):
        loss = context.groups[kind].all_reduce(loss.detach())
    return {"loss": (loss.detach()[None], Shard((1,))), **summed_gradients(module, context)}


def _run(rank: int, size: int, where: Where, model: str) -> dict[str, dict[str, Part]]:
    context = grid_context(where, rank)
    return {training: _trained(context, model, training) for training in TRAININGS}


@pytest.mark.parametrize(
    ("name", "model"),
    [
        pytest.param(name, model, marks=() if (name, model) in FAST else pytest.mark.slow)
        for name in GRIDS
        for model in MODELS
    ],
)
def test_a_model_has_the_loss_of_one_rank(name: str, model: str) -> None:
    where = GRIDS[name]
    ranks = run_ranks(_run, where[1], where, model)
    alone = {training: _trained(ONE, model, training) for training in TRAININGS}
    for training, expected in alone.items():
        compared([rank[training] for rank in ranks], expected)
    assert alone["dropout"]["loss"][0] != alone["plain"]["loss"][0]


def _run_mode(rank: int, size: int, where: Where, group: str) -> dict[str, dict[str, Part]]:
    context = grid_context(where, rank)
    return {name: case(context) for name, case in GROUPS[group].items()}


def _is_slow(name: str, group: str) -> bool:
    """Layers of 2.5d and 3d are in the fast tests of models."""
    return name in ("2d-9", "2.5d-4") or (group == "layers" and GRIDS[name][1] > 4)


@pytest.mark.parametrize(
    ("name", "group"),
    [
        pytest.param(name, group, marks=pytest.mark.slow if _is_slow(name, group) else ())
        for name in GRIDS
        for group in GROUPS
    ],
)
def test_a_grid_has_what_one_rank_has(name: str, group: str) -> None:
    where = GRIDS[name]
    ranks = run_ranks(_run_mode, where[1], where, group)
    for name, case in GROUPS[group].items():
        compared([rank[name] for rank in ranks], case(ONE))
