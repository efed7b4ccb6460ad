"""Kernels that read a gradient and leave its sums over rows behind: a bias's gradient.

A program has a block of rows and of columns. It writes what it computes of them, and the sums of
the columns over its rows, float32 [blocks of rows, columns]; `column_sums_kernel` adds those, in
the order of the rows. Blocks depend on the shape alone, so that a sum has the same bits on every
device.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mpctl.train.kernels.triton.jit.bits import rounded, wide
from mpctl.train.kernels.triton.jit.elementwise import value_and_slope


@triton.jit
def column_sums_kernel(partial, out, count, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """out [width]: the sums of partial [count, width] over its rows."""
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([ROWS, BLOCK], dtype=partial.dtype.element_ty)
    for start in range(0, count, ROWS):
        i = start + tl.arange(0, ROWS)
        inside = (i < count)[:, None] & (j < width)[None, :]
        at = i[:, None].to(tl.int64) * width + j[None, :]
        total += tl.load(partial + at, mask=inside, other=0.0)
    tl.store(out + j, rounded(tl.sum(total, axis=0), out.dtype.element_ty), mask=j < width)


@triton.jit
def activation_backward_kernel(
    x, grad, out, partial, count, width, rows, act: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """out = grad act'(x), [count, width], and the sums of a block of `rows` of them."""
    block = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([ROWS, BLOCK], dtype=partial.dtype.element_ty)
    for start in range(0, rows, ROWS):
        i = block * rows + start + tl.arange(0, ROWS)
        inside = ((i < count) & (start + tl.arange(0, ROWS) < rows))[:, None] & (j < width)[None, :]
        at = i[:, None] * width + j[None, :]
        _, slope = value_and_slope(wide(tl.load(x + at, mask=inside, other=0.0)), act)
        result = rounded(slope * wide(tl.load(grad + at, mask=inside, other=0.0)), out.dtype.element_ty)
        tl.store(out + at, result, mask=inside)
        total += wide(result)
    tl.store(partial + block * width + j, tl.sum(total, axis=0), mask=j < width)


@triton.jit
def dropout_sums_kernel(
    grad, kept, out, partial, count, width, rows, scale: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """out = grad / (1 - p) where kept, else 0, as elementwise.py's, and the sums of a block of
    `rows` of them."""
    block = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([ROWS, BLOCK], dtype=partial.dtype.element_ty)
    for start in range(0, rows, ROWS):
        i = block * rows + start + tl.arange(0, ROWS)
        inside = ((i < count) & (start + tl.arange(0, ROWS) < rows))[:, None] & (j < width)[None, :]
        at = i[:, None] * width + j[None, :]
        value = tl.load(grad + at, mask=inside, other=0.0)
        keep = tl.load(kept + at, mask=inside, other=0)
        scaled = wide(rounded(wide(value) * scale, value.dtype))
        result = rounded(scaled * keep.to(scaled.dtype), value.dtype)
        tl.store(out + at, result, mask=inside)
        total += wide(result)
    tl.store(partial + block * width + j, tl.sum(total, axis=0), mask=j < width)


@triton.jit
def join_kernel(
    first, second, third, out, partial, strides, sizes, count, rows, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """out [count, widths] = [first | second | third], of [b, n, s, d] by (batch, head, row), whose
    columns are heads by d, and the sums of a block of `rows` of them. sizes: s, d and the end of
    each one's columns."""
    s, d, end1, end2, width = sizes
    block = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([ROWS, BLOCK], dtype=partial.dtype.element_ty)
    for start in range(0, rows, ROWS):
        i = block * rows + start + tl.arange(0, ROWS)
        inside = ((i < count) & (start + tl.arange(0, ROWS) < rows))[:, None] & (j < width)[None, :]
        value = part(first, strides[0], i, j, inside & (j < end1)[None, :], s, d)
        is_second = inside & ((j >= end1) & (j < end2))[None, :]
        value += part(second, strides[1], i, j - end1, is_second, s, d)
        value += part(third, strides[2], i, j - end2, inside & (j >= end2)[None, :], s, d)
        tl.store(out + i[:, None] * width + j[None, :], rounded(value, out.dtype.element_ty), mask=inside)
        total += value
    tl.store(partial + block * width + j, tl.sum(total, axis=0), mask=j < width)


@triton.jit
def part(x, strides, i, j, inside, s, d):
    """Flat rows i and columns j of x [b, n, s, d], 0 outside."""
    batch, head, row = strides
    rows = (i // s) * batch + (i % s) * row
    return wide(tl.load(x + rows[:, None] + ((j // d).to(tl.int64) * head + j % d)[None, :], mask=inside, other=0.0))
