"""ZeRO 3's store of a bucket: what it does with a gather that is still under way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpctl.core.sharding import View
from mpctl.model.layout.buckets import Bucket
from mpctl.train.runtime.zero.param_store import BucketShard, Zero3ParamStore
from mpctl.train.transport.group import Group, Pending


@dataclass
class LateWork:
    """Writes what it gathered when it is waited for, into the storage as it is then."""

    whole: Tensor
    shard: Tensor
    seen: list[int]

    def wait(self) -> Any:
        self.seen.append(self.whole.untyped_storage().nbytes())
        if self.seen[-1]:
            self.whole.copy_(self.shard)


@dataclass(frozen=True)
class LateGroup(Group):
    seen: list[int] = field(default_factory=list)

    def start_all_gather_into(self, whole: Tensor, part: Tensor) -> Pending:
        return Pending(whole, LateWork(whole, part, self.seen))


@pytest.fixture
def store() -> Zero3ParamStore:
    bucket = Bucket(("w",), (64,), View(zero=3), unit=1, layer="layers.0")
    group = LateGroup()
    return Zero3ParamStore(BucketShard(bucket, (nn.Parameter(torch.arange(64.0)),), group))


def test_memory_is_given_back_after_a_gather_under_way_has_ended(store: Zero3ParamStore) -> None:
    """A gather that was started and not needed: it is waited for before its memory goes."""
    group = store.shard.replicas
    assert isinstance(group, LateGroup)
    seen = group.seen
    store.start()
    assert seen == [] and store.flat.untyped_storage().nbytes() == 256
    store.free()
    assert seen == [256] and store.flat.untyped_storage().nbytes() == 0
    store.free()
    assert seen == [256]


def test_a_gather_after_it_gives_the_values_again(store: Zero3ParamStore) -> None:
    store.start()
    store.free()
    store.gather()
    (parameter,) = store.shard.parameters
    assert parameter.tolist() == list(range(64))
