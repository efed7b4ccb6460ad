"""Where gradients are added up, by hand: the first of a step overwrites, later ones are added."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from mpctl.layout.buckets import Bucket
from mpctl.runtime.zero.gradients import GradientBuffer
from mpctl.runtime.zero.param_store import BucketShard
from mpctl.sharding import View
from mpctl.transport.group import Group

CPU = torch.device("cpu")


def parameters(dtype: torch.dtype) -> tuple[nn.Parameter, nn.Parameter]:
    return nn.Parameter(torch.ones(3, dtype=dtype)), nn.Parameter(torch.ones(2, dtype=dtype))


def buffer(pair: tuple[nn.Parameter, ...], zero: int) -> GradientBuffer:
    bucket = Bucket(("a", "b"), (3, 2), View(zero=zero))
    return GradientBuffer([BucketShard(bucket, pair, Group())], torch.float32, CPU)


def step(buffer: GradientBuffer, *losses: Tensor) -> list[float]:
    """A step of micro batches with these losses; the gradients of a and b."""
    (store,) = buffer.stores
    buffer.zero()
    for number, loss in enumerate(losses):
        loss.backward()
        if store.reduces_each or number == len(losses) - 1:
            store.accept(store.start().wait())
    return [float(value) for value in store.local[:5]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_each_step_begins_anew(zero: int, dtype: torch.dtype) -> None:
    """Two micro batches add up; what a step has not reached is 0, whatever the one before left."""
    a, b = parameters(dtype)
    gradients = buffer((a, b), zero)
    both = step(gradients, (2 * a).sum(), (3 * a).sum() + b.sum())
    assert both == [5.0] * 3 + [1.0] * 2
    assert step(gradients, (math.nan * a).sum() + (math.nan * b).sum())[0] != 0.0
    assert step(gradients, (4 * a).sum()) == [4.0] * 3 + [0.0] * 2
    assert step(gradients, b.sum(), b.sum()) == [0.0] * 3 + [2.0] * 2


@pytest.mark.parametrize("zero", [0, 1])
def test_gradients_of_another_dtype_are_not_cleared_but_overwritten(zero: int) -> None:
    gradients = buffer(parameters(torch.bfloat16), zero)
    (store,) = gradients.stores
    store.persistent.fill_(7.0)
    gradients.zero()
    assert store.persistent[:5].tolist() == [7.0] * 5  # until backward, or the reduction
    assert store.persistent[5:].eq(0.0).all()  # padding of a slice
    store.settle()
    assert store.persistent[:5].tolist() == [0.0] * 5
