"""Activations, dropout and rotary positions in one kernel are torch's own operations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mpctl.train.kernels.activation import Activation
from mpctl.train.kernels.backend import TORCH_BACKEND
from mpctl.train.kernels.counter_rng import CounterRNG, DropoutMask, site_key
from mpctl.train.kernels.rotary import Rotary
from mpctl.train.kernels.triton.backend import TritonKernels
from tests.train.kernels.triton.bits import DTYPES, gradients, operations, random_tensor, same_bits

FUSED: list[Activation] = ["swiglu", "geglu", "geglu_tanh", "relu2"]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-4}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FUSED)
def test_values_and_gradients_are_the_references(name: Activation, dtype: torch.dtype, device: torch.device) -> None:
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
def test_each_pass_is_one_operation_that_keeps_its_argument(name: Activation, operation: str) -> None:
    up = torch.zeros((2, 8), device="meta", requires_grad=True)
    saved: list[torch.Tensor] = []

    def both() -> None:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            y = TritonKernels().activation(up, name)
        torch.autograd.grad(y, up, y.detach())

    names = [each for each in operations(both) if each.startswith("mpctl")]
    assert names == [f"mpctl::{operation}", f"mpctl::{operation}_backward"]
    assert [each.shape for each in saved] == [up.shape]


def mask_of(x: Tensor, samples: list[int], p: float = 0.3, key: int | Tensor = 12345, **places) -> DropoutMask:
    """A mask over a tensor; rows and columns count from 0 by default."""
    places = {"rows": range(x.shape[-2]), "columns": range(x.shape[-1]), **places}
    return DropoutMask(key, p, torch.tensor(samples, device=x.device), **places)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_residual", [False, True])
def test_bits_and_rounding_are_the_references(dtype: torch.dtype, has_residual: bool, device: torch.device) -> None:
    x, residual = (random_tensor((2, 5, 70), dtype, device, seed) for seed in (1, 2))
    mask, results = mask_of(x, [3, 100]), []
    for kernels in (TORCH_BACKEND, TritonKernels()):
        if has_residual:
            y = kernels.dropout_add(x, mask, residual)
            results.append((y.detach(), *gradients(y, x, residual)))
        else:
            y = kernels.dropout(x, mask)
            results.append((y.detach(), *gradients(y, x)))
    assert all(map(same_bits, *results))
    assert 0.1 < (results[0][1] == 0).double().mean() < 0.5


def test_rows_and_columns_are_global_numbers_given_as_ranges_or_tensors(device: torch.device) -> None:
    x = random_tensor((2, 6, 9), torch.float32, device, 1)
    scattered = torch.tensor([0, 1, 4, 5, 90, 91], device=device)
    whole = random_tensor((2, 100, 40), torch.float32, device, 2)
    full = TritonKernels().dropout(torch.ones_like(whole), mask_of(whole, [8, 9])) > 0
    for rows in (range(10, 22, 2), scattered):
        columns = range(20, 29)
        mask = mask_of(x, [8, 9], rows=rows, columns=columns)
        ours = TritonKernels().dropout(x, mask)
        assert same_bits(ours, TORCH_BACKEND.dropout(x, mask))
        at = torch.tensor(rows) if isinstance(rows, range) else rows
        assert torch.equal(ours != 0, full[:, at, 20:29])


def test_attention_probabilities_are_dropped_by_sample_head_row_and_key(device: torch.device) -> None:
    x = random_tensor((2, 3, 4, 17), torch.bfloat16, device, 1)
    for heads in (range(6, 9), torch.tensor([1, 7, 2], device=device)):
        mask = mask_of(x, [5, 6], heads=heads, rows=range(4, 8))
        assert same_bits(TritonKernels().dropout(x, mask), TORCH_BACKEND.dropout(x, mask))


def test_the_key_may_lie_on_the_device(device: torch.device) -> None:
    x = random_tensor((2, 4, 8), torch.float32, device, 1)
    number = site_key(7, "dropout", 3, "layers.0")
    rng = CounterRNG(7, 3, torch.arange(2, device=device))
    as_number = rng.mask(x.shape, 0.5, rng_site="layers.0")
    assert as_number.key == number
    low = torch.tensor(number, dtype=torch.int64).to(torch.int32).to(device)
    as_tensor = mask_of(x, [0, 1], p=0.5, key=low)
    expected = TORCH_BACKEND.dropout(x, as_number)
    for mask in (as_number, as_tensor):
        assert same_bits(TritonKernels().dropout(x, mask), expected)


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 7, 1025), (2, 0, 4), (1, 3, 0)])
def test_sizes_need_not_fill_a_tile(shape: tuple[int, ...], device: torch.device) -> None:
    x = random_tensor(shape, torch.float32, device, 1)
    mask = mask_of(x, list(range(shape[0])))
    ours, theirs = (kernels.dropout(x, mask) for kernels in (TritonKernels(), TORCH_BACKEND))
    assert same_bits(ours, theirs)
    assert all(map(same_bits, gradients(ours, x), gradients(theirs, x)))


def test_strides_of_the_input_and_of_its_gradient_do_not_matter(device: torch.device) -> None:
    x = random_tensor((2, 8, 4), torch.float32, device, 1)
    turned = x.transpose(1, 2)
    mask, results = mask_of(turned, [0, 1]), []
    for kernels in (TORCH_BACKEND, TritonKernels()):
        y = kernels.dropout(turned, mask).transpose(1, 2)
        results.append((y.detach(), *gradients(y, x)))
    assert all(map(same_bits, *results))


def test_one_operation_forward_and_one_backward_which_keep_a_byte_an_element() -> None:
    x = torch.zeros((2, 4, 8), device="meta", dtype=torch.bfloat16, requires_grad=True)
    residual, grad = torch.zeros_like(x, requires_grad=True), torch.zeros_like(x)
    saved: list[Tensor] = []
    mask = DropoutMask(1, 0.1, torch.arange(2, device="meta"), range(4), range(8))

    def both() -> None:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            y = TritonKernels().dropout_add(x, mask, residual)
        torch.autograd.grad(y, (x, residual), grad)

    assert operations(both) == ["mpctl::dropout", "mpctl::dropout_backward"]
    assert [t.nbytes for t in saved] == [2 * 4 * 8]


def test_a_compiled_function_has_one_graph(device: torch.device) -> None:
    x = random_tensor((2, 4, 8), torch.float32, device, 1)
    key = torch.tensor(99, dtype=torch.int32, device=device)
    mask = mask_of(x, [4, 5], key=key)
    compiled = torch.compile(lambda x: TritonKernels().dropout(x * 2, mask), backend="aot_eager", fullgraph=True)
    assert same_bits(compiled(x), TORCH_BACKEND.dropout(x * 2, mask))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [None, 6])
def test_forward_has_the_references_bits(dtype: torch.dtype, columns: int | None, device: torch.device) -> None:
    fused = random_tensor((2, 5, 3 * 4 * 16), dtype, device, 1)
    x = fused.unflatten(-1, (-1, 16)).transpose(1, 2)[:, 4:8]
    cos, sin = Rotary(16, columns=columns).table(range(3, 8), x)
    ours, theirs = (kernels.rotate(x, cos, sin) for kernels in (TritonKernels(), TORCH_BACKEND))
    assert same_bits(ours, theirs)
    assert ours.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
def test_backward_turns_the_gradient_back_and_rounds_once(dtype: torch.dtype, device: torch.device) -> None:
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
