"""The gradients of attention block by block: dQ by rows, dK and dV by keys, the bias' by pairs.

jit/attention.py has the forward kernel, the formulas of both directions and the letters.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mpctl.train.kernels.triton.jit.attention import (
    block_and_plane,
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
from mpctl.train.kernels.triton.jit.bits import keeps, rounded, scramble, wide


@triton.jit
def meet_keys(
    at,
    q,
    do,
    log,
    delta,
    kept,
    result,
    key,
    key_strides,
    value,
    value_strides,
    variant,
    sample,
    head,
    i,
    queries,
    keys,
    GROUP: tl.constexpr,
    SCALE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    THRESHOLD: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """dQ / (c scale) with the part of the block of keys from `at` on."""
    j = at + tl.arange(0, BLOCK_K)
    k = block_of(key, key_strides, sample, head // GROUP, j, keys, D, BLOCK_D)
    v = block_of(value, value_strides, sample, head // GROUP, j, keys, D, BLOCK_D)
    products = product(q, tl.trans(k), PRECISION, WIDE)
    scores = counted(
        products, variant, sample, head, i[:, None], j[None, :], queries, keys, SCALE, CAUSAL, WINDOW, WHOLE
    )
    dshares = product(do, tl.trans(v), PRECISION, WIDE)
    if kept is not None:
        dshares = drop(dshares, kept[:, None], j[None, :], THRESHOLD)
    dscores = tl.exp2(scores - log[:, None]) * (dshares - delta[:, None])
    return result + product(rounded(dscores, k.dtype), k, PRECISION, WIDE)


@triton.jit(do_not_specialize=["number"])
def query_gradient_kernel(
    query,
    key,
    value,
    mask,
    bias,
    slopes,
    seed,
    samples,
    out,
    grad,
    dquery,
    sums,
    deltas,
    row_numbers,
    number,
    strides,
    places,
    sizes,
    GROUP: tl.constexpr,
    SCALE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    THRESHOLD: tl.constexpr,
    KEEP_SCALE: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """dQ of one block of queries, and for the others `deltas` and `row_numbers` [b, a, q]: the
    rows' sums of dO O, over c, and their keys of dropout, if any."""
    query_strides, key_strides, value_strides, mask_strides, bias_strides = strides[:5]
    out_strides, grad_strides, dquery_strides = strides[5:]
    head_start, row_start = places
    heads, queries, keys = sizes
    variant = (mask, mask_strides, bias, bias_strides, slopes, row_start)
    block, plane = block_and_plane(queries, BLOCK_Q)
    block = tl.cdiv(queries, BLOCK_Q) - 1 - block
    sample, head = plane // heads, plane % heads
    i = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    q = block_of(query, query_strides, sample, head, i, queries, D, BLOCK_D)
    o = block_of(out, out_strides, sample, head, i, queries, D, BLOCK_D)
    do = block_of(grad, grad_strides, sample, head, i, queries, D, BLOCK_D)
    delta = tl.sum(wide(o) * wide(do), 1) / KEEP_SCALE
    of_rows = plane.to(tl.int64) * queries + i
    tl.store(deltas + of_rows, delta, mask=i < queries)
    log = tl.load(sums + of_rows, mask=i < queries, other=float("inf"))
    result = tl.zeros([BLOCK_Q, BLOCK_D], dtype=WIDE)
    kept = None
    if samples is not None:
        kept = row_keys(seed, number, samples, head_start, variant, sample, head, i)
        tl.store(row_numbers + of_rows, kept.to(tl.int32, bitcast=True), mask=i < queries)
    first_row = variant[5] + block * BLOCK_Q
    whole = end_of_whole_blocks(first_row, keys, BLOCK_K, CAUSAL, WINDOW)
    start = tl.maximum(first_key_seen(first_row, BLOCK_K, CAUSAL, WINDOW), whole)
    for at in range(0, whole, BLOCK_K):
        result = meet_keys(
            at,
            q,
            do,
            log,
            delta,
            kept,
            result,
            key,
            key_strides,
            value,
            value_strides,
            variant,
            sample,
            head,
            i,
            queries,
            keys,
            GROUP,
            SCALE,
            CAUSAL,
            WINDOW,
            THRESHOLD,
            WIDE,
            PRECISION,
            D,
            BLOCK_D,
            BLOCK_K,
            True,
        )
    for at in range(start, end_of_keys(first_row + BLOCK_Q - 1, keys, CAUSAL), BLOCK_K):
        result = meet_keys(
            at,
            q,
            do,
            log,
            delta,
            kept,
            result,
            key,
            key_strides,
            value,
            value_strides,
            variant,
            sample,
            head,
            i,
            queries,
            keys,
            GROUP,
            SCALE,
            CAUSAL,
            WINDOW,
            THRESHOLD,
            WIDE,
            PRECISION,
            D,
            BLOCK_D,
            BLOCK_K,
            False,
        )
    result = rounded(result * (SCALE * KEEP_SCALE), dquery.dtype.element_ty)
    store_block(dquery, dquery_strides, sample, head, i, queries, result, D, BLOCK_D)


@triton.jit
def meet_rows(
    at,
    k,
    v,
    dk,
    dv,
    query,
    query_strides,
    grad,
    grad_strides,
    sums,
    deltas,
    row_numbers,
    variant,
    scrambled,
    sample,
    head,
    j,
    heads,
    queries,
    keys,
    SCALE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    THRESHOLD: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """dK / (c scale) and dV / c with the parts of the block of queries from `at` on. scrambled: of
    keys j, None without dropout."""
    i = at + tl.arange(0, BLOCK_Q)
    q = block_of(query, query_strides, sample, head, i, queries, D, BLOCK_D)
    do = block_of(grad, grad_strides, sample, head, i, queries, D, BLOCK_D)
    of_rows = (sample * heads + head).to(tl.int64) * queries + i
    log = tl.load(sums + of_rows, mask=i < queries, other=float("inf"))
    delta = tl.load(deltas + of_rows, mask=i < queries, other=0.0)
    products = product(k, tl.trans(q), PRECISION, WIDE)
    scores = counted(
        products, variant, sample, head, i[None, :], j[:, None], queries, keys, SCALE, CAUSAL, WINDOW, WHOLE
    )
    shares = tl.exp2(scores - log[None, :])
    dshares = product(v, tl.trans(do), PRECISION, WIDE)
    dropped = shares
    if scrambled is not None:
        numbers = tl.load(row_numbers + of_rows, mask=i < queries, other=0)
        numbers = numbers.to(tl.uint32, bitcast=True)
        is_kept = keeps(numbers[None, :], scrambled[:, None], THRESHOLD)
        dropped, dshares = shares * is_kept.to(WIDE), tl.where(is_kept, dshares, 0.0)
    dv += product(rounded(dropped, do.dtype), do, PRECISION, WIDE)
    dscores = rounded(shares * (dshares - delta[None, :]), q.dtype)
    return dk + product(dscores, q, PRECISION, WIDE), dv


@triton.jit
def next_rows(head, at, start, end, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """The head and the first row of the block after `at`: the next head's `start` behind `end`."""
    at += BLOCK
    if GROUP > 1:
        is_past = at >= end
        head += is_past.to(tl.int32)
        at = tl.where(is_past, start, at)
    return head, at


@triton.jit
def key_gradient_kernel(
    query,
    key,
    value,
    mask,
    bias,
    slopes,
    grad,
    dkey,
    dvalue,
    sums,
    deltas,
    row_numbers,
    strides,
    places,
    sizes,
    GROUP: tl.constexpr,
    SCALE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    THRESHOLD: tl.constexpr,
    KEEP_SCALE: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """dK and dV of one block of keys of a key-value head. Tiles lie with the keys along rows, so
    that no product turns one round. Keys beyond the last one are computed and not written."""
    query_strides, key_strides, value_strides, mask_strides, bias_strides = strides[:5]
    grad_strides, dkey_strides, dvalue_strides = strides[5:]
    heads, queries, keys = sizes
    variant = (mask, mask_strides, bias, bias_strides, slopes, places[1])
    block, plane = block_and_plane(keys, BLOCK_K)
    kv_heads = heads // GROUP
    sample, kv_head = plane // kv_heads, plane % kv_heads
    j = block * BLOCK_K + tl.arange(0, BLOCK_K)
    k = block_of(key, key_strides, sample, kv_head, j, keys, D, BLOCK_D)
    v = block_of(value, value_strides, sample, kv_head, j, keys, D, BLOCK_D)
    dk = tl.zeros([BLOCK_K, BLOCK_D], dtype=WIDE)
    dv = tl.zeros([BLOCK_K, BLOCK_D], dtype=WIDE)
    scrambled = None
    if row_numbers is not None:
        scrambled = scramble(j)
    # rows from start to whole see some of the keys, rows from whole on see all
    start, whole, end = 0, 0, queries
    if CAUSAL:
        start = tl.maximum(block * BLOCK_K - variant[5], 0) // BLOCK_Q * BLOCK_Q
        last = tl.maximum((block + 1) * BLOCK_K - 1 - variant[5], 0)
        whole = (last + BLOCK_Q - 1) // BLOCK_Q * BLOCK_Q
        if WINDOW > 0:
            end = tl.minimum(queries, (block + 1) * BLOCK_K - 1 + WINDOW - variant[5])
            whole = end
    # all heads in one loop: a head's first rows are loaded while the last of another are multiplied
    some = tl.cdiv(tl.maximum(tl.minimum(whole, end) - start, 0), BLOCK_Q)
    head, at = kv_head * GROUP, start
    for _ in range(0, GROUP * some):
        dk, dv = meet_rows(
            at,
            k,
            v,
            dk,
            dv,
            query,
            query_strides,
            grad,
            grad_strides,
            sums,
            deltas,
            row_numbers,
            variant,
            scrambled,
            sample,
            head,
            j,
            heads,
            queries,
            keys,
            SCALE,
            CAUSAL,
            WINDOW,
            THRESHOLD,
            WIDE,
            PRECISION,
            D,
            BLOCK_D,
            BLOCK_Q,
            False,
        )
        head, at = next_rows(head, at, start, tl.minimum(whole, end), BLOCK_Q, GROUP)
    rest = tl.cdiv(tl.maximum(end - whole, 0), BLOCK_Q)
    head, at = kv_head * GROUP, whole
    for _ in range(0, GROUP * rest):
        dk, dv = meet_rows(
            at,
            k,
            v,
            dk,
            dv,
            query,
            query_strides,
            grad,
            grad_strides,
            sums,
            deltas,
            row_numbers,
            variant,
            scrambled,
            sample,
            head,
            j,
            heads,
            queries,
            keys,
            SCALE,
            CAUSAL,
            WINDOW,
            THRESHOLD,
            WIDE,
            PRECISION,
            D,
            BLOCK_D,
            BLOCK_Q,
            True,
        )
        head, at = next_rows(head, at, whole, end, BLOCK_Q, GROUP)
    dk = rounded(dk * (SCALE * KEEP_SCALE), dkey.dtype.element_ty)
    dv = rounded(dv * KEEP_SCALE, dvalue.dtype.element_ty)
    store_block(dkey, dkey_strides, sample, kv_head, j, keys, dk, D, BLOCK_D)
    store_block(dvalue, dvalue_strides, sample, kv_head, j, keys, dv, D, BLOCK_D)


@triton.jit(do_not_specialize=["number"])
def bias_gradient_kernel(
    query,
    key,
    value,
    mask,
    bias,
    slopes,
    seed,
    samples,
    grad,
    dbias,
    sums,
    deltas,
    number,
    strides,
    places,
    sizes,
    shared,
    GROUP: tl.constexpr,
    SCALE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    THRESHOLD: tl.constexpr,
    KEEP_SCALE: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The gradient of a block of pairs of the bias, summed over those that share it. shared: how
    many samples and heads do, and the heads of the bias."""
    query_strides, key_strides, value_strides, mask_strides, bias_strides = strides[:5]
    grad_strides, dbias_strides = strides[5:]
    head_start, row_start = places
    heads, queries, keys = sizes
    samples_shared, heads_shared, dbias_heads = shared
    variant = (mask, mask_strides, bias, bias_strides, slopes, row_start)
    row_block, rest = block_and_plane(queries, BLOCK_Q)
    key_blocks = tl.cdiv(keys, BLOCK_K)
    key_block, plane = rest % key_blocks, rest // key_blocks
    first_sample, first_head = plane // dbias_heads, plane % dbias_heads
    i = row_block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    j = key_block * BLOCK_K + tl.arange(0, BLOCK_K)
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
        scores = counted(
            products, variant, sample, head, i[:, None], j[None, :], queries, keys, SCALE, CAUSAL, WINDOW, False
        )
        dshares = product(do, tl.trans(v), PRECISION, WIDE)
        if samples is not None:
            kept = row_keys(seed, number, samples, head_start, variant, sample, head, i)
            dshares = drop(dshares, kept[:, None], j[None, :], THRESHOLD)
        result += tl.exp2(scores - log[:, None]) * (dshares - delta[:, None])
    at = pairs_at(dbias_strides, first_sample, first_head, i[:, None], j[None, :])
    inside = (i < queries)[:, None] & (j < keys)[None, :]
    result = rounded(result * KEEP_SCALE, dbias.dtype.element_ty)
    tl.store(dbias + at, result, mask=inside)
