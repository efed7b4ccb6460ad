"""Rotary positions: pairs of a head's columns turned by a table of cosines and sines.

A program turns a tile of [positions, half] of one head and copies the columns that are not turned.
The products are rounded before they are added, as torch's separate kernels round them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mpctl.kernels.triton.jit.rounding import rounded, wide


@triton.jit
def rotate_kernel(
    x, cos, sin, out, x_batch, x_head, x_row, out_batch, out_head, out_row, table_batch, s,
    half: tl.constexpr, rest: tl.constexpr, is_back: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """out [b, a, s, d] of x by a table [s, half], or [b, s, half] where table_batch is not 0; back
    where `is_back`. Strides are in elements, the last is 1."""
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    j = tl.arange(0, BLOCK_HALF)
    inside = (row < s)[:, None] & (j < half)[None, :]
    rows = row[:, None].to(tl.int64)
    angle = batch * table_batch + rows * half + j[None, :]
    c = tl.load(cos + angle, mask=inside, other=0.0)
    d = tl.load(sin + angle, mask=inside, other=0.0)
    if is_back:
        d = -d
    source = x + batch * x_batch + head * x_head + rows * x_row
    target = out + batch * out_batch + head * out_head + rows * out_row
    low = wide(tl.load(source + j[None, :], mask=inside, other=0.0))
    high = wide(tl.load(source + half + j[None, :], mask=inside, other=0.0))
    dtype = out.dtype.element_ty
    tl.store(target + j[None, :], rounded(low * c - high * d, dtype), mask=inside)
    tl.store(target + half + j[None, :], rounded(high * c + low * d, dtype), mask=inside)
    if rest > 0:
        k = 2 * half + tl.arange(0, BLOCK_REST)[None, :]
        behind = (row < s)[:, None] & (k < 2 * half + rest)
        tl.store(target + k, tl.load(source + k, mask=behind, other=0.0), mask=behind)
