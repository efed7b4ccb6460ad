"""A tile of attention's scores, as every kernel of attention makes it: forward, both of backward,
and the bias's gradient.

Scores are kept in base 2, since a device has exp2 in hardware: s log2(e), of which 2^(s - sums) is
the softmax, `sums` being each row's log2 of the sum of 2^s. What does not count is -infinity; a row
of which nothing counts has the sum +infinity, so that its shares are 0 in backward too.

Three tuples come from the host. variant: (mask, strides of mask, bias, strides of bias, slopes,
row_start), strides by sample, head, query and key, those of a dimension that is shared being 0;
None where there is none. rng: (key, number, samples, head_start), or None without dropout. A kernel
numbers rows `i` and keys `j` of the tensors that it was given; row_start + i and j are their global
positions.

By hand, causal, row_start 2, i 0: keys j 0, 1, 2 count.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mpctl.kernels.triton.jit.hashing import first_key, keeps, mix, scramble
from mpctl.kernels.triton.jit.rounding import IS_INTERPRETED, wide

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def block_of(
    tensor, strides, sample, head, places, limit, width: tl.constexpr, WIDTH: tl.constexpr
):
    """Rows `places` of one sample and head, [len(places), WIDTH]; 0 beyond `limit` and `width`.
    strides: by sample, head and row; columns lie side by side."""
    base = sample.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]
    columns = tl.arange(0, WIDTH)
    at = base + places[:, None].to(tl.int64) * strides[2] + columns[None, :]
    inside = (places < limit)[:, None]
    if width != WIDTH:
        inside = inside & (columns < width)[None, :]
    return tl.load(tensor + at, mask=inside, other=0.0)


@triton.jit
def store_block(
    tensor, strides, sample, head, places, limit, block, width: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Write what `block_of` would read."""
    base = sample.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]
    columns = tl.arange(0, WIDTH)
    at = base + places[:, None].to(tl.int64) * strides[2] + columns[None, :]
    inside = (places < limit)[:, None] & (columns < width)[None, :]
    tl.store(tensor + at, block, mask=inside)


@triton.jit
def product(a, b, PRECISION: tl.constexpr, WIDE: tl.constexpr):
    """a b, summed in WIDE. PRECISION: of float32 operands, ieee or tf32. The interpreter takes the
    bits of bfloat16 for integers: there they are widened first, which changes no product."""
    if IS_INTERPRETED and a.dtype == tl.bfloat16:
        return tl.dot(wide(a), wide(b), input_precision=PRECISION, out_dtype=WIDE)
    else:
        return tl.dot(a, b, input_precision=PRECISION, out_dtype=WIDE)


@triton.jit
def pairs_at(strides, sample, head, i, j):
    """Where the element of a pair lies in a mask or a bias. i, j broadcast against each other."""
    base = sample.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]
    return base + i.to(tl.int64) * strides[2] + j.to(tl.int64) * strides[3]


@triton.jit
def counted(
    products, variant, sample, head, i, j, queries, keys,
    SCALE: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Scores in base 2 of the products Q K^T of rows i and keys j, which broadcast against each
    other; -infinity where a pair does not count. WINDOW 0 is none. WHOLE: every row of the tile
    sees every key of it, but for what the mask says. Rows beyond the last one have any number."""
    mask, mask_strides, bias, bias_strides, slopes, row_start = variant
    rows = row_start + i
    scores = products * (SCALE * LOG2E)
    if slopes is not None:
        slope = tl.load(slopes + head).to(products.dtype) * LOG2E
        scores += slope * (j - rows).to(products.dtype)
    if bias is not None:
        inside, at = (i < queries) & (j < keys), pairs_at(bias_strides, sample, head, i, j)
        scores += tl.load(bias + at, mask=inside, other=0.0).to(products.dtype) * LOG2E
    if mask is not None:
        inside, at = (i < queries) & (j < keys), pairs_at(mask_strides, sample, head, i, j)
        scores = tl.where(tl.load(mask + at, mask=inside, other=0) != 0, scores, float("-inf"))
    if not WHOLE:
        seen = j < keys
        if CAUSAL:
            seen = seen & (rows >= j)
            if WINDOW > 0:
                seen = seen & (j > rows - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
    return scores


@triton.jit
def row_keys(rng, variant, sample, head, i):
    """The keys of rows i of one sample and head, uint32, as counter_rng.keep_mask folds them."""
    key, number, samples, head_start = rng
    row_start = variant[5]
    folded = mix(first_key(key, number) ^ scramble(tl.load(samples + sample)))
    folded = mix(folded ^ scramble(head_start + head))
    return mix(folded ^ scramble(row_start + i))


@triton.jit
def drop(x, row_keys, j, THRESHOLD: tl.constexpr):
    """x where the rows' keys keep keys j, else 0; the three broadcast against each other."""
    return tl.where(keeps(row_keys, scramble(j), THRESHOLD), x, 0.0)


@triton.jit
def first_key_seen(row, BLOCK: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """The first key that a row at a global position may see, down to a multiple of BLOCK."""
    first = 0
    if CAUSAL and WINDOW > 0:
        first = tl.maximum(row - WINDOW + 1, 0) // BLOCK * BLOCK
    return first


@triton.jit
def end_of_keys(last_row, keys, CAUSAL: tl.constexpr):
    """Behind the last key that rows up to a global position may see."""
    if CAUSAL:
        return tl.minimum(keys, last_row + 1)
    else:
        return keys


@triton.jit
def end_of_whole_blocks(
    first_row, keys, BLOCK: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr
):  # fmt: skip
    """Behind the last whole block of keys that every row from a global position on sees; 0 with a
    window, whose rows see no two the same."""
    if WINDOW > 0:
        return 0
    elif CAUSAL:
        return tl.minimum(keys, first_row + 1) // BLOCK * BLOCK
    else:
        return keys // BLOCK * BLOCK
