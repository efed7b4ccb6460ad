"""Vectors added to rows: equal to a table's own gradient, in any type, rows that repeat too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mpctl.train.kernels import rows as kernel
from mpctl.train.kernels.rows import add_rows

ROWS, WIDTH = 50, 8


def summed(rows: Tensor, vectors: Tensor, out: Tensor) -> Tensor:
    """By definition, one vector after the other."""
    result = out.clone()
    for row, vector in zip(rows.tolist(), vectors, strict=True):
        result[row] += vector.to(out.dtype)
    return result


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 7, 300])
def test_vectors_are_added_to_their_rows(dtype: torch.dtype, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks of two rows where they are converted."""
    monkeypatch.setattr(kernel, "ROWS_BLOCK", 2 * WIDTH)
    draw = torch.Generator().manual_seed(count)
    sums = torch.float32 if dtype == torch.bfloat16 else dtype
    out = torch.randn(ROWS, WIDTH, generator=draw, dtype=sums)
    rows = torch.randint(0, ROWS // 5, (count,), generator=draw)
    vectors = torch.randn(count, WIDTH, generator=draw).to(dtype)
    expected = summed(rows, vectors, out)
    add_rows(rows, vectors, out)
    assert torch.equal(out, expected)


@pytest.mark.parametrize(("count", "dtype"), [(7, torch.float64), (7, torch.bfloat16), (300, torch.float32)])
def test_a_device_sums_equal_rows_first(count: int, dtype: torch.dtype) -> None:
    """What a GPU is given, computed here: sums of equal rows, then each row once; with more vectors
    than the table has rows its own gradient."""
    draw = torch.Generator().manual_seed(1)
    sums = torch.float32 if dtype == torch.bfloat16 else dtype
    out = torch.randn(ROWS, WIDTH, generator=draw, dtype=sums)
    rows = torch.randint(0, 4, (count,), generator=draw)
    vectors = torch.randn(count, WIDTH, generator=draw).to(dtype)
    expected = summed(rows, vectors, out)
    kernel.add_sums(rows, vectors, out)
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
