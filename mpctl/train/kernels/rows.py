"""Vectors added to rows of a matrix in an order that repeats: the gradient of a word table.

On a CPU each vector is added to its row, one after the other. On a GPU `index_add_` adds equal rows
by atomics, in any order. There the vectors of equal rows are summed first, by torch's gradient of a
lookup in a table of as many rows as there are vectors, which sorts; after that each row occurs
once, and the others are sums of nothing. Where a table's own gradient is not larger than these
sums, it is made and added.

By hand, rows 7 3 7 of vectors a b c on a GPU: sums (b, a + c, 0), added to rows 3, 7 and any.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mpctl.model.operators.kernel_sets import ROWS_BLOCK, row_sums_bytes

_summed = torch.ops.aten.embedding_dense_backward.default


def add_rows(rows: Tensor, vectors: Tensor, out: Tensor) -> None:
    """Add vectors [m, h] to the rows [m] of out [n, h]."""
    if out.device.type != "cpu":
        add_sums(rows, vectors, out)
    elif vectors.dtype == out.dtype:
        out.index_add_(0, rows, vectors)
    else:
        step = max(1, ROWS_BLOCK // out.shape[1])
        for some, own in zip(rows.split(step), vectors.split(step), strict=True):
            out.index_add_(0, some, own.to(out.dtype))


def add_sums(rows: Tensor, vectors: Tensor, out: Tensor) -> None:
    """The same as a GPU does it: sum the vectors of equal rows, then add each sum."""
    m, width, wide = len(rows), vectors.element_size(), out.element_size()
    if row_sums_bytes(vectors.numel(), width=width, wide=wide) >= out.numel() * width:
        out.add_(_summed(vectors, rows, len(out), -1, False))
        return
    ordered, order = rows.sort()
    is_first = torch.cat([ordered.new_ones(1), (ordered[1:] != ordered[:-1]).long()])
    slots = is_first.cumsum(0) - 1
    place = torch.empty_like(slots).scatter_(0, order, slots)
    owners = (torch.arange(m, device=out.device) % len(out)).scatter_(0, slots, ordered)
    sums = _summed(vectors, place, m, -1, False)
    out.index_add_(0, owners, sums.to(out.dtype))
