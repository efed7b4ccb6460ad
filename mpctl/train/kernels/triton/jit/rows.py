"""Sums of rows by their places, and their gradients.

A program has one token and a block of columns; a row is read where `places` says, so that no copy
of the rows in the order of tokens exists. Sums are in the order of the places; products are rounded
before they are added, as torch's separate kernels do.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mpctl.train.kernels.triton.jit.bits import rounded, wide


@triton.jit
def rows_kernel(rows, weights, places, out, tokens, width, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """out [T, h]: the sum over j of rows[places[j, t]], each times weights[t, j] if these are
    given. places: [COUNT, T]."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    place = tl.load(places + token)
    total = wide(tl.load(rows + place * width + column, mask=inside, other=0.0))
    if weights is not None:
        total = total * tl.load(weights + token * COUNT)
    for j in range(1, COUNT):
        place = tl.load(places + j * tokens + token)
        row = wide(tl.load(rows + place * width + column, mask=inside, other=0.0))
        if weights is not None:
            row = row * tl.load(weights + token * COUNT + j)
        total = total + row
    tl.store(out + token * width + column, rounded(total, out.dtype.element_ty), mask=inside)


@triton.jit
def row_gradients_kernel(
    grad,
    rows,
    weights,
    places,
    targets,
    d_rows,
    d_weights,
    tokens,
    width,
    COUNT: tl.constexpr,
    COPIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One token and one of its rows: d_weights[t, j] = grad[t] . rows[places[j, t]], and
    d_rows[targets[c, j, t]] = weights[t, j] grad[t] for each copy c."""
    token, j = tl.program_id(0).to(tl.int64), tl.program_id(1)
    weight = tl.load(weights + token * COUNT + j)
    place = tl.load(places + j * tokens + token)
    along = tl.zeros((BLOCK,), dtype=d_weights.dtype.element_ty)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        incoming = wide(tl.load(grad + token * width + column, mask=inside, other=0.0))
        row = wide(tl.load(rows + place * width + column, mask=inside, other=0.0))
        along = along + incoming * row
        part = rounded(incoming * weight, d_rows.dtype.element_ty)
        for copy in tl.static_range(COPIES):
            target = tl.load(targets + (copy * COUNT + j) * tokens + token)
            tl.store(d_rows + target * width + column, part, mask=inside)
    tl.store(d_weights + token * COUNT + j, tl.sum(along))
