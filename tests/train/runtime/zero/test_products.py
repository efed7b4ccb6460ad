"""Products that add to gradients themselves leave what autograd's gradients add up to."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mpctl.core.sharding import View
from mpctl.model.layout.buckets import Bucket
from mpctl.train.kernels.backend import TORCH_BACKEND, KernelBackend
from mpctl.train.layers.embedding import VocabParallelEmbedding
from mpctl.train.layers.linear import ColumnParallelLinear, RowParallelLinear
from mpctl.train.layers.parameters import parallel_attributes
from mpctl.train.runtime.memory import MemoryTracker
from mpctl.train.runtime.zero.gradients import GradientBuffer
from mpctl.train.runtime.zero.param_store import BucketShard
from mpctl.train.transport.group import Group

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


def table_gradients(zero: int, dtype: torch.dtype, *, has_sink: bool) -> list[Tensor]:
    """Gradients of two steps of two micro batches of a table that is looked up and the head."""
    torch.manual_seed(2)
    table = VocabParallelEmbedding(11, 6, group=Group(), dtype=dtype)
    torch.nn.init.normal_(table.weight)
    bucket = Bucket(("a",), (table.weight.numel(),), View(zero=zero))
    shard = BucketShard(bucket, (table.weight,), Group())
    if not has_sink:
        parallel_attributes(table.weight).is_table = False
    buffer = GradientBuffer([shard], torch.float64, torch.device("cpu"))
    (store,), results = buffer.stores, []
    for _ in range(2):
        buffer.zero()
        for micro_batch in range(2):
            tokens = torch.randint(0, 11, (2, 4))
            table.logits(table(tokens)).square().sum().backward()
            if store.reduces_each or micro_batch:
                store.accept(store.start().wait())
        results.append(store.local[: bucket.numel].clone())
    return results


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_a_tied_table_has_the_gradients_of_autograd(zero: int, dtype: torch.dtype) -> None:
    ours, autograds = (table_gradients(zero, dtype, has_sink=how) for how in (True, False))
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(ours, autograds, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("zero", [0, 2])
def test_no_gradient_of_a_tied_table_is_made(zero: int) -> None:
    """Two tensors of its size exist in a backward: the table and its gradient in the bucket."""
    group, vocab, hidden = Group(), 4096, 16
    table = VocabParallelEmbedding(vocab, hidden, group=group, dtype=torch.float64)
    torch.nn.init.normal_(table.weight)
    bucket = Bucket(("a",), (table.weight.numel(),), View(zero=zero))
    buffer = GradientBuffer([BucketShard(bucket, (table.weight,), group)], torch.float64, torch.device("cpu"))
    buffer.zero()
    tracker = MemoryTracker(torch.device("cpu"))
    with tracker:
        table.logits(table(torch.zeros(1, 1, dtype=torch.long))).sum().backward()
    assert tracker.peak < 2.5 * table.weight.nbytes
