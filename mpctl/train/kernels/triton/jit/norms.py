"""LayerNorm and RMSNorm of a residual sum, and their gradients with that of the residual stream.

A program has rows as a whole, one after the other. With u the normalised row, g = dY weight and the
means over columns: dX = (g - mean(g) - u mean(g u)) / deviation, without mean(g) for RMSNorm (arXiv
1607.06450; 1910.07467, equation 4). Sums of dY u and dY over its rows, the gradients of weight and
bias, stay in registers; columns.py adds those of the programs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mpctl.train.kernels.triton.jit.bits import rounded, wide


@triton.jit
def norm_kernel(x, branch, total, weight, bias, out, mean, inverse, width, eps: tl.constexpr, BLOCK: tl.constexpr):
    """out [n, width]: the norm of x, or of total = x + branch unless branch is None, which is
    rounded first. mean: None for RMSNorm; inverse: 1 / deviation of each row."""
    row = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, BLOCK)
    inside = j < width
    at = row * width + j
    value = wide(tl.load(x + at, mask=inside, other=0.0))
    if branch is not None:
        value = value + wide(tl.load(branch + at, mask=inside, other=0.0))
        stored = rounded(value, total.dtype.element_ty)
        tl.store(total + at, stored, mask=inside)
        value = wide(stored)
    if mean is not None:
        average = tl.sum(value, axis=0) / width
        tl.store(mean + row, average)
        value = tl.where(inside, value - average, 0.0)
    scale = 1 / tl.sqrt(tl.sum(value * value, axis=0) / width + eps)
    tl.store(inverse + row, scale)
    value = value * scale * wide(tl.load(weight + j, mask=inside, other=0.0))
    if bias is not None:
        value += wide(tl.load(bias + j, mask=inside, other=0.0))
    tl.store(out + at, rounded(value, out.dtype.element_ty), mask=inside)


@triton.jit
def norm_backward_kernel(
    grad,
    residual,
    x,
    weight,
    mean,
    inverse,
    out,
    partial,
    count,
    width,
    rows,
    HAS_BIAS: tl.constexpr,
    HAS_BRANCH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out [count, width]: dX plus `residual` unless that is None. mean: None for RMSNorm. rows: of
    a program. partial [programs, sums x width]: sums for the weight, the bias, and of `out`, the
    gradient of the bias of a branch."""
    program = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, BLOCK)
    inside = j < width
    dtype = partial.dtype.element_ty
    of_weight = tl.zeros([BLOCK], dtype=dtype)
    of_bias = tl.zeros([BLOCK], dtype=dtype)
    of_branch = tl.zeros([BLOCK], dtype=dtype)
    for row in range(program * rows, tl.minimum((program + 1) * rows, count)):
        at = row * width + j
        g = wide(tl.load(grad + at, mask=inside, other=0.0))
        u = wide(tl.load(x + at, mask=inside, other=0.0))
        scale = tl.load(inverse + row)
        if mean is not None:
            u = tl.where(inside, u - tl.load(mean + row), 0.0)
        u = u * scale
        of_weight += g * u
        if HAS_BIAS:
            of_bias += g
        g = g * wide(tl.load(weight + j, mask=inside, other=0.0))
        result = g - u * (tl.sum(g * u, axis=0) / width)
        if mean is not None:
            result -= tl.sum(g, axis=0) / width
        result = result * scale
        if residual is not None:
            result += wide(tl.load(residual + at, mask=inside, other=0.0))
        result = rounded(result, out.dtype.element_ty)
        tl.store(out + at, result, mask=inside)
        if HAS_BRANCH:
            of_branch += tl.where(inside, wide(result), 0.0)
    sums = partial + program * (1 + HAS_BIAS + HAS_BRANCH) * width + j
    tl.store(sums, of_weight, mask=inside)
    if HAS_BIAS:
        tl.store(sums + width, of_bias, mask=inside)
    if HAS_BRANCH:
        tl.store(sums + (1 + HAS_BIAS) * width, of_branch, mask=inside)
