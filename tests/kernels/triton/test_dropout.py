"""One kernel drops what the reference drops and rounds as it rounds, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mpctl.kernels.backend import TORCH_BACKEND
from mpctl.kernels.counter_rng import CounterRNG, DropoutMask, site_key
from mpctl.kernels.triton.backend import TritonKernels
from tests.kernels.triton.bits import DTYPES, gradients, operations, random_tensor, same_bits


def mask_of(
    x: Tensor, samples: list[int], p: float = 0.3, key: int | Tensor = 12345, **places
) -> DropoutMask:
    """A mask over a tensor; rows and columns count from 0 by default."""
    places = {"rows": range(x.shape[-2]), "columns": range(x.shape[-1]), **places}
    return DropoutMask(key, p, torch.tensor(samples, device=x.device), **places)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_residual", [False, True])
def test_bits_and_rounding_are_the_references(
    dtype: torch.dtype, has_residual: bool, device: torch.device
) -> None:
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


def test_rows_and_columns_are_global_numbers_given_as_ranges_or_tensors(
    device: torch.device,
) -> None:
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


def test_attention_probabilities_are_dropped_by_sample_head_row_and_key(
    device: torch.device,
) -> None:
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
    compiled = torch.compile(
        lambda x: TritonKernels().dropout(x * 2, mask), backend="aot_eager", fullgraph=True
    )
    assert same_bits(compiled(x), TORCH_BACKEND.dropout(x * 2, mask))
