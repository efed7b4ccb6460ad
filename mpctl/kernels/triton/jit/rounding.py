"""Types inside a kernel: computed in float32, in float64 for float64; rounded to nearest, ties to
even, once for each operation of torch that the kernel stands for.

A device rounds so by itself. Triton's interpreter cuts the low bits of bfloat16 off, so that there
the rounding is done in integers. By hand, 1 + 2^-8 is a tie between 1 and 1 + 2^-7: it becomes 1.
"""

from __future__ import annotations

import triton
import triton.language as tl

IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def wide(x):
    """A block in the type that torch computes in: float64 for float64, else float32."""
    if x.dtype == tl.float64:
        return x
    else:
        return x.to(tl.float32)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """A block of `wide` numbers in the type in which it is stored."""
    if IS_INTERPRETED and dtype == tl.bfloat16 and x.dtype == tl.float32:
        bits = x.to(tl.uint32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        nearest = tl.where(x != x, 0x7FC0, nearest)
        return nearest.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)
