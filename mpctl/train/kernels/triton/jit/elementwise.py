"""Elementwise kernels: gated activations and the squared ReLU, dropout, rotary positions.

act is a name of train/kernels/activation.py; its derivative is computed with it, so that backward reads
its inputs once. (1 + tanh(u)) / 2 = 1 / (1 + exp(-2u)), which is exact at both ends.

Dropout works on tiles of [rows, width]. A row of the flat tensor is (sample, row) of [b, s, h], or
(sample, head, row) of [b, a, s, keys]. Its key is folded once, each of its elements costs one
`mix`. Results are rounded where the reference rounds: after the division by 1 - p, and after the
sum. Fused multiply-adds would round once, so that these kernels are launched without
(`enable_fp_fusion`).

Rotary positions: a program turns a tile of [positions, half] of one head and copies the columns
that are not turned; products are rounded before they are added, as torch's separate kernels do.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mpctl.train.kernels.triton.jit.bits import first_key, keeps, mix, position, rounded, scramble, wide


@triton.jit
def value_and_slope(x, act: tl.constexpr):
    """act(x) and its derivative, for x of float32 or float64."""
    if act == "silu":
        s = 1 / (1 + tl.exp(-x))
        return x * s, s * (1 + x * (1 - s))
    elif act == "gelu":
        cdf = 0.5 * (1 + tl.erf(x * 0.7071067811865476))
        density = 0.3989422804014327 * tl.exp(-0.5 * x * x)
        return x * cdf, cdf + x * density
    else:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        s = 1 / (1 + tl.exp(-2 * inner))
        slope = 2 * 0.7978845608028654 * (1 + 3 * 0.044715 * x * x)
        return x * s, s + x * s * (1 - s) * slope


@triton.jit
def gated_kernel(fused, out, stride, width, act: tl.constexpr, BLOCK: tl.constexpr):
    """out [n, width] = act(gate) up of fused [n, 2 width] = [gate | up]."""
    row = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = j < width
    gate = wide(tl.load(fused + row * stride + j, mask=inside, other=0.0))
    up = wide(tl.load(fused + row * stride + width + j, mask=inside, other=0.0))
    value, _ = value_and_slope(gate, act)
    dtype = out.dtype.element_ty
    # rounded as the result of a kernel of its own
    tl.store(out + row * width + j, rounded(wide(rounded(value, dtype)) * up, dtype), mask=inside)


@triton.jit
def gated_backward_kernel(fused, grad, out, stride, width, act: tl.constexpr, BLOCK: tl.constexpr):
    """out [n, 2 width]: the gradients of gate and up for that of the result, grad [n, width]."""
    row = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = j < width
    gate = wide(tl.load(fused + row * stride + j, mask=inside, other=0.0))
    up = wide(tl.load(fused + row * stride + width + j, mask=inside, other=0.0))
    g = wide(tl.load(grad + row * width + j, mask=inside, other=0.0))
    value, slope = value_and_slope(gate, act)
    dtype = out.dtype.element_ty
    tl.store(out + row * 2 * width + j, rounded(g * up * slope, dtype), mask=inside)
    tl.store(out + row * 2 * width + width + j, rounded(g * value, dtype), mask=inside)


@triton.jit
def squared_relu_kernel(x, out, count, BLOCK: tl.constexpr):
    """out = max(x, 0)^2, flat."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = wide(tl.load(x + i, mask=i < count, other=0.0))
    positive = tl.where(value > 0, value, value * 0)  # 0 of what is not a number stays so
    tl.store(out + i, rounded(positive * positive, out.dtype.element_ty), mask=i < count)


@triton.jit
def squared_relu_backward_kernel(x, grad, out, count, BLOCK: tl.constexpr):
    """out = 2 max(x, 0) grad, flat."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = wide(tl.load(x + i, mask=i < count, other=0.0))
    g = wide(tl.load(grad + i, mask=i < count, other=0.0))
    positive = tl.where(value > 0, value, value * 0)
    tl.store(out + i, rounded(2 * positive * g, out.dtype.element_ty), mask=i < count)


@triton.jit
def row_keys(key, number, samples, heads, head_start, head_step, rows, row_start, row_step, i, s, a):
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
    x,
    residual,
    out,
    kept,
    key,
    samples,
    heads,
    rows,
    columns,
    number,
    head_start,
    head_step,
    row_start,
    row_step,
    column_start,
    column_step,
    count,
    width,
    s,
    a: tl.constexpr,
    threshold: tl.constexpr,
    scale: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """out = dropout(x), plus residual unless that is None; kept: the mask. All [count, width]."""
    i = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    j = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    inside = (i < count)[:, None] & (j < width)[None, :]
    row = tl.minimum(i, count - 1)  # those beyond the end repeat the last one
    keys = row_keys(key, number, samples, heads, head_start, head_step, rows, row_start, row_step, row, s, a)
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
def dropout_backward_kernel(grad, kept, out, count, scale: tl.constexpr, BLOCK: tl.constexpr):
    """out = grad / (1 - p) where kept, else 0; all flat, of `count` elements."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    value = tl.load(grad + i, mask=inside, other=0.0)
    keep = tl.load(kept + i, mask=inside, other=0)
    scaled = wide(rounded(wide(value) * scale, value.dtype))
    tl.store(out + i, rounded(scaled * keep.to(scaled.dtype), value.dtype), mask=inside)


@triton.jit
def rotate_kernel(
    x,
    cos,
    sin,
    out,
    x_batch,
    x_head,
    x_row,
    out_batch,
    out_head,
    out_row,
    table_batch,
    s,
    half: tl.constexpr,
    rest: tl.constexpr,
    is_back: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
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
