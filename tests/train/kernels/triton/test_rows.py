"""Sums of rows in one kernel are those of torch's separate kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mpctl.train.kernels.backend import TORCH_BACKEND, KernelBackend
from mpctl.train.kernels.routing import choose_experts, combined_rows, dispatched_rows, expert_counts, rows_by_expert
from mpctl.train.kernels.triton.backend import TritonKernels
from tests.train.kernels.triton.bits import DTYPES, gradients, operations, random_tensor, same_bits

T, K, E = 5, 3, 8
TOLERANCE = {torch.float64: 1e-12}


def _both_ways(kernels: KernelBackend, x: Tensor, weights: Tensor, copies: int) -> list[Tensor]:
    """To the experts and back, with the gradients of tokens and weights."""
    scores = torch.rand(len(x), E, generator=torch.Generator().manual_seed(3)).to(x.device)
    experts = choose_experts(scores, weights.shape[1]).experts
    counts = expert_counts(experts, 1, E)[0]
    order = rows_by_expert(experts, counts, parts=2, copies=copies)
    rows = dispatched_rows(x, order, kernels)
    y = combined_rows(rows * rows.detach(), weights, order.places, kernels)
    return [y.detach(), *gradients(y, x, weights)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "k", "copies"), [(2100, 3, 1), (7, 1, 1), (16, 2, 3)])
def test_values_and_gradients_are_the_references(
    width: int, k: int, copies: int, dtype: torch.dtype, device: torch.device
) -> None:
    x = random_tensor((T, width), dtype, device, 1)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    weights = random_tensor((T, k), wide, device, 2)
    ours, theirs = (_both_ways(kernels, x, weights, copies) for kernels in (TritonKernels(), TORCH_BACKEND))
    assert same_bits(ours[0], theirs[0]) and same_bits(ours[1], theirs[1])
    close = TOLERANCE.get(dtype, 1e-4)
    assert torch.allclose(ours[2], theirs[2], rtol=close, atol=close)


def test_no_tokens_have_no_rows(device: torch.device) -> None:
    x = random_tensor((0, 16), torch.float32, device, 1)
    y, dx, dw = _both_ways(TritonKernels(), x, random_tensor((0, 2), x.dtype, device, 2), 1)
    assert y.shape == dx.shape == x.shape and dw.shape == (0, 2)


def test_each_pass_is_one_operation() -> None:
    x = random_tensor((T, 8), torch.float32, torch.device("cpu"), 1).to("meta").requires_grad_()
    weights = torch.ones((T, 2), device="meta", requires_grad=True)
    places = torch.zeros((1, 2, T), dtype=torch.int64, device="meta")

    def both() -> None:
        rows = dispatched_rows(x, (places[0].flatten(), places), TritonKernels())  # type: ignore
        y = combined_rows(rows, weights, places, TritonKernels())
        torch.autograd.grad(y, (x, weights), torch.empty_like(y))

    names = [name for name in operations(both) if name.startswith("mpctl")]
    assert names == ["mpctl::sum_of_rows", "mpctl::row_gradients", "mpctl::sum_of_rows"]
