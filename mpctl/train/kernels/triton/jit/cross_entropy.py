"""The three passes of a cross entropy over rows of logits, one program a row.

A row is read in blocks of columns; sums are kept a column of the block and added at the end. The
first `words` of `width` columns count; all are read, 16 bytes at a time where `width` allows, as of
50,257 words in 50,304 columns. The laws are those of cross_entropy.py: p peak, e exp(z - p).
"""

from __future__ import annotations

import triton
import triton.language as tl

from mpctl.train.kernels.triton.jit.bits import rounded, wide


@triton.jit
def row_maximum_kernel(logits, out, stride, words, width, BLOCK: tl.constexpr):
    """out [n]: the largest number of each row."""
    row = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, BLOCK)
    most = tl.full((BLOCK,), float("-inf"), out.dtype.element_ty)
    for start in range(0, words, BLOCK):
        z = tl.load(logits + row * stride + start + j, mask=start + j < width, other=float("-inf"))
        most = tl.maximum(most, tl.where(start + j < words, wide(z), float("-inf")))
    tl.store(out + row, tl.max(most, axis=0))


@triton.jit
def own_sums_kernel(logits, column, peak, target, total, stride, words, width, BLOCK: tl.constexpr):
    """total [n]: sum of e; target [n]: z_column - p, 0 where column is -1."""
    row = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, BLOCK)
    p, own = tl.load(peak + row), tl.load(column + row)
    exponentials = tl.zeros((BLOCK,), total.dtype.element_ty)
    for start in range(0, words, BLOCK):
        z = wide(tl.load(logits + row * stride + start + j, mask=start + j < width, other=0.0)) - p
        exponentials += tl.where(start + j < words, tl.exp(z), 0.0)
    z = wide(tl.load(logits + row * stride + tl.maximum(own, 0))) - p
    tl.store(target + row, tl.where(own >= 0, z, 0.0))
    tl.store(total + row, tl.sum(exponentials, axis=0))


@triton.jit
def logits_gradient_kernel(
    logits, column, peak, share, hit, out, stride, out_stride, words, width, BLOCK: tl.constexpr
):
    """out: e share, plus hit in the row's own column; 0 behind the words, to `width`. out may be
    the logits."""
    row = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    z = wide(tl.load(logits + row * stride + j, mask=j < width, other=0.0))
    result = tl.exp(z - tl.load(peak + row)) * tl.load(share + row)
    result = result + tl.where(j == tl.load(column + row), tl.load(hit + row), 0.0)
    result = tl.where(j < words, result, 0.0)
    tl.store(out + row * out_stride + j, rounded(result, out.dtype.element_ty), mask=j < width)
