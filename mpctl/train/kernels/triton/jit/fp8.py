"""A matrix cast to fp8 on tiles, written as it is and transposed, with its largest element.

A device rounds to nearest, ties to even, by one instruction. Triton's interpreter rounds wrongly
below the smallest normal number and where a carry reaches the exponent, so that there the codes are
made in integers: a normal number's are the upper bits of float32 rounded, a subnormal one's are
counts of the smallest number, which adding 2^23 in float32 rounds.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mpctl.train.kernels.triton.jit.bits import IS_INTERPRETED

NAN = tl.constexpr(0x7F)  # in both formats


@triton.jit
def fp8_codes(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """The codes, uint8, of float32 numbers within an fp8 format of so many bits of mantissa."""
    bits = x.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    lost: tl.constexpr = 23 - MANTISSA
    nearest = (size + ((1 << (lost - 1)) - 1) + ((size >> lost) & 1)) >> lost
    normal = nearest - ((127 - BIAS) << MANTISSA)
    smallest: tl.constexpr = 1 << (BIAS - 1 + MANTISSA)  # of them make 1
    counted = (tl.abs(x) * smallest + 8388608.0).to(tl.uint32, bitcast=True) - 0x4B000000
    is_normal = size >= ((128 - BIAS) << 23)
    code = tl.where(x != x, NAN, tl.where(is_normal, normal, counted))
    return (code | ((bits >> 31) << 7)).to(tl.uint8)


@triton.jit
def as_fp8(x, dtype: tl.constexpr):
    """Float32 numbers within the range of an fp8 dtype, cast to it."""
    if IS_INTERPRETED:
        if dtype == tl.float8e5:
            return fp8_codes(x, 2, 15).to(dtype, bitcast=True)
        else:
            return fp8_codes(x, 3, 7).to(dtype, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def fp8_cast_kernel(
    x,
    scale,
    rows,
    columns,
    amax,
    count,
    width,
    LARGEST: tl.constexpr,
    dtype: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """rows [count, width] and columns [width, count] = x * scale within +-LARGEST; amax: raised to
    the largest absolute value, to infinity by a NaN. What is None is left out."""
    i = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    j = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    inside = (i < count)[:, None] & (j < width)[None, :]
    at = i[:, None].to(tl.int64) * width + j[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if amax is not None:
        size = tl.where(value != value, float("inf"), tl.abs(value))
        tl.atomic_max(amax, tl.max(size))
    scaled = tl.maximum(value * tl.load(scale), -LARGEST, propagate_nan=tl.PropagateNan.ALL)
    cast = as_fp8(tl.minimum(scaled, LARGEST, propagate_nan=tl.PropagateNan.ALL), dtype)
    if rows is not None:
        tl.store(rows + at, cast, mask=inside)
    if columns is not None:
        there = j[:, None].to(tl.int64) * count + i[None, :]
        tl.store(columns + there, tl.trans(cast), mask=tl.trans(inside))
