"""Weights' gradients put off: nothing until they are called, then what backward gives."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from mpctl.train.layers.linear import ColumnParallelLinear, RowParallelLinear
from mpctl.train.layers.parameters import DeferredWgrad, defer_wgrad, initialise
from mpctl.train.transport.group import Group
from mpctl.train.transport.timing import Collective
from tests.threads import run_ranks
from tests.train.layers.oracle import grouped


def pair(group: Group, later: DeferredWgrad | None, *, split: bool = False) -> torch.nn.Sequential:
    kinds = {"group": group, "sequence_parallel": split, "dtype": torch.float64}
    layers = torch.nn.Sequential(ColumnParallelLinear(8, 12, **kinds), RowParallelLinear(12, 8, **kinds))
    initialise(layers, 7)
    for layer in layers if later else ():
        defer_wgrad(layer.weight, later)
    return layers


def backward(layers: torch.nn.Sequential, x: Tensor) -> Tensor:
    """dX of a loss whose gradient differs from place to place."""
    x = x.clone().requires_grad_()
    layers(x).square().sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_put_off_is_not_done_until_it_is_and_then_the_same(micro_batches: int) -> None:
    later, torch_rng = DeferredWgrad(), torch.Generator().manual_seed(3)
    now, then = pair(Group(), None), pair(Group(), later)
    batches = [torch.randn(2, 4, 8, generator=torch_rng).double() for _ in range(micro_batches)]
    taken = []
    for x in batches:
        assert torch.equal(backward(then, x), backward(now, x))
        taken.append(later.take())
    assert [len(deferred) for deferred in taken] == [2] * micro_batches
    for ours, theirs in zip(then, now, strict=True):
        assert ours.weight.grad is None
        torch.testing.assert_close(ours.bias.grad, theirs.bias.grad, rtol=1e-14, atol=0)
    for deferred in taken:
        for compute in deferred:
            compute()
    for ours, theirs in zip(then, now, strict=True):
        torch.testing.assert_close(ours.weight.grad, theirs.weight.grad, rtol=1e-13, atol=1e-14)
    assert later.take() == []


def test_a_gradient_that_was_put_off_is_not_copied() -> None:
    """autograd copies a gradient that somebody else refers to."""
    later, weight = DeferredWgrad(), torch.nn.Parameter(torch.ones(3, 4))
    places: list[int] = []

    def compute() -> Tensor:
        gradient = torch.full((3, 4), 2.0)
        places.append(gradient.data_ptr())
        return gradient

    for _ in range(2):
        later.add(weight, compute)
    first, second = later.take()
    first()
    assert weight.grad is not None and weight.grad.data_ptr() == places[0]
    second()
    assert torch.equal(weight.grad, torch.full((3, 4), 4.0))


def test_frozen_weights_put_off_nothing() -> None:
    later = DeferredWgrad()
    layers = pair(Group(), later)
    layers[0].weight.requires_grad_(False)
    backward(layers, torch.ones(1, 2, 8, dtype=torch.float64))
    assert len(later.take()) == 1


def _split(rank: int, size: int, split: bool) -> dict[str, Any]:
    sent: list[Collective] = []
    group, later = grouped(rank, size, sent), DeferredWgrad()
    now, then = pair(group, None, split=split), pair(group, later, split=split)
    x = torch.arange(64.0, dtype=torch.float64).view(1, 8, 8) / 64
    x = x.chunk(size, 1)[rank] if split else x
    gradients, counts = [], []
    for layers in (now, then):
        sent.clear()
        gradients.append(backward(layers, x))
        counts.append(sorted(message.kind for message in sent))
    before = len(sent)
    for compute in later.take():
        compute()
    counts.append(sorted(message.kind for message in sent[before:]))
    pairs = zip(then, now, strict=True)
    same = [torch.allclose(a.weight.grad, b.weight.grad, rtol=1e-13) for a, b in pairs]
    return {"same": same, "dx": torch.equal(*gradients), "counts": counts}


@pytest.mark.parametrize("split", [False, True])
def test_a_message_is_sent_once_and_with_what_needs_it(split: bool) -> None:
    for found in run_ranks(_split, 2, split):
        now, then, deferred = found["counts"]
        assert found["same"] == [True, True] and found["dx"]
        assert sorted(then + deferred) == now
        assert deferred == ["all_gather"] * split


def test_what_is_put_off_keeps_no_graph() -> None:
    """Of a product's input its values are needed; through the graph behind it, what a pipeline
    stage received and the gradient that it sent back would stay."""
    later = DeferredWgrad()
    layers = pair(Group(), later)
    received = torch.ones(1, 2, 8, dtype=torch.float64, requires_grad=True)
    layers(received * 2).sum().backward()
    reference, taken = weakref.ref(received), later.take()
    del received
    assert reference() is None and len(taken) == 2
