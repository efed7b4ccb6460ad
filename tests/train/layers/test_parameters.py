"""Weights do not depend on the layout: a shard is, bit for bit, the slice of the whole."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mpctl.core.shard import Shard
from mpctl.train.kernels.counter_rng import site_key
from mpctl.train.layers import parameters
from mpctl.train.layers.parameters import Init, assemble, full_numel, initialise, shard_of, shard_parameter, take
from mpctl.train.transport.group import Group
from tests.train.layers.build import make_layer
from tests.train.layers.oracle import numbers


def _layer(rank: int, size: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    return make_layer(24, 12, 48, tp=Group(rank, size), rng_site="layers.0", output_std=0.005, dtype=dtype)


@pytest.mark.parametrize("size", [2, 3, 4, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_every_shard_is_the_slice_of_the_whole(size: int, dtype: torch.dtype) -> None:
    whole = _layer(0, 1, dtype)
    initialise(whole, seed=11)
    for rank in range(size):
        part = _layer(rank, size, dtype)
        initialise(part, seed=11)
        for (name, own), full in zip(part.named_parameters(), whole.parameters(), strict=True):
            assert torch.equal(own, take(shard_of(own), full)), name
            assert own.shape == shard_of(own).local_shape
            assert full_numel(own) == full.numel()


def test_dtype_changes_the_rounding_only() -> None:
    wide, narrow = _layer(0, 1, torch.float64), _layer(0, 1, torch.bfloat16)
    initialise(wide, seed=11)
    initialise(narrow, seed=11)
    for a, b in zip(wide.parameters(), narrow.parameters(), strict=True):
        assert torch.equal(a.to(torch.bfloat16), b)


@pytest.mark.parametrize(
    "shard", [Shard((37, 19), {0: (range(3, 36),)}), Shard((6, 2, 7, 19), {0: (range(2, 5),), 2: (range(1, 6),)})]
)
def test_the_chunk_size_does_not_show(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn() -> torch.Tensor:
        weight = shard_parameter(shard, init=Init("normal", 1.0, first=(3, 0.5)))
        parameters.fill_random(weight.data, shard_of(weight), 5, parameters.parallel_attributes(weight).init)
        return weight.data

    whole = drawn()
    monkeypatch.setattr(parameters, "_CHUNK", 40)
    assert torch.equal(drawn(), whole)


def test_initial_values_follow_their_law() -> None:
    layer = _layer(0, 1)
    initialise(layer, seed=11)
    assert torch.equal(layer.attention_norm.weight, torch.ones(24))
    assert torch.equal(layer.mlp.up.bias, torch.zeros(48))
    for weight, std in ((layer.attention.qkv.weight, 0.02), (layer.mlp.down.weight, 0.005)):
        assert abs(weight.std().item() / std - 1) < 5 * (1 / (2 * weight.numel())) ** 0.5
        assert abs(weight.mean().item()) < 5 * std / weight.numel() ** 0.5


def test_names_prefix_and_seed_each_change_the_weights() -> None:
    def drawn(seed: int, prefix: str = "") -> torch.Tensor:
        layer = _layer(0, 1)
        initialise(layer, seed, prefix=prefix)
        return layer.mlp.up.weight.detach()

    base = drawn(1)
    assert torch.equal(base, drawn(1))
    for other in (drawn(2), drawn(1, prefix="layers.1")):
        assert abs((base * other).mean()) < 5 * 0.02**2 / base.numel() ** 0.5
    nested = nn.ModuleDict({"layers": nn.ModuleList([nn.Identity(), _layer(0, 1)])})
    initialise(nested, 1)
    assert torch.equal(nested["layers"][1].mlp.up.weight, drawn(1, prefix="layers.1"))


def test_the_key_is_the_full_name() -> None:
    layer = _layer(0, 1)
    initialise(layer, 9, prefix="layers.3")
    expected = torch.empty(48, 24)
    key = site_key(9, "weights", "layers.3.mlp.up.weight")
    parameters.fill_random(expected, Shard((48, 24)), key, Init("normal", 0.02))
    assert torch.equal(layer.mlp.up.weight, expected)


def test_a_foreign_parameter_is_named() -> None:
    with pytest.raises(ValueError, match="parameter weight carries no Init"):
        initialise(nn.Linear(2, 2), seed=1)


def test_assemble_undoes_take() -> None:
    full = numbers(6, 4)
    shards = [Shard((6, 4), {0: (range(r, r + 1), range(3 + r, 4 + r))}) for r in range(3)]
    assert torch.equal(assemble(shards, [take(shard, full) for shard in shards]), full)
    assert shards[2].local_shape == (2, 4)
