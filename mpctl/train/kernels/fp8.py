"""Operands of a matrix product in fp8, with a scale a tensor that is a power of two.

fp8 has two formats (arXiv 2209.05433): e4m3 for inputs and weights (largest 448, 3 bits of
mantissa), e5m2 for gradients, which span more binades (largest 57344, 2 bits); Transformer Engine
and Megatron call that `hybrid`. A tensor is multiplied by a scale before it is cast, so that its
largest element comes close to the format's, and the product is divided by the scales of both of its
operands. What a cast would carry beyond the largest number becomes the largest number.

Scales are powers of two. The mantissa of a normal fp8 number then does not depend on the scale:
two scales cast an element to the same value, unless it lies so far below the largest one (2^-14 of
it in e4m3, 2^-29 in e5m2) that one of them makes it subnormal. So ranks that hold parts of a
tensor, or other micro batches of it, agree although each scales by what it has; and multiplying by
a scale, or by its inverse, rounds nothing.

Recipes, by Megatron's names (`--fp8-recipe`):

    tensorwise   the scale of the tensor at hand: one more pass over it (current scaling)
    delayed      the scale of the largest element of the last steps (train/layers/fp8.py)

Letters: m rows, n columns, k the contracted dimension.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
LARGEST_EXPONENT = {E4M3: 8, E5M2: 15}  # both are 1.75 x 2^exponent
_MANTISSA, _MANTISSA_OF_LARGEST = (1 << 23) - 1, 0x600000  # of float32: 1.75 is 0b1.11
_BIAS, _MOST = 127, 96  # of float32's exponents; scales stay within 2^-96 and 2^96


class Operand(IntEnum):
    """Operand of a linear layer: X, W or dY."""

    INPUT = 0
    WEIGHT = 1
    GRADIENT = 2

    @property
    def dtype(self) -> torch.dtype:
        """The format of fp8 that it is cast to."""
        return E5M2 if self is Operand.GRADIENT else E4M3


class Fp8Matrix(NamedTuple):
    """A matrix [m, n] in fp8: `values` times `inverse`, a float32 tensor of no dimensions."""

    values: Tensor
    inverse: Tensor


class Fp8Cast(NamedTuple):
    """A cast of a matrix [m, n]. by_rows: as it is; by_columns: transposed, [n, m], contiguous.
    What was not asked for is None."""

    by_rows: Tensor | None
    by_columns: Tensor | None


def power_of_two_scale(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest power of two that keeps elements up to `amax` within an fp8 dtype: float32 of
    any shape, at least 0 -> the same shape.

    Computed from the bits of float32, so that it is exact and the host waits for nothing. Zero,
    which says nothing of a tensor's size, gives 1.
    """
    return _scales(amax.to(torch.float32), LARGEST_EXPONENT[dtype])


def operand_scales(amax: Tensor, exponents: Tensor) -> Tensor:
    """`power_of_two_scale` of X, W and dY of n layers at once: [n, 3] in float32, in the order of
    Operand. exponents: `largest_exponents` on the same device."""
    return _scales(amax, exponents)


def largest_exponents(device: torch.device) -> Tensor:
    """The exponent of the largest number of each operand's format, int32 [3]."""
    exponents = [LARGEST_EXPONENT[which.dtype] for which in Operand]
    return torch.tensor(exponents, dtype=torch.int32, device=device)


def _scales(amax: Tensor, exponents: Tensor | int) -> Tensor:
    bits = amax.view(torch.int32)
    exponent = (bits >> 23) - _BIAS  # of the number's highest bit
    is_above = (bits & _MANTISSA) > _MANTISSA_OF_LARGEST
    power = (exponents - exponent - is_above.int()).clamp(-_MOST, _MOST)
    power = power.masked_fill(bits == 0, 0)
    return ((power + _BIAS) << 23).view(torch.float32)


def largest(tensor: Tensor) -> Tensor:
    """The largest absolute value of a tensor, of no dimensions, float32; NaN where one is NaN."""
    return torch.linalg.vector_norm(tensor, torch.inf).to(torch.float32)


def note_largest(tensor: Tensor, amax: Tensor) -> None:
    """Raise `amax`, float32 of no dimensions, to the tensor's largest absolute value."""
    torch.maximum(amax, largest(tensor), out=amax)


def cast_matrix(
    matrix: Tensor, scale: Tensor, dtype: torch.dtype, *, rows: bool = True, columns: bool = False
) -> Fp8Cast:
    """`matrix` [m, n] times `scale`, cast to an fp8 dtype with saturation: by rows, by columns or
    both. scale: a power of two, float32, of no dimensions."""
    scaled = matrix * scale.to(matrix.dtype)  # exact: a power of two
    values = scaled.clamp_(-LARGEST[dtype], LARGEST[dtype]).to(dtype)
    return Fp8Cast(values if rows else None, values.t().contiguous() if columns else None)


def scaled_product(a: Fp8Matrix, b: Fp8Matrix, *, out: torch.dtype, bias: Tensor | None = None, fast: bool) -> Tensor:
    """A B^T + bias in `out`, a 16-bit or 32-bit dtype: a [m, k], b [n, k] -> [m, n], summed in
    float32.

    fast: sum with fewer bits on a GPU, as is usual for the forward product (torch's
    use_fast_accum). On a CPU fp8 is multiplied in bf16, whose numbers include both formats.
    """
    if a.values.device.type != "cpu":
        return torch._scaled_mm(
            a.values, b.values.t(), scale_a=a.inverse, scale_b=b.inverse, bias=bias, out_dtype=out, use_fast_accum=fast
        )
    product = a.values.to(torch.bfloat16) @ b.values.to(torch.bfloat16).t()
    product = product.to(out).mul_((a.inverse * b.inverse).to(out))
    return product if bias is None else product.add_(bias)
