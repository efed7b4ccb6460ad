"""The passes of a cross entropy over the rows of its logits, in blocks of torch's own kernels.

Each is computed in float32, in float64 for float64, a block of rows at a time, so that no copy of
the logits in that type exists. n rows, v columns; column [n]: that of the row's target, -1 without
one; peak [n]: the row's maximum over all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mpctl.kernels.counter_rng import block_elements


def row_maximum(logits: Tensor) -> Tensor:
    """Maximum of each row, [n, v] -> [n], in float32 or float64; -inf without columns."""
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    peak = logits.new_full(logits.shape[:1], -torch.inf, dtype=dtype)
    for rows in _row_blocks(logits):  # in 16 bits amax takes twice as long on a CPU
        peak[rows] = logits[rows].to(dtype).amax(1)
    return peak


def own_sums(
    logits: Tensor, column: Tensor, peak: Tensor, smoothing: float, spread: float
) -> tuple[Tensor, Tensor]:
    """2 x [n]: (1 - smoothing) (z_column - peak) + spread sum_j (z_j - peak), whose first part is 0
    without a column; and sum_j exp(z_j - peak)."""
    target, total = torch.zeros_like(peak), torch.zeros_like(peak)
    for rows in _row_blocks(logits):
        shifted = torch.sub(logits[rows], peak[rows, None])
        own = shifted.gather(1, column[rows, None].clamp(min=0))[:, 0]
        own = own.masked_fill_(column[rows] < 0, 0.0)
        if smoothing:
            own = own.mul_(1 - smoothing).add_(shifted.sum(1), alpha=spread)
        target[rows] = own
        total[rows] = shifted.exp_().sum(1)
    return target, total


def logits_gradient(
    logits: Tensor, column: Tensor, peak: Tensor, share: Tensor, shift: Tensor | None, hit: Tensor,
    *, overwrite: bool,
) -> Tensor:  # fmt: skip
    """[n, v]: exp(z - peak) share - shift, plus `hit` in the row's column; share, shift, hit [n].

    overwrite: in the memory of the logits.
    """
    result = logits if overwrite else torch.empty_like(logits)
    for rows in _row_blocks(logits):
        # softmax, times the incoming gradient, then less what the target has of it
        out = result[rows] if result.dtype == peak.dtype else None
        work = torch.sub(logits[rows], peak[rows, None], out=out).exp_()
        work.mul_(share[rows, None])
        if shift is not None:
            work.sub_(shift[rows, None])
        place = column[rows, None].clamp(min=0)
        work.scatter_add_(1, place, hit[rows, None].to(work.dtype))
        if out is None:
            result[rows] = work
    return result


def _row_blocks(logits: Tensor) -> Iterator[slice]:
    count, width = logits.shape
    step = max(1, block_elements(logits.device) // max(1, width))
    return (slice(start, start + step) for start in range(0, count if width else 0, step))
