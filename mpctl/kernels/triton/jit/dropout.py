"""Dropout, and dropout with a residual, on tiles of [rows, width]; and its backward.

A row of the flat tensor is (sample, row) of [b, s, h], or (sample, head, row) of [b, a, s, keys].
Its key is folded once, each of its elements costs one `mix`. The results are rounded where the
reference rounds: after the division by 1 - p, and after the sum. Fused multiply-adds would round
once, so that these kernels are launched without (`enable_fp_fusion`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from mpctl.kernels.triton.jit.hashing import first_key, keeps, mix, position, scramble
from mpctl.kernels.triton.jit.rounding import rounded, wide


@triton.jit
def row_keys(
    key, number, samples, heads, head_start, head_step, rows, row_start, row_step, i, s, a,
):  # fmt: skip
    """The keys of flat rows i, uint32: those of (sample, row), or of (sample, head, row) where
    a > 0, of s rows a sample or a head."""
    outer = i // s
    sample = outer
    if a > 0:
        sample = outer // a
    keys = mix(first_key(key, number) ^ scramble(tl.load(samples + sample)))
    if a > 0:
        keys = mix(keys ^ scramble(position(heads, head_start, head_step, outer % a, True)))
    return mix(keys ^ scramble(position(rows, row_start, row_step, i % s, True)))


@triton.jit(do_not_specialize=["number", "head_start", "row_start", "column_start"])
def dropout_kernel(
    x, residual, out, kept, key, number, samples, heads, head_start, head_step,
    rows, row_start, row_step, columns, column_start, column_step, count, width, s,
    a: tl.constexpr, threshold: tl.constexpr, scale: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """out = dropout(x), plus residual unless that is None; kept: the mask. All [count, width]."""
    i = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    j = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    inside = (i < count)[:, None] & (j < width)[None, :]
    row = tl.minimum(i, count - 1)  # those beyond the end repeat the last one
    keys = row_keys(
        key, number, samples, heads, head_start, head_step, rows, row_start, row_step, row, s, a
    )
    scrambled = scramble(position(columns, column_start, column_step, j, j < width))
    keep = keeps(keys[:, None], scrambled[None, :], threshold)
    at = row[:, None].to(tl.int64) * width + j[None, :]
    value = tl.load(x + at, mask=inside, other=0.0)
    big = wide(value)
    result = rounded(big * keep.to(big.dtype) * scale, value.dtype)
    if residual is not None:
        result = wide(tl.load(residual + at, mask=inside, other=0.0)) + wide(result)
    tl.store(out + at, rounded(result, out.dtype.element_ty), mask=inside)
    tl.store(kept + at, keep, mask=inside)


@triton.jit
def dropout_backward_kernel(
    grad, kept, out, count, scale: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """out = grad / (1 - p) where kept, else 0; all flat, of `count` elements."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    value = tl.load(grad + i, mask=inside, other=0.0)
    keep = tl.load(kept + i, mask=inside, other=0)
    scaled = wide(rounded(wide(value) * scale, value.dtype))
    tl.store(out + i, rounded(scaled * keep.to(scaled.dtype), value.dtype), mask=inside)
