"""The operands of one linear layer's three products, cast to fp8.

    forward   Y = X W^T      X and W in e4m3
    dX        dX = dY W      dY in e5m2, W in e4m3
    dW        dW = dY^T X    dY in e5m2, X in e4m3

Tensor cores multiply fp8 along the last dimension of both operands (cuBLASLt's TN), so that a
backward needs W, and for dW also X and dY, transposed: each is cast both ways where it is read both
ways. Where the layer is bound to a table of scales (fp8_scales.py), an operand is scaled by what
the steps before had as their largest element, and its own is noted; else by its own.

By hand, X = [3, -1], not bound: the scale is 128, the values 384 and -128, the inverse 1/128.

Letters: m rows, n columns.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mpctl.kernels.backend import TORCH_BACKEND, KernelBackend
from mpctl.kernels.fp8 import Fp8Cast, Fp8Matrix, Operand, largest, power_of_two_scale


@dataclass(frozen=True)
class ScaleRow:
    """A layer's part of a table of scales: float32 [3] each, in the order of Operand.

    scales, inverses: what operands are multiplied by, and 1 over it; None before a step has been
    seen. amax: the largest elements of the step under way, raised by every cast that is noted.
    """

    amax: Tensor
    scales: Tensor | None = None
    inverses: Tensor | None = None


class Fp8Operands:
    """Casts the operands of a linear layer. backend: computes casts and products. row: this layer's
    part of a table of scales; None to scale each tensor by its own largest element."""

    def __init__(self, backend: KernelBackend = TORCH_BACKEND) -> None:
        self.backend = backend
        self.row: ScaleRow | None = None

    def by_rows(self, which: Operand, matrix: Tensor, *, noted: bool) -> Fp8Matrix:
        """A matrix [m, n] in fp8. noted: its largest element counts for the steps to come."""
        scale, inverse = self._scale(which, matrix)
        cast = self._cast(which, matrix, scale, noted=noted)
        assert cast.by_rows is not None
        return Fp8Matrix(cast.by_rows, inverse)

    def by_columns(self, which: Operand, matrix: Tensor) -> Fp8Matrix:
        """A matrix [m, n] that was noted before, in fp8 and transposed: [n, m]."""
        scale, inverse = self._scale(which, matrix)
        cast = self._cast(which, matrix, scale, rows=False, columns=True)
        assert cast.by_columns is not None
        return Fp8Matrix(cast.by_columns, inverse)

    def both_ways(
        self, which: Operand, matrix: Tensor, *, noted: bool
    ) -> tuple[Fp8Matrix, Fp8Matrix]:
        """A matrix [m, n] in fp8, as it is and transposed [n, m]; noted: as of `by_rows`."""
        scale, inverse = self._scale(which, matrix)
        cast = self._cast(which, matrix, scale, columns=True, noted=noted)
        assert cast.by_rows is not None and cast.by_columns is not None
        return Fp8Matrix(cast.by_rows, inverse), Fp8Matrix(cast.by_columns, inverse)

    def _scale(self, which: Operand, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """What to multiply by, and its inverse."""
        row = self.row
        if row is not None and row.scales is not None and row.inverses is not None:
            return row.scales[which], row.inverses[which]
        scale = power_of_two_scale(largest(matrix), which.dtype)
        return scale, scale.reciprocal()  # exact: a power of two

    def _cast(
        self, which: Operand, matrix: Tensor, scale: Tensor, *, rows: bool = True,
        columns: bool = False, noted: bool = False,
    ) -> Fp8Cast:  # fmt: skip
        amax = self.row.amax[which] if self.row is not None and noted else None
        return self.backend.fp8_cast(
            matrix, scale, which.dtype, rows=rows, columns=columns, amax=amax
        )
