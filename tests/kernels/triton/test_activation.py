"""Gated activations and the squared ReLU are those of torch's separate kernels."""

from __future__ import annotations

import pytest
import torch

from mpctl.kernels.activation import Activation
from mpctl.kernels.backend import TORCH_BACKEND
from mpctl.kernels.triton.backend import TritonKernels
from tests.kernels.triton.bits import DTYPES, gradients, operations, random_tensor

FUSED: list[Activation] = ["swiglu", "geglu", "geglu_tanh", "relu2"]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-4}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FUSED)
def test_values_and_gradients_are_the_references(
    name: Activation, dtype: torch.dtype, device: torch.device
) -> None:
    up = random_tensor((2, 3, 2 * 2100), dtype, device, 1)
    results = []
    for kernels in (TritonKernels(), TORCH_BACKEND):
        y = kernels.activation(up * 3, name)
        results.append((y.detach(), *gradients(y, up)))
    close = TOLERANCE.get(dtype, 4 * torch.finfo(dtype).eps)
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.allclose(ours, theirs, rtol=close, atol=close)


@pytest.mark.parametrize("name", FUSED)
def test_large_numbers_do_not_overflow(name: Activation, device: torch.device) -> None:
    edge = torch.tensor([-1e4, -100.0, -0.0, 0.0, 100.0, 1e4], device=device)
    up = torch.cat([edge, torch.ones_like(edge)]).requires_grad_()
    ours, theirs = (each.activation(up, name) for each in (TritonKernels(), TORCH_BACKEND))
    assert torch.allclose(ours, theirs)
    slopes = [torch.autograd.grad(y.sum(), up)[0] for y in (ours, theirs)]
    assert torch.allclose(*slopes)


@pytest.mark.parametrize("name", FUSED)
def test_what_is_not_a_number_stays_so(name: Activation, device: torch.device) -> None:
    up = torch.full((4,), torch.nan, device=device)
    assert TritonKernels().activation(up, name).isnan().all()


def test_by_hand(device: torch.device) -> None:
    up = torch.tensor([0.0, 5.0], device=device, requires_grad=True)
    y = TritonKernels().activation(up, "swiglu")
    assert y.tolist() == [0.0]
    assert torch.autograd.grad(y.sum(), up)[0].tolist() == [2.5, 0.0]


@pytest.mark.parametrize(("name", "operation"), [("swiglu", "gated"), ("relu2", "squared_relu")])
def test_each_pass_is_one_operation_that_keeps_its_argument(
    name: Activation, operation: str
) -> None:
    up = torch.zeros((2, 8), device="meta", requires_grad=True)
    saved: list[torch.Tensor] = []

    def both() -> None:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            y = TritonKernels().activation(up, name)
        torch.autograd.grad(y, up, y.detach())

    names = [each for each in operations(both) if each.startswith("mpctl")]
    assert names == [f"mpctl::{operation}", f"mpctl::{operation}_backward"]
    assert [each.shape for each in saved] == [up.shape]
