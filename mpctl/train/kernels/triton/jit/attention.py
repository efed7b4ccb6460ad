"""Attention block by block: FlashAttention-2 (Dao, arXiv 2307.08691, algorithms 1 and 2), with
dropout whose mask is computed where it is used.

Forward, a program has BLOCK_Q rows of one head and meets the keys in blocks. It holds each row's
maximum m, sum l of 2^(s - m), and the sum of values weighted so; where a block raises m, the two
are scaled by 2^(m_old - m_new). The sum l counts what dropout leaves out. Blocks of keys that all
rows see completely come first, without a test of each pair.

Backward, shares and dropout mask are computed again from Q, K and the rows' sums.

With P the softmax, M the dropout mask, c = 1 / (1 - p), O = c (M P) V and dP = dO V^T:

    dV = c (M P)^T dO    dS = c P (M dP - delta)    dQ = scale dS K    dK = scale dS^T Q

where delta is each row's sum of dO O, over c. c and scale multiply results, not pairs. The kernel
that makes dQ writes delta and the rows' keys of dropout for the next one: in a tile of tensor cores
a thread has many rows of few keys, so that a row's key would be computed again for every 2 pairs.

One kernel has rows and makes dQ, another keys and makes dK and dV of a key-value head over all
heads that share it, a third, where a learned bias asks for it, pairs, and sums dS over the samples
and heads that the bias is shared by. Nothing is added by several programs: results do not depend on
the order in which they run.

Scores are kept in base 2, since a device has exp2 in hardware: s log2(e), of which 2^(s - sums) is
the softmax, `sums` being each row's log2 of the sum of 2^s. What does not count is -infinity; a row
of which nothing counts has the sum +infinity, so that its shares are 0 in backward too.

The host gives tensors one by one, None where there is none, and three tuples: the tensors' strides
by sample, head and row (of a mask and a bias also by key, 0 along a dimension that is shared), the
first head and row by global number, and the sizes. `number` is the key of a dropout mask whose
`seed` is None. Inside, variant is (mask, its strides, bias, its strides, slopes, row_start) and rng
(seed, number, samples, head_start), or None without dropout. A kernel
numbers rows `i` and keys `j` of the tensors that it was given; row_start + i and j are their global
positions. A plane is a sample's head; programs are numbered plane by plane along the first axis of
the grid, the only one that may have more than 65,535.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mpctl.train.kernels.triton.jit.bits import IS_INTERPRETED, first_key, keeps, mix, rounded, scramble, wide

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def block_and_plane(places, BLOCK: tl.constexpr):
    """The program's block of so many places, and its plane."""
    blocks = tl.cdiv(places, BLOCK)
    return tl.program_id(0) % blocks, tl.program_id(0) // blocks


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
    """One past the last key that rows up to a global position may see."""
    if CAUSAL:
        return tl.minimum(keys, last_row + 1)
    else:
        return keys


@triton.jit
def end_of_whole_blocks(
    first_row, keys, BLOCK: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr
):  # fmt: skip
    """The end of the last block of keys that every row from a global position on sees completely; 0
    with a window, in which no two rows see the same keys."""
    if WINDOW > 0:
        return 0
    elif CAUSAL:
        return tl.minimum(keys, first_row + 1) // BLOCK * BLOCK
    else:
        return keys // BLOCK * BLOCK


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
        shares *= keeps(kept[:, None], scramble(j)[None, :], THRESHOLD).to(WIDE)
    result = result * shrunk[:, None]
    result += product(rounded(shares, v.dtype), v, PRECISION, WIDE)
    return raised, total, result


@triton.jit(do_not_specialize=["number"])
def attention_kernel(
    query, key, value, mask, bias, slopes, seed, samples, out, sums, number,
    strides, places, sizes,
    GROUP: tl.constexpr, SCALE: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    THRESHOLD: tl.constexpr, KEEP_SCALE: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out [b, a, q, d] and sums [b, a, q] of one block of queries.

    GROUP: queries' heads a key-value head. THRESHOLD, KEEP_SCALE: of dropout, p 2^32 - 2^31 and
    1 / (1 - p). WIDE: the type of sums. PRECISION: of float32 products.
    """
    query_strides, key_strides, value_strides, mask_strides, bias_strides, out_strides = strides
    head_start, row_start = places
    heads, queries, keys = sizes
    variant = (mask, mask_strides, bias, bias_strides, slopes, row_start)
    rng = None
    if samples is not None:
        rng = (seed, number, samples, head_start)
    block, plane = block_and_plane(queries, BLOCK_Q)
    block = tl.cdiv(queries, BLOCK_Q) - 1 - block  # the last, which meet the most keys, start first
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


@triton.jit
def meet_keys(
    at, q, do, log, delta, kept, result, key, key_strides, value, value_strides,
    variant, rng, sample, head, i, queries, keys,
    GROUP: tl.constexpr, SCALE: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    THRESHOLD: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """dQ / (c scale) with the part of the block of keys from `at` on."""
    j = at + tl.arange(0, BLOCK_K)
    k = block_of(key, key_strides, sample, head // GROUP, j, keys, D, BLOCK_D)
    v = block_of(value, value_strides, sample, head // GROUP, j, keys, D, BLOCK_D)
    products = product(q, tl.trans(k), PRECISION, WIDE)
    scores = counted(products, variant, sample, head, i[:, None], j[None, :], queries, keys,
                     SCALE, CAUSAL, WINDOW, WHOLE)  # fmt: skip
    dshares = product(do, tl.trans(v), PRECISION, WIDE)
    if rng is not None:
        dshares = drop(dshares, kept[:, None], j[None, :], THRESHOLD)
    dscores = tl.exp2(scores - log[:, None]) * (dshares - delta[:, None])
    return result + product(rounded(dscores, k.dtype), k, PRECISION, WIDE)


@triton.jit(do_not_specialize=["number"])
def query_gradient_kernel(
    query, key, value, mask, bias, slopes, seed, samples, out, grad, dquery, sums, deltas,
    row_numbers, number, strides, places, sizes,
    GROUP: tl.constexpr, SCALE: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    THRESHOLD: tl.constexpr, KEEP_SCALE: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """dQ of one block of queries, and for the others `deltas` and `row_numbers` [b, a, q]: the
    rows' sums of dO O, over c, and their keys of dropout, if any."""
    query_strides, key_strides, value_strides, mask_strides, bias_strides = strides[:5]
    out_strides, grad_strides, dquery_strides = strides[5:]
    head_start, row_start = places
    heads, queries, keys = sizes
    variant = (mask, mask_strides, bias, bias_strides, slopes, row_start)
    rng = None
    if samples is not None:
        rng = (seed, number, samples, head_start)
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
    if rng is not None:
        kept = row_keys(rng, variant, sample, head, i)
        tl.store(row_numbers + of_rows, kept.to(tl.int32, bitcast=True), mask=i < queries)
    first_row = variant[5] + block * BLOCK_Q
    whole = end_of_whole_blocks(first_row, keys, BLOCK_K, CAUSAL, WINDOW)
    start = tl.maximum(first_key_seen(first_row, BLOCK_K, CAUSAL, WINDOW), whole)
    for at in range(0, whole, BLOCK_K):
        result = meet_keys(
            at, q, do, log, delta, kept, result, key, key_strides, value, value_strides,
            variant, rng, sample, head, i, queries, keys, GROUP, SCALE, CAUSAL, WINDOW,
            THRESHOLD, WIDE, PRECISION, D, BLOCK_D, BLOCK_K, True,
        )  # fmt: skip
    for at in range(start, end_of_keys(first_row + BLOCK_Q - 1, keys, CAUSAL), BLOCK_K):
        result = meet_keys(
            at, q, do, log, delta, kept, result, key, key_strides, value, value_strides,
            variant, rng, sample, head, i, queries, keys, GROUP, SCALE, CAUSAL, WINDOW,
            THRESHOLD, WIDE, PRECISION, D, BLOCK_D, BLOCK_K, False,
        )  # fmt: skip
    result = rounded(result * (SCALE * KEEP_SCALE), dquery.dtype.element_ty)
    store_block(dquery, dquery_strides, sample, head, i, queries, result, D, BLOCK_D)


@triton.jit
def meet_rows(
    at, k, v, dk, dv, query, query_strides, grad, grad_strides, sums, deltas, row_numbers,
    variant, scrambled, sample, head, j, heads, queries, keys,
    SCALE: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    THRESHOLD: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """dK / (c scale) and dV / c with the parts of the block of queries from `at` on. scrambled: of
    keys j, None without dropout."""
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
    query, key, value, mask, bias, slopes, grad, dkey, dvalue, sums, deltas, row_numbers,
    strides, places, sizes,
    GROUP: tl.constexpr, SCALE: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    THRESHOLD: tl.constexpr, KEEP_SCALE: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
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
            at, k, v, dk, dv, query, query_strides, grad, grad_strides, sums, deltas,
            row_numbers, variant, scrambled, sample, head, j, heads, queries, keys,
            SCALE, CAUSAL, WINDOW, THRESHOLD, WIDE, PRECISION, D, BLOCK_D, BLOCK_Q, False,
        )  # fmt: skip
        head, at = next_rows(head, at, start, tl.minimum(whole, end), BLOCK_Q, GROUP)
    rest = tl.cdiv(tl.maximum(end - whole, 0), BLOCK_Q)
    head, at = kv_head * GROUP, whole
    for _ in range(0, GROUP * rest):
        dk, dv = meet_rows(
            at, k, v, dk, dv, query, query_strides, grad, grad_strides, sums, deltas,
            row_numbers, variant, scrambled, sample, head, j, heads, queries, keys,
            SCALE, CAUSAL, WINDOW, THRESHOLD, WIDE, PRECISION, D, BLOCK_D, BLOCK_Q, True,
        )  # fmt: skip
        head, at = next_rows(head, at, whole, end, BLOCK_Q, GROUP)
    dk = rounded(dk * (SCALE * KEEP_SCALE), dkey.dtype.element_ty)
    dv = rounded(dv * KEEP_SCALE, dvalue.dtype.element_ty)
    store_block(dkey, dkey_strides, sample, kv_head, j, keys, dk, D, BLOCK_D)
    store_block(dvalue, dvalue_strides, sample, kv_head, j, keys, dv, D, BLOCK_D)


@triton.jit(do_not_specialize=["number"])
def bias_gradient_kernel(
    query, key, value, mask, bias, slopes, seed, samples, grad, dbias, sums, deltas, number,
    strides, places, sizes, shared,
    GROUP: tl.constexpr, SCALE: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    THRESHOLD: tl.constexpr, KEEP_SCALE: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The gradient of a block of pairs of the bias, summed over those that share it. shared: how
    many samples and heads do, and the heads of the bias."""
    query_strides, key_strides, value_strides, mask_strides, bias_strides = strides[:5]
    grad_strides, dbias_strides = strides[5:]
    head_start, row_start = places
    heads, queries, keys = sizes
    samples_shared, heads_shared, dbias_heads = shared
    variant = (mask, mask_strides, bias, bias_strides, slopes, row_start)
    rng = None
    if samples is not None:
        rng = (seed, number, samples, head_start)
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
        scores = counted(products, variant, sample, head, i[:, None], j[None, :], queries, keys,
                         SCALE, CAUSAL, WINDOW, False)  # fmt: skip
        dshares = product(do, tl.trans(v), PRECISION, WIDE)
        if rng is not None:
            kept = row_keys(rng, variant, sample, head, i)
            dshares = drop(dshares, kept[:, None], j[None, :], THRESHOLD)
        result += tl.exp2(scores - log[:, None]) * (dshares - delta[:, None])
    at = pairs_at(dbias_strides, first_sample, first_head, i[:, None], j[None, :])
    inside = (i < queries)[:, None] & (j < keys)[None, :]
    result = rounded(result * KEEP_SCALE, dbias.dtype.element_ty)
    tl.store(dbias + at, result, mask=inside)
