"""Where gradients are added up, by hand: the first of a step overwrites, later ones are added."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from mpctl.core.shard import Shard
from mpctl.core.sharding import View
from mpctl.model.layout.buckets import Bucket
from mpctl.train.layers.parameters import ZEROS, shard_parameter
from mpctl.train.runtime.zero.gradients import GradientBuffer
from mpctl.train.runtime.zero.param_store import BucketShard
from mpctl.train.transport.group import Group
from tests.ranks import grouped, run_ranks

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


def test_the_norm_counts_each_element_once() -> None:
    """On 2 x 2 ranks, by hand: a is cut in four, with gradients 1, 2, 3, 4; b is cut in two along
    one axis, so that two ranks hold each half, with gradients 3, 5; all hold c, with gradient 2.
    1 + 4 + 9 + 16 + 9 + 25 + 4 = 68."""
    found = run_ranks(_norm_of_grid, 4)
    assert found == [pytest.approx(math.sqrt(68), rel=1e-15)] * 4


def _norm_of_grid(rank: int, size: int) -> float:
    column = rank % 2
    held = {  # by name: the full size, the place that is held, its gradient
        "a": (4, rank, [1.0, 2.0, 3.0, 4.0][rank]),
        "b": (2, column, [3.0, 5.0][column]),
        "c": (1, 0, 2.0),
    }
    parameters = tuple(
        shard_parameter(Shard((full,), {0: (range(place, place + 1),)}), init=ZEROS) for full, place, _ in held.values()
    )
    shard = BucketShard(Bucket(tuple(held), (1, 1, 1), View()), parameters, Group())
    gradients = GradientBuffer([shard], torch.float32, CPU, {"tp": grouped(rank, size)})
    for parameter, (_, _, gradient) in zip(parameters, held.values(), strict=True):
        parameter.data.zero_()
        (gradient * parameter).sum().backward()
    (store,) = gradients.stores
    store.settle()
    return float(gradients.norm())
