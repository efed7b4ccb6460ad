"""RMSNorm against its formula, in float64 and with float32 statistics of 16-bit inputs."""

from __future__ import annotations

from typing import Any

import torch

from mpctl.core.shard import Shard
from mpctl.train.layers.parameters import ONES, parallel_attributes, shard_of
from mpctl.train.layers.shard_context import ShardContext
from tests.train.layers.oracle import close, fill, numbers


def rms_norm(size: int, *, eps: float = 1e-5, dtype: torch.dtype | None = None) -> Any:
    return ShardContext(dtype=dtype).norm("rmsnorm", size, eps=eps)


def test_rms_norm_and_its_gradients() -> None:
    norm = rms_norm(16, eps=1e-3, dtype=torch.float64)
    fill(norm)
    x = numbers(2, 5, 16).requires_grad_()
    weight, leaf = norm.weight.detach().clone().requires_grad_(), numbers(2, 5, 16).requires_grad_()
    expected = leaf * weight / ((leaf**2).sum(-1, keepdim=True) / 16 + 1e-3) ** 0.5
    for y in (norm(x), expected):
        y.backward(numbers(2, 5, 16, seed=1))
    close(norm(x).detach(), expected.detach())
    close(x.grad, leaf.grad)
    close(norm.weight.grad, weight.grad)


def test_by_hand_and_not_centred() -> None:
    norm = rms_norm(2, eps=0.0, dtype=torch.float64)
    torch.nn.init.ones_(norm.weight)
    x, y = torch.tensor([[1.0, 7.0], [0.2, 1.4]], dtype=torch.float64)
    close(norm(x), y)


def test_statistics_of_16_bit_are_float32() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        norm = rms_norm(4096, dtype=dtype)
        torch.nn.init.ones_(norm.weight)
        # squares beyond float16's 65504, and a mean that bfloat16 sums would lose
        x = (numbers(3, 4096) * 500).to(dtype)
        y = norm(x)
        exact = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
        assert y.dtype == dtype
        assert ((y.double() - exact).abs() <= exact.abs() * torch.finfo(dtype).eps).all()


def test_its_weight_is_replicated_and_starts_at_one() -> None:
    norm = rms_norm(8)
    assert [name for name, _ in norm.named_parameters()] == ["weight"]
    assert shard_of(norm.weight) == Shard((8,))
    assert parallel_attributes(norm.weight).init == ONES
    assert repr(norm) == "RMSNorm(8 of 8, eps=1e-05)"


def test_a_16_bit_rms_norm_keeps_its_input_and_a_number_a_row_and_rounds_once() -> None:
    """Its gradients are those of float64 to the rounding of their own type."""
    norm = rms_norm(512, dtype=torch.bfloat16)
    fill(norm)
    x, grad = numbers(2, 3, 512).bfloat16().requires_grad_(), numbers(2, 3, 512, seed=1).bfloat16()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        y = norm(x)
    assert sorted(tuple(t.shape) for t in kept) == [(2, 3, 1), (2, 3, 512), (512,)]
    y.backward(grad)
    leaf, weight = (t.detach().double().requires_grad_() for t in (x, norm.weight))
    exact = torch.nn.functional.rms_norm(leaf, (512,), weight, norm.eps)
    exact.backward(grad.double())
    for found, wanted in ((y, exact), (x.grad, leaf.grad), (norm.weight.grad, weight.grad)):
        bound = wanted.abs().max() * torch.finfo(torch.bfloat16).eps
        assert (found.double() - wanted).abs().max() <= bound


def test_a_frozen_weight_has_no_gradient_and_its_input_has() -> None:
    norm, x = rms_norm(16), numbers(2, 16).float().requires_grad_()
    norm.weight.requires_grad_(False)
    norm(x).sum().backward()
    assert norm.weight.grad is None and x.grad is not None
