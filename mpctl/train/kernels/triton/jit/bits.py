"""Bits inside a kernel: the types that it computes in, their rounding, and the hash of dropout.

Numbers are computed in float32, in float64 for float64, and rounded to nearest, ties to even, once
for each operation of torch that the kernel stands for. A device rounds so by itself. Triton's
interpreter cuts the low bits of bfloat16 off, so that there the rounding is done in integers.

The hash is counter_rng.py's on uint32, whose shifts are logical: fold(k, c) = mix(k ^ scramble(c)),
scramble(c) = mix(odd * c + odd'). What a column scrambles to is the same in each row, so that a
tile computes it once a column. `keeps` is counter_rng.keep_mask.
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


_GOLDEN = tl.constexpr(0x9E3779B1)
_M1 = tl.constexpr(0x7FEB352D)
_M2 = tl.constexpr(0x846CA68B)


@triton.jit
def mix(x):
    """Three xorshifts and two multiplications of uint32 numbers."""
    x = x ^ (x >> 16)
    x = x * _M1
    x = x ^ (x >> 15)
    x = x * _M2
    return x ^ (x >> 16)


@triton.jit
def scramble(coordinates):
    """Return the contribution of a coordinate to every key: uint32, of integers modulo 2^32."""
    return mix(coordinates.to(tl.uint32) * _GOLDEN + _M1)


@triton.jit
def position(numbers, start, step, i, inside):
    """Global number of place i: numbers[i], or start + step i where `numbers` is None; any where
    not `inside`."""
    if numbers is None:
        return start + step * i
    else:
        return tl.load(numbers + i, mask=inside, other=0)


@triton.jit
def first_key(key, number):
    """The key of a mask, uint32: an element of a tensor, or `number` where that is None."""
    if key is None:
        return number.to(tl.uint32)
    else:
        return tl.load(key).to(tl.uint32)


@triton.jit
def keeps(keys, scrambled, threshold):
    """Whether the elements are kept of rows' keys and of columns' scrambled numbers, which
    broadcast against each other: mix(keys ^ scrambled) >= threshold, without its first xorshift in
    each element, and with one operation for its last (counter_rng.py). threshold: p 2^32 - 2^31,
    rounded."""
    x = (keys ^ (keys >> 16)) ^ (scrambled ^ (scrambled >> 16))
    x = x * _M1
    x = (x ^ (x >> 15)) * _M2
    x = x.to(tl.int32, bitcast=True) ^ ((threshold >> 16) & 0xFFFF)
    return x >= threshold
