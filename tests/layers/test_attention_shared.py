"""Fewer key-value heads than ranks: what travels, who holds what, what is refused."""

from __future__ import annotations

import pytest
import torch

from mpctl.layers.parameters import global_index, shard_of
from mpctl.transport.group import Group
from mpctl.transport.timing import Collective
from tests.layers.build import make_attention
from tests.layers.oracle import fill, grouped, logged
from tests.threads import run_ranks

B, S, H, A, D = 2, 8, 16, 4, 4


def _traffic(rank: int, size: int) -> list:
    results = []
    for kv in (4, 2, 1):
        log: list[Collective] = []
        module = make_attention(
            H, A, head_dim=D, tp=grouped(rank, size, log), rng_site="x", kv_heads=kv
        )
        fill(module)
        y = module(torch.ones(B, S, H, requires_grad=True))
        forward = len(log)
        y.sum().backward()
        results.append([logged(log[:forward]), logged(log[forward:])])
    return results


def test_the_traffic_of_fewer_heads_than_ranks() -> None:
    for result in run_ranks(_traffic, 4):
        for kv, (forward, backward) in zip((4, 2, 1), result, strict=True):
            rows, heads = B * S * H * 4, 2 * B * S * kv * D * 4
            gathers = kv < 4
            kinds = [("all_gather", "tp", heads, "float32")] * gathers
            assert forward == [*kinds, ("all_reduce", "tp", rows, "float32")]
            kinds = [("reduce_scatter", "tp", heads, "float32")] * gathers
            assert backward == [*kinds, ("all_reduce", "tp", rows, "float32")]


def test_each_weight_of_shared_heads_is_held_once() -> None:
    held = []
    for rank in range(4):
        module = make_attention(H, A, head_dim=D, tp=Group(rank, 4), rng_site="x", kv_heads=1)
        held += global_index(shard_of(module.qkv.weight), 0).tolist()
        assert ", 1 of 1 kv, d=4" in repr(module)
    assert sorted(held) == list(range((A + 2) * D))


def test_heads_that_cannot_be_shared_are_refused() -> None:
    with pytest.raises(ValueError, match=r"kv_heads: 2 is not divisible by 4 .*use one of 1, 2 r"):
        make_attention(24, 8, tp=Group(0, 4), rng_site="x", kv_heads=2, head_dim=3)
    with pytest.raises(ValueError, match=r"kv_heads: 3 is not divisible by 2 "):
        make_attention(48, 12, tp=Group(0, 2), rng_site="x", kv_heads=3)
