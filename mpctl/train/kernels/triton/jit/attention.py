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
`seed` is None; without dropout `samples` is None. Inside, variant is (mask, its strides, bias, its
strides, slopes, row_start), and kept the rows' keys of dropout, or None. (Triton 3.6 cannot test
whether a tuple that holds a None is None.) A kernel numbers rows `i` and keys `j` of the tensors
that it was given; row_start + i and j are their global positions. A plane is a sample's head;
programs are numbered plane by plane along the first axis of the grid, the only one that may have
more than 65,535.
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
def block_of(tensor, strides, sample, head, places, limit, width: tl.constexpr, WIDTH: tl.constexpr):
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
def store_block(tensor, strides, sample, head, places, limit, block, width: tl.constexpr, WIDTH: tl.constexpr):
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
    """Return the offset of a pair's element in a mask or a bias. i, j broadcast against each other."""
    base = sample.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]
    return base + i.to(tl.int64) * strides[2] + j.to(tl.int64) * strides[3]


@triton.jit
def counted(
    products,
    variant,
    sample,
    head,
    i,
    j,
    queries,
    keys,
    SCALE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    WHOLE: tl.constexpr,
):
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
def row_keys(seed, number, samples, head_start, variant, sample, head, i):
    """The keys of rows i of one sample and head, uint32, as counter_rng.keep_mask folds them."""
    row_start = variant[5]
    folded = mix(first_key(seed, number) ^ scramble(tl.load(samples + sample)))
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
def end_of_whole_blocks(first_row, keys, BLOCK: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
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
    at,
    q,
    kept,
    highest,
    total,
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
    """Each row's maximum, sum and weighted values with those of the block of keys from `at` on."""
    j = at + tl.arange(0, BLOCK_K)
    k = block_of(key, key_strides, sample, head // GROUP, j, keys, D, BLOCK_D)
    v = block_of(value, value_strides, sample, head // GROUP, j, keys, D, BLOCK_D)
    products = product(q, tl.trans(k), PRECISION, WIDE)
    scores = counted(
        products, variant, sample, head, i[:, None], j[None, :], queries, keys, SCALE, CAUSAL, WINDOW, WHOLE
    )
    raised = tl.maximum(highest, tl.max(scores, 1))
    finite = tl.where(raised == float("-inf"), 0.0, raised)
    shares, shrunk = tl.exp2(scores - finite[:, None]), tl.exp2(highest - finite)
    total = total * shrunk + tl.sum(shares, 1)
    if kept is not None:
        shares *= keeps(kept[:, None], scramble(j)[None, :], THRESHOLD).to(WIDE)
    result = result * shrunk[:, None]
    result += product(rounded(shares, v.dtype), v, PRECISION, WIDE)
    return raised, total, result


@triton.jit(do_not_specialize=["number"])
def attention_kernel(
    query,
    key,
    value,
    mask,
    bias,
    slopes,
    seed,
    samples,
    out,
    sums,
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
    """out [b, a, q, d] and sums [b, a, q] of one block of queries.

    GROUP: queries' heads a key-value head. THRESHOLD, KEEP_SCALE: of dropout, p 2^32 - 2^31 and
    1 / (1 - p). WIDE: the type of sums. PRECISION: of float32 products.
    """
    query_strides, key_strides, value_strides, mask_strides, bias_strides, out_strides = strides
    head_start, row_start = places
    heads, queries, keys = sizes
    variant = (mask, mask_strides, bias, bias_strides, slopes, row_start)
    block, plane = block_and_plane(queries, BLOCK_Q)
    block = tl.cdiv(queries, BLOCK_Q) - 1 - block  # the last, which meet the most keys, start first
    sample, head = plane // heads, plane % heads
    i = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    q = block_of(query, query_strides, sample, head, i, queries, D, BLOCK_D)
    highest = tl.full([BLOCK_Q], float("-inf"), dtype=WIDE)
    total = tl.zeros([BLOCK_Q], dtype=WIDE)
    result = tl.zeros([BLOCK_Q, BLOCK_D], dtype=WIDE)
    kept = None
    if samples is not None:
        kept = row_keys(seed, number, samples, head_start, variant, sample, head, i)
    first_row = variant[5] + block * BLOCK_Q
    whole = end_of_whole_blocks(first_row, keys, BLOCK_K, CAUSAL, WINDOW)
    start = tl.maximum(first_key_seen(first_row, BLOCK_K, CAUSAL, WINDOW), whole)
    for at in range(0, whole, BLOCK_K):
        highest, total, result = meet(
            at,
            q,
            kept,
            highest,
            total,
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
        highest, total, result = meet(
            at,
            q,
            kept,
            highest,
            total,
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
    is_empty = total == 0.0
    result = result * (KEEP_SCALE / tl.where(is_empty, 1.0, total))[:, None]
    result = rounded(result, out.dtype.element_ty)
    store_block(out, out_strides, sample, head, i, queries, result, D, BLOCK_D)
    log = tl.where(is_empty, float("inf"), highest + tl.log2(tl.where(is_empty, 1.0, total)))
    tl.store(sums + plane.to(tl.int64) * queries + i, log, mask=i < queries)
