"""Comparisons and inputs of the kernels' tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bytes, signs of zeros among them."""
    same_kind = a.dtype == b.dtype and a.shape == b.shape
    return same_kind and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int) -> Tensor:
    """Normal numbers that require a gradient."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()


def gradients(result: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Gradients of the inputs for one random gradient of the result."""
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(result.shape, generator=generator).to(result.device, result.dtype)
    return torch.autograd.grad(result, inputs, grad)


class _Operations(TorchDispatchMode):
    """Names of the operations that ran inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **kwargs or {})


def operations(compute: Callable[[], Any]) -> list[str]:
    """The names of the operations that a function runs, forward and backward alike."""
    with _Operations() as mode:
        compute()
    return mode.names
