"""A cast to fp8 as one kernel: scale, saturation, both layouts and the largest element.

Step by step it is five kernels: the largest element, the product with the scale, the saturation,
the cast and the transposed copy, 15 bytes an element in 16 bits; here 2 are read and 1 is written
for each layout. The values are those of `kernels.fp8.cast_matrix`, bit for bit.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from mpctl.train.kernels.fp8 import LARGEST, Fp8Cast
from mpctl.train.kernels.triton import define_operation
from mpctl.train.kernels.triton.launch import KernelLaunch, Launcher, blocks

TILE_ROWS, TILE_COLUMNS = 64, 128  # 32 elements a thread of 8 warps


def _kernels() -> ModuleType:
    from mpctl.train.kernels.triton.jit import fp8

    return fp8


_CAST = Launcher(_kernels, "fp8_cast_kernel")


def fused_cast(
    matrix: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    *,
    rows: bool,
    columns: bool,
    amax: Tensor | None,
    into: Fp8Cast | None = None,
) -> Fp8Cast:
    """As `KernelBackend.fp8_cast`."""
    if into is not None:
        assert into.by_rows is not None and into.by_columns is not None
        _cast_into(matrix, scale, amax, into.by_rows, into.by_columns, dtype)
        return into
    by_rows, by_columns = _cast(matrix, scale, amax, dtype, rows, columns)
    return Fp8Cast(by_rows if rows else None, by_columns if columns else None)


def _run(
    matrix: Tensor, scale: Tensor, amax: Tensor | None, dtype: torch.dtype, rows: bool, columns: bool
) -> tuple[Tensor, Tensor]:
    results = _fake(matrix, scale, amax, dtype, rows, columns)
    by_rows, by_columns = results
    _launch(matrix, scale, amax, by_rows if rows else None, by_columns if columns else None, dtype)
    return results


def _run_into(
    matrix: Tensor, scale: Tensor, amax: Tensor | None, by_rows: Tensor, by_columns: Tensor, dtype: torch.dtype
) -> None:
    _launch(matrix, scale, amax, by_rows, by_columns, dtype)


def _launch(
    matrix: Tensor,
    scale: Tensor,
    amax: Tensor | None,
    by_rows: Tensor | None,
    by_columns: Tensor | None,
    dtype: torch.dtype,
) -> None:
    if matrix.numel():
        tensors = (matrix.contiguous(), scale, by_rows, by_columns, amax)
        _CAST(tensors, dtype, _prepare, matrix, dtype)


def _prepare(matrix: Tensor, dtype: torch.dtype) -> KernelLaunch:
    import triton.language as tl

    count, width = matrix.shape
    constants = {
        "LARGEST": LARGEST[dtype],
        "dtype": tl.float8e5 if dtype == torch.float8_e5m2 else tl.float8e4nv,
        "BLOCK_ROWS": TILE_ROWS,
        "BLOCK_COLUMNS": TILE_COLUMNS,
    }
    grid = blocks(count, TILE_ROWS), blocks(width, TILE_COLUMNS)
    return KernelLaunch(grid, (count, width), constants, {"num_warps": 8})


def _fake(
    matrix: Tensor, scale: Tensor, amax: Tensor | None, dtype: torch.dtype, rows: bool, columns: bool, *_: Any
) -> tuple[Tensor, Tensor]:
    count, width = matrix.shape
    return (
        matrix.new_empty((count, width) if rows else (0,), dtype=dtype),
        matrix.new_empty((width, count) if columns else (0,), dtype=dtype),
    )


_cast = define_operation(
    "fp8_cast(Tensor matrix, Tensor scale, Tensor(a!)? amax, ScalarType dtype, bool rows,"
    " bool columns) -> (Tensor, Tensor)",
    _run,
    _fake,
)
_cast_into = define_operation(
    "fp8_cast_into(Tensor matrix, Tensor scale, Tensor(a!)? amax, Tensor(b!) by_rows,"
    " Tensor(c!) by_columns, ScalarType dtype) -> ()",
    _run_into,
    lambda *_: None,
)
