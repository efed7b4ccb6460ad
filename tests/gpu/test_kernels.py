"""The kernels that a device gets compute what torch's own do on a CPU, dropout bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mpctl.train.kernels.attention import AttentionVariant
from mpctl.train.kernels.backend import TORCH_BACKEND, KernelBackend
from mpctl.train.kernels.counter_rng import DropoutMask
from mpctl.train.runtime.kernel_choice import machine_kernels
from mpctl.train.transport.group import Group

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
def test_dropout_has_the_bits_of_a_cpu(dtype: torch.dtype, heads: range | None, device: torch.device) -> None:
    shape = (2, 96, 64) if heads is None else (2, 3, 96, 64)
    x = draw(*shape).to(dtype)

    def dropped(on: torch.device, kernels: KernelBackend) -> list[Tensor]:
        mask = mask_on(on, heads)
        return outcome(kernels, lambda k, own: k.dropout(own, mask), x.to(on))

    for found, expected in zip(
        dropped(device, machine_kernels(device, Group())), dropped(CPU, TORCH_BACKEND), strict=True
    ):
        assert torch.equal(found, expected)


def test_dropout_and_residual_have_the_bits_of_a_cpu(device: torch.device) -> None:
    x, residual = draw(2, 96, 64).bfloat16(), draw(2, 96, 64, seed=2).bfloat16()

    def added(on: torch.device, kernels: KernelBackend) -> list[Tensor]:
        mask = mask_on(on)
        return outcome(kernels, lambda k, a, b: k.dropout_add(a, mask, b), x.to(on), residual.to(on))

    kernels = machine_kernels(device, Group())
    for found, expected in zip(added(device, kernels), added(CPU, TORCH_BACKEND), strict=True):
        assert torch.equal(found, expected)


ROTATION = (torch.cos(draw(96, 8)), torch.sin(draw(96, 8)))
OPERATIONS: dict[str, Any] = {
    "gelu": (lambda k, x: k.activation(x, "gelu"), (2, 96, 64)),
    "gelu_tanh": (lambda k, x: k.activation(x, "gelu_tanh"), (2, 96, 64)),
    "relu2": (lambda k, x: k.activation(x, "relu2"), (2, 96, 64)),
    "swiglu": (lambda k, x: k.activation(x, "swiglu"), (2, 96, 128)),
    "geglu": (lambda k, x: k.activation(x, "geglu"), (2, 96, 128)),
    "rotate": (lambda k, x: k.rotate(x, *(t.to(x.device, x.dtype) for t in ROTATION)), (2, 4, 96, 16)),
    "rms_norm": (lambda k, x: k.rms_norm(x, torch.ones(64, device=x.device, dtype=x.dtype), 1e-5), (2, 96, 64)),
}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_elementwise_kernels_agree(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """Within two roundings of the data type: a device's exp and tanh are its own."""
    operation, shape = OPERATIONS[name]
    x, bits = draw(*shape).to(dtype), {torch.float32: 1e-5, torch.bfloat16: 2**-7}[dtype]
    found = outcome(machine_kernels(device, Group()), operation, x.to(device))
    for here, there in zip(found, outcome(TORCH_BACKEND, operation, x), strict=True):
        torch.testing.assert_close(here, there, rtol=2 * bits, atol=bits)


def variant_of(name: str, device: torch.device) -> AttentionVariant:
    """Of 96 causal rows, 4 heads, some variants at once."""
    samples = torch.tensor([3, 1_000_000_007], device=device)
    mask = DropoutMask(0x12345678, 0.25, samples, range(96), range(96), range(4, 8))
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64, device=device)
    return {
        "causal": AttentionVariant(range(96), is_causal=True),
        "dropout": AttentionVariant(range(96), is_causal=True, dropout=mask),
        "window, slopes": AttentionVariant(range(96), is_causal=True, window=17, slopes=slopes),
        "slopes, dropout": AttentionVariant(range(96), is_causal=True, slopes=slopes, dropout=mask),
    }[name]


@pytest.mark.parametrize("name", ["causal", "dropout", "window, slopes", "slopes, dropout"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_agrees(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """Two samples of 4 heads on 2 of keys and values, each of 64 columns; an element that a mask
    kept on one device alone would be off by a quarter of a value."""
    inputs = [draw(2, heads, 96, 64, seed=n).to(dtype) for n, heads in enumerate((4, 2, 2))]

    def attended(on: torch.device, kernels: KernelBackend) -> list[Tensor]:
        variant = variant_of(name, on)
        return outcome(kernels, lambda k, *qkv: k.attention(*qkv, variant), *(x.to(on) for x in inputs))

    found, bits = (attended(device, machine_kernels(device, Group())), {torch.float32: 2e-5}.get(dtype, 2e-2))
    for here, there in zip(found, attended(CPU, TORCH_BACKEND), strict=True):
        torch.testing.assert_close(here, there, rtol=bits, atol=bits)


def cross_entropy(kernels: KernelBackend, logits: Tensor) -> list[Tensor]:
    """What the three passes make of logits [n, v]; the target is column n."""
    column = torch.arange(len(logits), device=logits.device)
    peak = kernels.row_maximum(logits, words=600)
    shares, sums = kernels.own_sums(logits, column, peak, words=600)
    hit = torch.full_like(peak, -0.9)
    slope = kernels.logits_gradient(logits, column, peak, 1 / sums, hit, words=600, overwrite=False)
    return [each.cpu() for each in (peak, shares, sums, slope)]


def test_cross_entropys_passes_agree(device: torch.device) -> None:
    logits = draw(96, 640).mul(4)
    found = cross_entropy(machine_kernels(device, Group()), logits.to(device))
    for here, there in zip(found, cross_entropy(TORCH_BACKEND, logits), strict=True):
        torch.testing.assert_close(here, there, rtol=1e-5, atol=1e-5)


def test_fp8_casts_have_the_bits_of_a_cpu(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        pytest.skip("this device has no fp8")
    x, dtype = draw(96, 64).mul(3).bfloat16(), torch.float8_e4m3fn

    def cast(on: torch.device, kernels: KernelBackend) -> tuple[Tensor, Tensor]:
        amax, scale = torch.zeros((), device=on), torch.full((), 16.0, device=on)
        found = kernels.fp8_cast(x.to(on), scale, dtype, columns=True, amax=amax)
        assert found.by_rows is not None and found.by_columns is not None
        assert torch.equal(found.by_rows.t().float(), found.by_columns.float())
        return found.by_rows.view(torch.uint8).cpu(), amax.cpu()

    for here, there in zip(cast(device, machine_kernels(device, Group())), cast(CPU, TORCH_BACKEND), strict=True):
        assert torch.equal(here, there)
