"""Grouped products: torch's kernel and the loop against each group's product by itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from mpctl.train.kernels import grouped
from mpctl.train.kernels.grouped import RowGroups, grouped_input_gradient, grouped_output, grouped_weight_gradient

SIZES = ([3, 0, 5, 1], [0, 0, 0, 0], [0, 9, 0, 0], [2, 2, 2, 2])
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
WIDTH, OUT = 8, 16


def _products(sizes: list[int], dtype: torch.dtype, inputs: int = WIDTH) -> list[Tensor]:
    made = torch.Generator().manual_seed(5)
    rows, weight, grad = (
        torch.randn(shape, generator=made, dtype=torch.float64).to(dtype)
        for shape in [(sum(sizes), inputs), (len(sizes), OUT, inputs), (sum(sizes), OUT)]
    )
    groups = RowGroups(torch.tensor(sizes), sizes)
    products = [
        grouped_output(rows, weight, groups),
        grouped_input_gradient(grad, weight, groups),
        grouped_weight_gradient(grad, rows, groups),
    ]
    own = list(zip(rows.split(sizes), weight, grad.split(sizes), strict=True))
    expected = [
        torch.cat([x @ w.T for x, w, _ in own]),
        torch.cat([dy @ w for _, w, dy in own]),
        torch.stack([dy.T @ x for x, _, dy in own]),
    ]
    for product, right in zip(products, expected, strict=True):
        torch.testing.assert_close(product, right)
    return products


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_group_has_a_matrix_of_its_own(
    sizes: list[int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    products = _products(sizes, dtype)
    assert not products[2][[i for i, size in enumerate(sizes) if size == 0]].any()
    monkeypatch.setattr(grouped, "_is_one_kernel", lambda a, b: False)
    for product, looped in zip(products, _products(sizes, dtype), strict=True):
        assert torch.equal(product, looped)


def test_one_kernel_where_torch_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[torch.dtype] = []
    kernel = grouped.F.grouped_mm
    monkeypatch.setattr(grouped.F, "grouped_mm", lambda a, b, **how: calls.append(a.dtype) or kernel(a, b, **how))
    for dtype in DTYPES:
        _products(SIZES[0], dtype)
    _products(SIZES[0], torch.float32, inputs=6)  # 24 bytes: only a multiple of 16 will do
    assert calls == [torch.float32] * 3 + [torch.bfloat16] * 3


def test_sizes_are_read_only_where_they_are_needed() -> None:
    asked: list[int] = []
    groups = RowGroups(torch.tensor([1, 2]), lambda: asked.append(1) or [1, 2])
    rows, weight = torch.ones(3, 4), torch.ones(2, 4, 4)
    grouped_output(rows, weight, groups)
    assert not asked
    grouped_output(rows.double(), weight.double(), groups)
    assert asked and grouped_output(rows.double(), weight.double(), groups).shape == (3, 4)
    assert len(asked) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fake_tensors_have_shapes(dtype: torch.dtype) -> None:
    with FakeTensorMode():
        groups = RowGroups(torch.zeros(4, dtype=torch.int64), [3, 0, 5, 1])
        rows, weight = torch.zeros(9, WIDTH, dtype=dtype), torch.zeros(4, OUT, WIDTH, dtype=dtype)
        y = grouped_output(rows, weight, groups)
        assert y.shape == (9, OUT)
        assert grouped_input_gradient(y, weight, groups).shape == rows.shape
        assert grouped_weight_gradient(y, rows, groups).shape == weight.shape
