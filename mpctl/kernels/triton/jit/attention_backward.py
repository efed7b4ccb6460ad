"""Attention backward, block by block (Dao, arXiv 2307.08691, algorithm 2); shares and dropout mask
are computed again from Q, K and the rows' sums.

With P the softmax, D the dropout mask times 1 / (1 - p), O = (D P) V, and dP = D (dO V^T):

    dV = (D P)^T dO    dS = P (dP - rows' sum of dO O)    dQ = scale dS K    dK = scale dS^T Q

One kernel has rows and makes dQ, another keys and makes dK and dV of a key-value head over all
heads that share it, a third, where a learned bias asks for it, pairs, and sums dS over the samples
and heads that the bias is shared by. Nothing is added by several programs: results do not depend on
the order in which they run.

By hand, one row and one key: P = 1, dP = dO O, so that dS = 0.
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
    pairs_at,
    product,
    row_keys,
    store_block,
)
from mpctl.kernels.triton.jit.rounding import rounded, wide


@triton.jit
def meet_keys(
    at, q, do, log, delta, kept, result, key, key_strides, value, value_strides,
    variant, rng, sample, head, i, queries, keys,
    GROUP: tl.constexpr, SCALE: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    THRESHOLD: tl.constexpr, KEEP_SCALE: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """dQ / scale with the part of the block of keys from `at` on."""
    j = at + tl.arange(0, BLOCK_K)
    k = block_of(key, key_strides, sample, head // GROUP, j, keys, D, BLOCK_D)
    v = block_of(value, value_strides, sample, head // GROUP, j, keys, D, BLOCK_D)
    products = product(q, tl.trans(k), PRECISION, WIDE)
    scores = counted(products, variant, sample, head, i[:, None], j[None, :], queries, keys,
                     SCALE, CAUSAL, WINDOW, WHOLE)  # fmt: skip
    dshares = product(do, tl.trans(v), PRECISION, WIDE)
    if rng is not None:
        dshares = drop(dshares * KEEP_SCALE, kept[:, None], j[None, :], THRESHOLD)
    dscores = tl.exp2(scores - log[:, None]) * (dshares - delta[:, None])
    return result + product(rounded(dscores, k.dtype), k, PRECISION, WIDE)


@triton.jit
def query_gradient_kernel(
    query, query_strides, key, key_strides, value, value_strides, out, out_strides,
    grad, grad_strides, dquery, dquery_strides, sums, deltas, variant, rng, heads, queries, keys,
    GROUP: tl.constexpr, SCALE: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    THRESHOLD: tl.constexpr, KEEP_SCALE: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """dQ of one block of queries, and `deltas` [b, a, q], the rows' sums of dO O, for the
    others."""
    block, plane = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    sample, head = plane // heads, plane % heads
    i = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    q = block_of(query, query_strides, sample, head, i, queries, D, BLOCK_D)
    o = block_of(out, out_strides, sample, head, i, queries, D, BLOCK_D)
    do = block_of(grad, grad_strides, sample, head, i, queries, D, BLOCK_D)
    delta = tl.sum(wide(o) * wide(do), 1)
    of_rows = plane.to(tl.int64) * queries + i
    tl.store(deltas + of_rows, delta, mask=i < queries)
    log = tl.load(sums + of_rows, mask=i < queries, other=float("inf"))
    result = tl.zeros([BLOCK_Q, BLOCK_D], dtype=WIDE)
    kept = None
    if rng is not None:
        kept = row_keys(rng, variant, sample, head, i)
    first_row = variant[5] + block * BLOCK_Q
    whole = end_of_whole_blocks(first_row, keys, BLOCK_K, CAUSAL, WINDOW)
    start = tl.maximum(first_key_seen(first_row, BLOCK_K, CAUSAL, WINDOW), whole)
    for at in range(0, whole, BLOCK_K):
        result = meet_keys(
            at, q, do, log, delta, kept, result, key, key_strides, value, value_strides,
            variant, rng, sample, head, i, queries, keys, GROUP, SCALE, CAUSAL, WINDOW,
            THRESHOLD, KEEP_SCALE, WIDE, PRECISION, D, BLOCK_D, BLOCK_K, True,
        )  # fmt: skip
    for at in range(start, end_of_keys(first_row + BLOCK_Q - 1, keys, CAUSAL), BLOCK_K):
        result = meet_keys(
            at, q, do, log, delta, kept, result, key, key_strides, value, value_strides,
            variant, rng, sample, head, i, queries, keys, GROUP, SCALE, CAUSAL, WINDOW,
            THRESHOLD, KEEP_SCALE, WIDE, PRECISION, D, BLOCK_D, BLOCK_K, False,
        )  # fmt: skip
    result = rounded(result * SCALE, dquery.dtype.element_ty)
    store_block(dquery, dquery_strides, sample, head, i, queries, result, D, BLOCK_D)


@triton.jit
def meet_rows(
    at, k, v, dk, dv, query, query_strides, grad, grad_strides, sums, deltas,
    variant, rng, sample, head, j, heads, queries, keys,
    SCALE: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    THRESHOLD: tl.constexpr, KEEP_SCALE: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """dK / scale and dV with the parts of the block of queries from `at` on."""
    i = at + tl.arange(0, BLOCK_Q)
    q = block_of(query, query_strides, sample, head, i, queries, D, BLOCK_D)
    do = block_of(grad, grad_strides, sample, head, i, queries, D, BLOCK_D)
    of_rows = (sample * heads + head).to(tl.int64) * queries + i
    log = tl.load(sums + of_rows, mask=i < queries, other=float("inf"))
    delta = tl.load(deltas + of_rows, mask=i < queries, other=0.0)
    products = product(k, tl.trans(q), PRECISION, WIDE)
    scores = counted(products, variant, sample, head, i[None, :], j[:, None], queries, keys,
                     SCALE, CAUSAL, WINDOW, WHOLE)  # fmt: skip
    shares = tl.exp2(scores - log[None, :])
    dshares = product(v, tl.trans(do), PRECISION, WIDE)
    dropped = shares
    if rng is not None:
        kept = row_keys(rng, variant, sample, head, i)
        is_kept = drop(shares * 0.0 + KEEP_SCALE, kept[None, :], j[:, None], THRESHOLD)
        dropped, dshares = shares * is_kept, dshares * is_kept
    dv += product(rounded(dropped, do.dtype), do, PRECISION, WIDE)
    dscores = rounded(shares * (dshares - delta[None, :]), q.dtype)
    return dk + product(dscores, q, PRECISION, WIDE), dv


@triton.jit
def key_gradient_kernel(
    query, query_strides, key, key_strides, value, value_strides, grad, grad_strides,
    dkey, dkey_strides, dvalue, dvalue_strides, sums, deltas, variant, rng, heads, queries, keys,
    GROUP: tl.constexpr, SCALE: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    THRESHOLD: tl.constexpr, KEEP_SCALE: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """dK and dV of one block of keys of a key-value head. Tiles lie with the keys along rows, so
    that no product turns one round. Keys beyond the last one are computed and not written."""
    block, plane = tl.program_id(0), tl.program_id(1)
    kv_heads = heads // GROUP
    sample, kv_head = plane // kv_heads, plane % kv_heads
    j = block * BLOCK_K + tl.arange(0, BLOCK_K)
    k = block_of(key, key_strides, sample, kv_head, j, keys, D, BLOCK_D)
    v = block_of(value, value_strides, sample, kv_head, j, keys, D, BLOCK_D)
    dk = tl.zeros([BLOCK_K, BLOCK_D], dtype=WIDE)
    dv = tl.zeros([BLOCK_K, BLOCK_D], dtype=WIDE)
    # rows from start to whole see some of the keys, those from whole on all
    start, whole, end = 0, 0, queries
    if CAUSAL:
        start = tl.maximum(block * BLOCK_K - variant[5], 0) // BLOCK_Q * BLOCK_Q
        last = tl.maximum((block + 1) * BLOCK_K - 1 - variant[5], 0)
        whole = (last + BLOCK_Q - 1) // BLOCK_Q * BLOCK_Q
        if WINDOW > 0:
            end = tl.minimum(queries, (block + 1) * BLOCK_K - 1 + WINDOW - variant[5])
            whole = end
    for member in range(GROUP):
        head = kv_head * GROUP + member
        for at in range(start, tl.minimum(whole, end), BLOCK_Q):
            dk, dv = meet_rows(
                at, k, v, dk, dv, query, query_strides, grad, grad_strides, sums, deltas,
                variant, rng, sample, head, j, heads, queries, keys, SCALE, CAUSAL, WINDOW,
                THRESHOLD, KEEP_SCALE, WIDE, PRECISION, D, BLOCK_D, BLOCK_Q, False,
            )  # fmt: skip
        for at in range(whole, end, BLOCK_Q):
            dk, dv = meet_rows(
                at, k, v, dk, dv, query, query_strides, grad, grad_strides, sums, deltas,
                variant, rng, sample, head, j, heads, queries, keys, SCALE, CAUSAL, WINDOW,
                THRESHOLD, KEEP_SCALE, WIDE, PRECISION, D, BLOCK_D, BLOCK_Q, True,
            )  # fmt: skip
    dk, dv = rounded(dk * SCALE, dkey.dtype.element_ty), rounded(dv, dvalue.dtype.element_ty)
    store_block(dkey, dkey_strides, sample, kv_head, j, keys, dk, D, BLOCK_D)
    store_block(dvalue, dvalue_strides, sample, kv_head, j, keys, dv, D, BLOCK_D)


@triton.jit
def bias_gradient_kernel(
    query, query_strides, key, key_strides, value, value_strides, grad, grad_strides,
    dbias, dbias_strides, sums, deltas, variant, rng, heads, queries, keys,
    samples_shared, heads_shared, dbias_heads,
    GROUP: tl.constexpr, SCALE: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    THRESHOLD: tl.constexpr, KEEP_SCALE: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The gradient of a block of pairs of the bias, summed over the `samples_shared` samples and
    `heads_shared` heads that share it."""
    plane = tl.program_id(2)
    first_sample, first_head = plane // dbias_heads, plane % dbias_heads
    i = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    j = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    result = tl.zeros([BLOCK_Q, BLOCK_K], dtype=WIDE)
    for member in range(samples_shared * heads_shared):
        sample = first_sample + member // heads_shared
        head = first_head + member % heads_shared
        q = block_of(query, query_strides, sample, head, i, queries, D, BLOCK_D)
        do = block_of(grad, grad_strides, sample, head, i, queries, D, BLOCK_D)
        k = block_of(key, key_strides, sample, head // GROUP, j, keys, D, BLOCK_D)
        v = block_of(value, value_strides, sample, head // GROUP, j, keys, D, BLOCK_D)
        of_rows = (sample * heads + head).to(tl.int64) * queries + i
        log = tl.load(sums + of_rows, mask=i < queries, other=float("inf"))
        delta = tl.load(deltas + of_rows, mask=i < queries, other=0.0)
        products = product(q, tl.trans(k), PRECISION, WIDE)
        scores = counted(products, variant, sample, head, i[:, None], j[None, :], queries, keys,
                         SCALE, CAUSAL, WINDOW, False)  # fmt: skip
        dshares = product(do, tl.trans(v), PRECISION, WIDE)
        if rng is not None:
            kept = row_keys(rng, variant, sample, head, i)
            dshares = drop(dshares * KEEP_SCALE, kept[:, None], j[None, :], THRESHOLD)
        result += tl.exp2(scores - log[:, None]) * (dshares - delta[:, None])
    at = pairs_at(dbias_strides, first_sample, first_head, i[:, None], j[None, :])
    inside = (i < queries)[:, None] & (j < keys)[None, :]
    tl.store(dbias + at, rounded(result, dbias.dtype.element_ty), mask=inside)
