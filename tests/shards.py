"""Shards as plain values, as test ranks send them."""

from __future__ import annotations

from typing import Any

from mpctl.core.shard import Shard

PlainShard = tuple[list[int], list[tuple[int, list[list[int]]]]]


def plain(shard: Shard) -> PlainShard:
    cuts = [(dim, [[b.start, b.stop] for b in blocks]) for dim, blocks in shard.cuts.items()]
    return list(shard.shape), cuts


def shard_from(values: Any) -> Shard:
    shape, cuts = values
    return Shard(tuple(shape), {dim: tuple(range(*b) for b in blocks) for dim, blocks in cuts})
