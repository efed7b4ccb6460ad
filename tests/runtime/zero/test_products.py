"""Products that add to gradients themselves leave what autograd's gradients add up to."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mpctl.kernels.backend import TORCH_BACKEND, KernelBackend
from mpctl.layers.linear import ColumnParallelLinear, RowParallelLinear
from mpctl.layout.buckets import Bucket
from mpctl.runtime.zero.gradients import GradientBuffer
from mpctl.runtime.zero.param_store import BucketShard
from mpctl.sharding import View
from mpctl.transport.group import Group

WIDTHS = (5, 7, 3)


class AddingKernels(KernelBackend):
    """Counts the products that it is asked to add."""

    def __init__(self) -> None:
        self.added: list[bool] = []

    def adds_products(self, operands: torch.dtype, sums: torch.dtype) -> bool:
        return True

    def add_product(self, dy: Tensor, x: Tensor, out: Tensor, *, adds: bool) -> None:
        self.added.append(adds)
        super().add_product(dy, x, out, adds=adds)


def summed(zero: int, kernels: KernelBackend, steps: int) -> list[Tensor]:
    """Gradients of each step of two micro batches, of two layers that share their weights' bucket;
    the first layer is used twice in each."""
    torch.manual_seed(1)
    layers = [
        ColumnParallelLinear(WIDTHS[0], WIDTHS[1], group=Group(), dtype=torch.float32),
        RowParallelLinear(WIDTHS[1], WIDTHS[2], group=Group(), dtype=torch.float32),
    ]
    parameters = [p for layer in layers for p in (layer.weight, layer.bias) if p is not None]
    for parameter in parameters:
        torch.nn.init.normal_(parameter)
    names = tuple("abcd")
    bucket = Bucket(names, tuple(p.numel() for p in parameters), View(zero=zero))
    shard = BucketShard(bucket, tuple(parameters), Group())
    buffer = GradientBuffer([shard], torch.float64, torch.device("cpu"), kernels=kernels)
    (store,), results = buffer.stores, []
    for _ in range(steps):
        buffer.zero()
        for micro_batch in range(2):
            first, second = (torch.randn(2, 4, WIDTHS[0]) for _ in range(2))
            hidden = layers[0](first) + layers[0](second)
            layers[1](hidden.relu()).square().sum().backward()
            if store.reduces_each or micro_batch:
                store.accept(store.start().wait())
        results.append(store.local[: bucket.numel].clone())
    return results


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_gradients_are_those_that_autograd_hands_on(zero: int) -> None:
    """Steps begin anew; the first product of one overwrites, the others add."""
    kernels = AddingKernels()
    ours = summed(zero, kernels, 2)
    torch.testing.assert_close(ours, summed(zero, TORCH_BACKEND, 2), rtol=1e-5, atol=1e-5)
    once = [False, False, True] if zero == 2 else None  # the second layer's, the first's twice
    assert kernels.added == (once * 4 if once else [False, False, True, True, True, True] * 2)
