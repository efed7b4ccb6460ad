"""Scales that are powers of two, casts and products of fp8 by hand and against float32."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from torch import Tensor

from mpctl.train.kernels.fp8 import (
    E4M3,
    E5M2,
    LARGEST,
    Fp8Matrix,
    Operand,
    cast_matrix,
    largest,
    largest_exponents,
    note_largest,
    operand_scales,
    power_of_two_scale,
    scaled_product,
)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("amax", [1e-30, 3e-5, 0.99, 1.0, 3.0, 3.4999, 3.5, 3.5001, 3.6, 448.0, 449.0, 5.7344e4, 1e12])
def test_a_scale_is_the_last_power_of_two_that_fits(amax: float, dtype: torch.dtype) -> None:
    (exact,) = struct.unpack("f", struct.pack("f", amax))
    scale = power_of_two_scale(torch.tensor(amax), dtype).item()
    expected = 2.0 ** min(96, math.floor(math.log2(LARGEST[dtype] / exact)))
    assert scale == expected
    assert exact * scale <= LARGEST[dtype]


def test_scales_by_hand() -> None:
    amaxes = torch.tensor([3.0, 3.6, 0.0, 1e-45, torch.inf])
    assert power_of_two_scale(amaxes, E4M3).tolist() == [128.0, 64.0, 1.0, 2.0**96, 2.0**-96]


def test_scales_of_all_operands_at_once_are_those_of_each() -> None:
    amaxes = torch.tensor([[3.0, 3.6, 3.0], [0.0, 448.0, 5e4]])
    together = operand_scales(amaxes, largest_exponents(torch.device("cpu")))
    for which in Operand:
        assert torch.equal(together[:, which], power_of_two_scale(amaxes[:, which], which.dtype))


def test_the_largest_element_of_a_tensor() -> None:
    x = torch.tensor([[1.0, -7.0], [2.0, 3.0]], dtype=torch.bfloat16)
    seen = torch.tensor(5.0)
    note_largest(x, seen)
    assert (largest(x).item(), seen.item()) == (7.0, 7.0)
    note_largest(x / 2, seen)
    assert seen.item() == 7.0
    assert math.isnan(largest(torch.tensor([1.0, math.nan])).item())


def test_a_cast_by_hand() -> None:
    """e4m3 has three bits behind the point: 300 lies between 288 and 320, 17 between 16 and 18."""
    x = torch.tensor([[300.0, -17.0], [1000.0, 0.5]])
    cast = cast_matrix(x, torch.tensor(1.0), E4M3, columns=True)
    assert cast.by_rows is not None and cast.by_columns is not None
    assert cast.by_rows.float().tolist() == [[288.0, -16.0], [448.0, 0.5]]
    assert torch.equal(cast.by_columns.float(), cast.by_rows.float().t())
    assert cast.by_columns.is_contiguous()
    halved = cast_matrix(x, torch.tensor(0.25), E5M2, rows=False, columns=True)
    assert halved.by_rows is None and halved.by_columns is not None
    assert halved.by_columns.float().tolist() == [[80.0, 256.0], [-4.0, 0.125]]
    assert x[1, 0] == 1000.0, "the argument is left alone"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_scale_changes_no_value_that_stays_normal(dtype: torch.dtype) -> None:
    """What makes the loss independent of how a tensor is cut: 1, 2 and 8 round alike."""
    x = torch.randn(64, 48, generator=torch.Generator().manual_seed(1)).to(dtype)
    x = torch.where(x.abs() < 2**-5, torch.ones_like(x), x)
    values = []
    for scale in (1.0, 2.0, 8.0):
        cast = cast_matrix(x, torch.tensor(scale), E4M3).by_rows
        assert cast is not None
        values.append(cast.float() / scale)
    assert torch.equal(values[0], values[1]) and torch.equal(values[0], values[2])


def _matrix(rows: int, columns: int, seed: int, dtype: torch.dtype) -> tuple[Fp8Matrix, Tensor]:
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    scale = power_of_two_scale(largest(x), dtype)
    cast = cast_matrix(x, scale, dtype).by_rows
    assert cast is not None
    return Fp8Matrix(cast, scale.reciprocal()), cast.float() / scale


@pytest.mark.parametrize("a_dtype", [E4M3, E5M2])
def test_a_product_is_that_of_the_values(a_dtype: torch.dtype) -> None:
    """Summed in float32 and rounded once; bias and fast sums included."""
    a, exact_a = _matrix(32, 64, 1, a_dtype)
    b, exact_b = _matrix(16, 64, 2, E4M3)
    bias = torch.linspace(-1, 1, 16).to(torch.bfloat16)
    for fast in (False, True):
        got = scaled_product(a, b, out=torch.bfloat16, bias=bias, fast=fast)
        expected = exact_a @ exact_b.t() + bias.float()
        torch.testing.assert_close(got.float(), expected, rtol=2**-7, atol=2**-6)


def test_a_cpu_multiplies_as_tensor_cores_do() -> None:
    """Against torch's own scaled product, which a CPU computes too, slowly."""
    a, _ = _matrix(32, 64, 3, E5M2)
    b, _ = _matrix(16, 64, 4, E4M3)
    ours = scaled_product(a, b, out=torch.bfloat16, fast=False)
    theirs = torch._scaled_mm(a.values, b.values.t(), scale_a=a.inverse, scale_b=b.inverse, out_dtype=torch.bfloat16)
    torch.testing.assert_close(ours, theirs, rtol=2**-8, atol=1e-6)


def test_torchao_chooses_the_same_scales() -> None:
    """Another implementation of the same law (its option round_scales_to_power_of_2), where it is
    installed."""
    utils = pytest.importorskip("torchao.float8.float8_utils")
    for amax in (1e-6, 0.3, 3.0, 3.6, 448.0, 1e5):
        for dtype in (E4M3, E5M2):
            theirs = utils.amax_to_scale(torch.tensor(amax), dtype, round_scales_to_power_of_2=True)
            assert power_of_two_scale(torch.tensor(amax), dtype) == theirs
