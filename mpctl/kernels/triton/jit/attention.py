"""Attention forward, block by block: FlashAttention-2 (Dao, arXiv 2307.08691, algorithm 1) with
dropout whose mask is computed where it is used.

A program has BLOCK_Q rows of one head and meets the keys in blocks. It holds each row's maximum m,
sum l of 2^(s - m), and the sum of values weighted so; where a block raises m, the two are scaled by
2^(m_old - m_new). The sum l counts what dropout leaves out. Blocks that all rows see whole come
first, without a test of each pair.

By hand, scores 0 and 1 in two blocks of one key: m 0, l 1; then m 1, l 1 * 2^-1 + 1 = 1.5.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mpctl.kernels.triton.jit.attention_tile import (
    block_of,
    counted,
    drop,
    end_of_keys,
    end_of_whole_blocks,
    first_key_seen,
    product,
    row_keys,
    store_block,
)
from mpctl.kernels.triton.jit.rounding import rounded


@triton.jit
def meet(
    at, q, kept, highest, total, result, key, key_strides, value, value_strides,
    variant, rng, sample, head, i, queries, keys,
    GROUP: tl.constexpr, SCALE: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    THRESHOLD: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Each row's maximum, sum and weighted values with those of the block of keys from `at` on."""
    j = at + tl.arange(0, BLOCK_K)
    k = block_of(key, key_strides, sample, head // GROUP, j, keys, D, BLOCK_D)
    v = block_of(value, value_strides, sample, head // GROUP, j, keys, D, BLOCK_D)
    products = product(q, tl.trans(k), PRECISION, WIDE)
    scores = counted(products, variant, sample, head, i[:, None], j[None, :], queries, keys,
                     SCALE, CAUSAL, WINDOW, WHOLE)  # fmt: skip
    raised = tl.maximum(highest, tl.max(scores, 1))
    finite = tl.where(raised == float("-inf"), 0.0, raised)
    shares, shrunk = tl.exp2(scores - finite[:, None]), tl.exp2(highest - finite)
    total = total * shrunk + tl.sum(shares, 1)
    if rng is not None:
        shares = drop(shares, kept[:, None], j[None, :], THRESHOLD)
    result = result * shrunk[:, None]
    result += product(rounded(shares, v.dtype), v, PRECISION, WIDE)
    return raised, total, result


@triton.jit
def attention_kernel(
    query, query_strides, key, key_strides, value, value_strides, out, out_strides, sums,
    variant, rng, heads, queries, keys,
    GROUP: tl.constexpr, SCALE: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    THRESHOLD: tl.constexpr, KEEP_SCALE: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out [b, a, q, d] and sums [b, a, q] (attention_tile.py) of one block of queries.

    GROUP: queries' heads a key-value head. THRESHOLD, KEEP_SCALE: of dropout, p 2^32 - 2^31 and
    1 / (1 - p). WIDE: the type of sums. PRECISION: of float32 products.
    """
    # causal: the last blocks, which meet the most keys, start first
    block, plane = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    sample, head = plane // heads, plane % heads
    i = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    q = block_of(query, query_strides, sample, head, i, queries, D, BLOCK_D)
    highest = tl.full([BLOCK_Q], float("-inf"), dtype=WIDE)
    total = tl.zeros([BLOCK_Q], dtype=WIDE)
    result = tl.zeros([BLOCK_Q, BLOCK_D], dtype=WIDE)
    kept = None
    if rng is not None:
        kept = row_keys(rng, variant, sample, head, i)
    first_row = variant[5] + block * BLOCK_Q
    whole = end_of_whole_blocks(first_row, keys, BLOCK_K, CAUSAL, WINDOW)
    start = tl.maximum(first_key_seen(first_row, BLOCK_K, CAUSAL, WINDOW), whole)
    for at in range(0, whole, BLOCK_K):
        highest, total, result = meet(
            at, q, kept, highest, total, result, key, key_strides, value, value_strides,
            variant, rng, sample, head, i, queries, keys,
            GROUP, SCALE, CAUSAL, WINDOW, THRESHOLD, WIDE, PRECISION, D, BLOCK_D, BLOCK_K, True,
        )  # fmt: skip
    for at in range(start, end_of_keys(first_row + BLOCK_Q - 1, keys, CAUSAL), BLOCK_K):
        highest, total, result = meet(
            at, q, kept, highest, total, result, key, key_strides, value, value_strides,
            variant, rng, sample, head, i, queries, keys,
            GROUP, SCALE, CAUSAL, WINDOW, THRESHOLD, WIDE, PRECISION, D, BLOCK_D, BLOCK_K, False,
        )  # fmt: skip
    is_empty = total == 0.0
    result = result * (KEEP_SCALE / tl.where(is_empty, 1.0, total))[:, None]
    result = rounded(result, out.dtype.element_ty)
    store_block(out, out_strides, sample, head, i, queries, result, D, BLOCK_D)
    log = tl.where(is_empty, float("inf"), highest + tl.log2(tl.where(is_empty, 1.0, total)))
    tl.store(sums + plane.to(tl.int64) * queries + i, log, mask=i < queries)
