"""The kernels that a device gets compute what torch's own do on a CPU, dropout bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mpctl.kernels.backend import TORCH_BACKEND, KernelBackend
from mpctl.kernels.dropout_mask import DropoutMask
from mpctl.runtime.environment import machine_kernels

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def draw(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def mask_on(device: torch.device, heads: range | None = None) -> DropoutMask:
    samples = torch.tensor([3, 1_000_000_007], device=device)
    return DropoutMask(0x12345678, 0.25, samples, range(5, 5 + 96), range(64, 128), heads)


def outcome(kernels: KernelBackend, operation: Any, *inputs: Tensor) -> list[Tensor]:
    """The result and the gradient of each input, on the CPU, for a gradient of 1, 2, 3, ..."""
    inputs = tuple(x.detach().requires_grad_() for x in inputs)
    result = operation(kernels, *inputs)
    weights = torch.arange(1.0, result.numel() + 1, device=result.device).view_as(result)
    result.backward(weights.to(result.dtype) / result.numel())
    gradients = [x.grad for x in inputs]
    return [x.detach().cpu() for x in (result, *gradients) if x is not None]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [None, range(2, 5)])
def test_dropout_has_the_bits_of_a_cpu(
    dtype: torch.dtype, heads: range | None, device: torch.device
) -> None:
    shape = (2, 96, 64) if heads is None else (2, 3, 96, 64)
    x = draw(*shape).to(dtype)

    def dropped(on: torch.device, kernels: KernelBackend) -> list[Tensor]:
        mask = mask_on(on, heads)
        return outcome(kernels, lambda k, own: k.dropout(own, mask), x.to(on))

    for found, expected in zip(dropped(device, machine_kernels(device)),
                               dropped(CPU, TORCH_BACKEND), strict=True):  # fmt: skip
        assert torch.equal(found, expected)


def test_dropout_and_residual_have_the_bits_of_a_cpu(device: torch.device) -> None:
    x, residual = draw(2, 96, 64).bfloat16(), draw(2, 96, 64, seed=2).bfloat16()

    def added(on: torch.device, kernels: KernelBackend) -> list[Tensor]:
        mask = mask_on(on)
        return outcome(kernels, lambda k, a, b: k.dropout_add(a, mask, b), x.to(on),
                       residual.to(on))  # fmt: skip

    for found, expected in zip(added(device, machine_kernels(device)), added(CPU, TORCH_BACKEND),
                               strict=True):  # fmt: skip
        assert torch.equal(found, expected)


ROTATION = (torch.cos(draw(96, 8)), torch.sin(draw(96, 8)))
OPERATIONS: dict[str, Any] = {
    "gelu": (lambda k, x: k.activation(x, "gelu"), (2, 96, 64)),
    "gelu_tanh": (lambda k, x: k.activation(x, "gelu_tanh"), (2, 96, 64)),
    "relu2": (lambda k, x: k.activation(x, "relu2"), (2, 96, 64)),
    "swiglu": (lambda k, x: k.activation(x, "swiglu"), (2, 96, 128)),
    "geglu": (lambda k, x: k.activation(x, "geglu"), (2, 96, 128)),
    "rotate": (lambda k, x: k.rotate(x, *(t.to(x.device, x.dtype) for t in ROTATION)),
               (2, 4, 96, 16)),
    "rms_norm": (lambda k, x: k.rms_norm(x, torch.ones(64, device=x.device, dtype=x.dtype), 1e-5),
                 (2, 96, 64)),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_elementwise_kernels_agree(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """Within two roundings of the data type: a device's exp and tanh are its own."""
    operation, shape = OPERATIONS[name]
    x, bits = draw(*shape).to(dtype), {torch.float32: 1e-5, torch.bfloat16: 2**-7}[dtype]
    found = outcome(machine_kernels(device), operation, x.to(device))
    for here, there in zip(found, outcome(TORCH_BACKEND, operation, x), strict=True):
        torch.testing.assert_close(here, there, rtol=2 * bits, atol=bits)
