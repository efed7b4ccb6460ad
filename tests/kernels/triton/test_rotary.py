"""One kernel turns heads as the separate products do, forward and back."""

from __future__ import annotations

import pytest
import torch

from mpctl.kernels.backend import TORCH_BACKEND
from mpctl.kernels.rotary import Rotary
from mpctl.kernels.triton.backend import TritonKernels
from tests.kernels.triton.bits import DTYPES, gradients, operations, random_tensor, same_bits


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [None, 6])
def test_forward_has_the_references_bits(
    dtype: torch.dtype, columns: int | None, device: torch.device
) -> None:
    fused = random_tensor((2, 5, 3 * 4 * 16), dtype, device, 1)
    x = fused.unflatten(-1, (-1, 16)).transpose(1, 2)[:, 4:8]
    cos, sin = Rotary(16, columns=columns).table(range(3, 8), x)
    ours, theirs = (kernels.rotate(x, cos, sin) for kernels in (TritonKernels(), TORCH_BACKEND))
    assert same_bits(ours, theirs)
    assert ours.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
def test_backward_turns_the_gradient_back_and_rounds_once(
    dtype: torch.dtype, device: torch.device
) -> None:
    x = random_tensor((2, 3, 5, 8), dtype, device, 1)
    cos, sin = Rotary(8).table(range(5), x)
    grad = random_tensor((2, 3, 5, 8), dtype, device, 2).detach()
    (dx,) = torch.autograd.grad(TritonKernels().rotate(x, cos, sin), x, grad)
    assert same_bits(dx, TORCH_BACKEND.rotate(grad, cos, -sin))
    (theirs,) = torch.autograd.grad(TORCH_BACKEND.rotate(x, cos, sin), x, grad)
    assert torch.allclose(dx, theirs, rtol=2 * torch.finfo(dtype).eps, atol=1e-2)


def test_each_sample_may_have_positions_of_its_own(device: torch.device) -> None:
    x = random_tensor((2, 3, 5, 8), torch.float32, device, 1)
    positions = torch.tensor([[0, 1, 2, 3, 4], [9, 0, 7, 7, 1]], device=device)
    cos, sin = Rotary(8).table(positions, x)
    ours, theirs = (kernels.rotate(x, cos, sin) for kernels in (TritonKernels(), TORCH_BACKEND))
    assert same_bits(ours, theirs)
    assert all(map(same_bits, gradients(ours, x), gradients(theirs, x)))


def test_the_table_alone_is_kept_and_each_pass_is_one_operation() -> None:
    x = torch.zeros((2, 3, 5, 8), device="meta", requires_grad=True)
    cos, sin = (torch.zeros((5, 4), device="meta") for _ in range(2))
    grad, saved = torch.zeros((2, 3, 5, 8), device="meta"), []

    def both() -> None:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            y = TritonKernels().rotate(x, cos, sin)
        torch.autograd.grad(y, x, grad)

    assert operations(both) == ["mpctl::rotate"] * 2
    assert [t.shape for t in saved] == [(5, 4)] * 2
