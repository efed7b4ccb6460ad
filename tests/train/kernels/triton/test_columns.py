"""Gradients of biases as sums that other kernels leave behind are autograd's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mpctl.train.kernels.activation import Activation
from mpctl.train.kernels.backend import TORCH_BACKEND
from mpctl.train.kernels.triton.backend import TritonKernels
from mpctl.train.kernels.triton.columns import PARTS, SUMMED, column_sums
from tests.train.kernels.triton.bits import DTYPES, operations, random_tensor

CLOSE = {torch.float64: 1e-12, torch.float32: 2e-5}


def tolerance(dtype: torch.dtype) -> float:
    return CLOSE.get(dtype, 4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SUMMED)
def test_an_activation_and_both_gradients(name: Activation, dtype: torch.dtype, device: torch.device) -> None:
    """More rows than parts, and columns that fill no block; float64 of the same numbers."""
    x = random_tensor((3, 50, 40), dtype, device, 1)
    bias = random_tensor((40,), dtype, device, 2)
    grad = random_tensor((3, 50, 40), dtype, device, 3).detach()
    y = TritonKernels().summed_activation(x, name, bias)
    dx, dbias = torch.autograd.grad(y, (x, bias), grad)
    wide = x.detach().double().requires_grad_()
    other = TORCH_BACKEND.activation(wide, name)
    (theirs,) = torch.autograd.grad(other, wide, grad.double())
    close = tolerance(dtype)
    torch.testing.assert_close(y.double(), other, rtol=close, atol=close)
    torch.testing.assert_close(dx.double(), theirs, rtol=close, atol=close)
    # of what was written, rounded once
    torch.testing.assert_close(dbias.double(), dx.double().sum((0, 1)), rtol=close, atol=close)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_heads_are_split_as_views_and_joined_with_the_sums(dtype: torch.dtype, device: torch.device) -> None:
    """Two key-value heads to four of queries; gradients in any layout of memory."""
    widths, d = (32, 16, 16), 8
    qkv = random_tensor((2, 70, 64), dtype, device, 1)
    bias = random_tensor((64,), dtype, device, 2)
    parts = TritonKernels().split_heads(qkv, widths, d, bias)
    assert [part.shape for part in parts] == [(2, 4, 70, 8), (2, 2, 70, 8), (2, 2, 70, 8)]
    assert all(part.data_ptr() >= qkv.data_ptr() for part in parts)
    grads = [random_tensor(part.shape, dtype, device, 3).detach() for part in parts]
    grads[0] = grads[0].transpose(1, 2).contiguous().transpose(1, 2)
    grads[2] = grads[2].transpose(2, 3).contiguous().transpose(2, 3)
    dqkv, dbias = torch.autograd.grad(parts, (qkv, bias), grads)
    joined = torch.cat([grad.transpose(1, 2).flatten(2) for grad in grads], dim=-1)
    assert torch.equal(dqkv, joined)
    close = tolerance(dtype)
    torch.testing.assert_close(dbias.double(), joined.double().sum((0, 1)), rtol=close, atol=close)


def test_a_sum_is_one_of_partial_sums_in_the_order_of_rows(device: torch.device) -> None:
    partial = torch.randn((PARTS + 5, 33), generator=torch.Generator().manual_seed(1)).to(device)
    assert torch.allclose(column_sums(partial, torch.float32), partial.sum(0), atol=1e-5)
    assert column_sums(partial, torch.bfloat16).dtype == torch.bfloat16


def test_each_bias_costs_a_kernel_that_reads_partial_sums() -> None:
    def given(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16, device="meta", requires_grad=True)

    def run() -> None:
        kernels = TritonKernels()
        kernels.summed_activation(given(2, 9, 8), "gelu", given(8)).sum().backward()
        q, k, v = kernels.split_heads(given(2, 9, 24), (8, 8, 8), 4, given(24))
        torch.autograd.backward([q, k, v], [torch.zeros_like(x) for x in (q, k, v)])

    own = [name for name in operations(run) if name.startswith("mpctl")]
    assert own == ["mpctl::activation_backward", "mpctl::column_sums", "mpctl::join_heads", "mpctl::column_sums"]


def test_gradients_that_lie_side_by_side_are_taken_as_they_are(device: torch.device) -> None:
    qkv, bias = (
        random_tensor((2, 5, 24), torch.float64, device, 1),
        torch.zeros(24, dtype=torch.float64, device=device, requires_grad=True),
    )
    joined = random_tensor((2, 5, 24), torch.float64, device, 2).detach()
    sides = [x.unflatten(-1, (-1, 4)).transpose(1, 2) for x in joined.split((8, 8, 8), -1)]

    def run() -> None:
        parts = TritonKernels().split_heads(qkv, (8, 8, 8), 4, bias)
        torch.autograd.backward(parts, sides)

    assert "mpctl::join_heads" not in operations(run)
    assert qkv.grad is not None and bias.grad is not None
    assert torch.equal(qkv.grad, joined) and torch.equal(bias.grad, joined.sum((0, 1)))
