"""Cross entropy of logits that stay split over the vocabulary.

With the row maximum m, loss = log(sum_j exp(z_j - m)) - (z_target - m) and d loss / d z =
softmax(z) - onehot(target) (arXiv 1909.08053, section 3). Three all-reduces of b*s floats (m, the
target's logit, the sum) stand for a gather of b*s*v. By hand: z = (0, 0 | 0, 0) on two ranks,
m = 0, sum = 2 + 2, loss = log 4.

Label smoothing e (arXiv 1512.00567, section 7) takes the target as (1-e) onehot + e/v over the v
real words of all ranks: loss = log sum - (1-e) (z_target - m) - e/v sum_j (z_j - m). Each rank adds
its share of that last sum to the target's logit before their one all-reduce, so smoothing costs no
traffic. A z-loss (arXiv 2204.02311, section 5) adds c lse^2, lse = m + log sum, and c 2 lse
softmax(z) to the gradient. By hand: the example above with e = 0.5 keeps log 4.

The maths is float32 (float64 for float64 logits), in blocks of rows. Saved for backward: the
logits themselves and two floats a row; the exponentials are computed again, so the peak is logits
+ gradient, both in the logits' dtype, with no float32 copy of either. Where nobody reads the logits
after the loss, their memory becomes the gradient's, and the peak is the logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mpctl.kernels.counter_rng import block_elements
from mpctl.transport.group import Group


@dataclass(frozen=True)
class _Law:
    """Where the columns stand, and what is added to the plain loss."""

    group: Group
    first: int
    ignore_index: int
    smoothing: float
    vocab: int
    z_loss: float
    overwrite: bool

    @property
    def spread(self) -> float:
        """The share of the target's mass that every word gets."""
        return self.smoothing / self.vocab


def vocab_parallel_cross_entropy(
    logits: Tensor, targets: Tensor, *, group: Group, first: int, ignore_index: int = -100,
    label_smoothing: float = 0.0, vocab: int | None = None, z_loss: float = 0.0,
    overwrite: bool = False,
) -> Tensor:  # fmt: skip
    """logits [b, s, v_local], targets [b, s] global ids -> losses [b, s], equal on every rank.

    first: global id of local column 0; v_local may be 0. Losses are float32 (float64 for float64
    logits). A target of ignore_index has loss and gradient 0 (the caller counts the others); any
    other that is no rank's word counts as a word of logit m. vocab: the real words of all ranks,
    needed for label_smoothing on more than one. overwrite: backward writes the gradient over the
    logits; a second backward, or another operation that saved them, then raises RuntimeError.
    Raises ValueError for a smoothing outside 0..1.
    """
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing {label_smoothing} is not in 0 <= smoothing <= 1")
    if label_smoothing and vocab is None and group.size > 1:
        raise ValueError(f"label_smoothing {label_smoothing} on {group.size} ranks needs vocab")
    words = logits.shape[-1] if vocab is None else vocab
    law = _Law(group, first, ignore_index, label_smoothing, max(1, words), z_loss, overwrite)
    return _CrossEntropy.apply(logits, targets, law)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, law: _Law) -> Tensor:
        # [b, s, v_local] -> [n, v_local], n = b*s
        flat, wanted = logits.flatten(0, -2), targets.reshape(-1)
        valid = wanted != law.ignore_index
        column = _local_columns(wanted, valid, law.first, flat.shape[1])
        peak = law.group.all_reduce(_row_maximum(flat), op="max")
        target, total = _own_sums(flat, column, peak, law)
        target, total = law.group.all_reduce(target), law.group.all_reduce(total)
        ctx.save_for_backward(flat, column, valid, peak, total)
        ctx.shape, ctx.law = logits.shape, law
        loss = total.log().sub_(target)
        if law.z_loss:
            loss.add_(_log_sum(peak, total).square_(), alpha=law.z_loss)
        return loss.masked_fill_(~valid, 0.0).view(targets.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        flat, column, valid, peak, total = ctx.saved_tensors
        law = ctx.law
        weight = grad.reshape(-1).masked_fill(~valid, 0.0)
        hits = -(1 - law.smoothing) * weight * (column >= 0)
        share = weight / total
        if law.z_loss:
            share = share * _log_sum(peak, total).mul_(2 * law.z_loss).add_(1.0)
        result = flat if law.overwrite else torch.empty_like(flat)
        for rows in _row_blocks(flat):
            # softmax, times the incoming gradient, then less what the target has of it
            out = result[rows] if result.dtype == peak.dtype else None
            work = torch.sub(flat[rows], peak[rows, None], out=out).exp_()
            work.mul_(share[rows, None])
            if law.smoothing:
                work.sub_(weight[rows, None], alpha=law.spread)
            place, hit = column[rows, None].clamp(min=0), hits[rows, None]
            work.scatter_add_(1, place, hit.to(work.dtype))
            if out is None:
                result[rows] = work
        return result.view(ctx.shape), None, None


def _own_sums(flat: Tensor, column: Tensor, peak: Tensor, law: _Law) -> tuple[Tensor, Tensor]:
    """2 of [n]: this rank's part of the wanted logit, smoothed, and of the exponentials' sum."""
    target, total = torch.zeros_like(peak), torch.zeros_like(peak)
    for rows in _row_blocks(flat):
        shifted = torch.sub(flat[rows], peak[rows, None])
        own = shifted.gather(1, column[rows, None].clamp(min=0))[:, 0]
        own = own.masked_fill_(column[rows] < 0, 0.0)
        if law.smoothing:
            own = own.mul_(1 - law.smoothing).add_(shifted.sum(1), alpha=law.spread)
        target[rows] = own
        total[rows] = shifted.exp_().sum(1)
    return target, total


def _log_sum(peak: Tensor, total: Tensor) -> Tensor:
    """log sum_j exp(z_j) of each row, fresh."""
    return total.log().add_(peak)


def _row_maximum(flat: Tensor) -> Tensor:
    """[n, v_local] -> [n] in the dtype of the maths; -inf where there are no columns."""
    dtype = torch.float64 if flat.dtype == torch.float64 else torch.float32
    peak = flat.new_full(flat.shape[:1], -torch.inf, dtype=dtype)
    for rows in _row_blocks(flat):  # of 16 bits a CPU's maximum takes twice as long
        peak[rows] = flat[rows].to(dtype).amax(1)
    return peak


def _local_columns(targets: Tensor, valid: Tensor, first: int, width: int) -> Tensor:
    """Local column of each target, -1 where it is ignored or another rank's."""
    local = targets - first
    return local.masked_fill(~(valid & (local >= 0) & (local < width)), -1)


def _row_blocks(flat: Tensor) -> Iterator[slice]:
    count, width = flat.shape
    step = max(1, block_elements(flat.device) // max(1, width))
    return (slice(start, start + step) for start in range(0, count if width else 0, step))
