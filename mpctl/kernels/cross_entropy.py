"""Cross entropy of logits that stay split over the vocabulary.

With the row maximum m, loss = log(sum_j exp(z_j - m)) - (z_target - m) and d loss / d z =
softmax(z) - onehot(target) (arXiv 1909.08053, section 3). Three all-reduces of b*s floats (m, the
target's logit, the sum) stand for a gather of b*s*v. By hand: z = (0, 0 | 0, 0) on two ranks,
m = 0, sum = 2 + 2, loss = log 4.

The maths is float32 (float64 for float64 logits), in blocks of rows. Saved for backward: the
logits themselves and two floats a row; the exponentials are computed again, so the peak is logits
+ gradient, both in the logits' dtype, with no float32 copy of either.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mpctl.kernels.group import Group
from mpctl.kernels.noise import block_elements


def vocab_parallel_cross_entropy(
    logits: Tensor, targets: Tensor, *, group: Group, first: int
) -> Tensor:
    """logits [b, s, v_local], targets [b, s] global ids -> losses [b, s], equal on every rank.

    first: global id of local column 0; v_local may be 0. Losses are float32 (float64 for float64
    logits). A target that is no rank's word (-100) counts as a word of logit m: mask its loss.
    """
    return _CrossEntropy.apply(logits, targets, group, first)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: Group, first: int) -> Tensor:
        # [b, s, v_local] -> [n, v_local], n = b*s
        flat = logits.flatten(0, -2)
        column, inside = _local_columns(targets.reshape(-1), first, flat.shape[1])
        peak = group.all_reduce(_row_maximum(flat), op="max")
        target, total = torch.zeros_like(peak), torch.zeros_like(peak)
        for rows in _row_blocks(flat):
            shifted = torch.sub(flat[rows], peak[rows, None])
            target[rows] = shifted.gather(1, column[rows, None])[:, 0] * inside[rows]
            total[rows] = shifted.exp_().sum(1)
        target, total = group.all_reduce(target), group.all_reduce(total)
        ctx.save_for_backward(flat, column, inside, peak, total)
        ctx.shape = logits.shape
        return total.log().sub_(target).view(targets.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        flat, column, inside, peak, total = ctx.saved_tensors
        weight = grad.reshape(-1)
        result = torch.empty_like(flat)
        for rows in _row_blocks(flat):
            # softmax, then minus one at the target, then times the incoming gradient
            work = torch.sub(flat[rows], peak[rows, None]).exp_().div_(total[rows, None])
            work.scatter_add_(1, column[rows, None], -inside[rows, None].to(work.dtype))
            result[rows] = work.mul_(weight[rows, None])
        return result.view(ctx.shape), None, None, None


def _row_maximum(flat: Tensor) -> Tensor:
    """[n, v_local] -> [n] in the dtype of the maths; -inf where there are no columns."""
    dtype = torch.float64 if flat.dtype == torch.float64 else torch.float32
    if flat.shape[1] == 0:
        return flat.new_full(flat.shape[:1], -torch.inf, dtype=dtype)
    return flat.amax(1).to(dtype)


def _local_columns(targets: Tensor, first: int, width: int) -> tuple[Tensor, Tensor]:
    """Local column of each target (0 where it is another rank's) and whether it is ours."""
    local = targets - first
    inside = (local >= 0) & (local < width)
    return local.masked_fill(~inside, 0), inside


def _row_blocks(flat: Tensor) -> Iterator[slice]:
    count, width = flat.shape
    step = max(1, block_elements(flat.device) // max(1, width))
    return (slice(start, start + step) for start in range(0, count if width else 0, step))
