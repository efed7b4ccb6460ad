"""Cross entropy of logits that stay split over the vocabulary.

For logits z of a row with maximum m, loss = log(sum_j exp(z_j - m)) - (z_target - m), and
d loss / d z = softmax(z) - onehot(target) (arXiv 1909.08053, section 3). Three all-reduces of b*s
floats (the maximum, the target's logit, the sum) replace a gather of b*s*v logits. By hand, with
z = (0, 0 | 0, 0) on two ranks: m = 0, the sum is 2 + 2, the loss is log 4.

Label smoothing by e (arXiv 1512.00567, section 7) replaces onehot by (1-e) onehot + e/v, v being
the number of words over all ranks: loss = log sum - (1-e) (z_target - m) - e/v sum_j (z_j - m).
Each rank adds its share of the last sum to its share of the target's logit before the all-reduce
of the latter, so that smoothing sends nothing more. By hand, the example above with e = 0.5 still
has the loss log 4.

A z-loss with coefficient c (arXiv 2204.02311, section 5) adds c lse^2 to the loss, with
lse = m + log sum, and 2 c lse softmax(z) to the gradient.

All is computed in float32 (in float64 for float64 logits), a block of rows at a time. Backward
saves the logits and two floats a row, and computes the exponentials again. So the peak is the
logits and their gradient, both in the logits' dtype; no float32 copy of either exists. With
`overwrite` the gradient takes the memory of the logits, and the peak is the logits alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mpctl.kernels.counter_rng import block_elements
from mpctl.transport.group import Group

IGNORED = -100  # as torch's cross entropy has it


@dataclass(frozen=True)
class _Law:
    """The settings of one loss: which words the local columns are, and the terms of the loss."""

    group: Group
    first: int
    ignore_index: int
    smoothing: float
    vocab: int
    z_loss: float
    overwrite: bool

    @property
    def spread(self) -> float:
        """Probability that label smoothing gives to every word: e / v."""
        return self.smoothing / self.vocab


def vocab_parallel_cross_entropy(
    logits: Tensor, targets: Tensor, *, group: Group, first: int, ignore_index: int = IGNORED,
    label_smoothing: float = 0.0, vocab: int | None = None, z_loss: float = 0.0,
    overwrite: bool = False,
) -> Tensor:  # fmt: skip
    """The loss of every position, [b, s], equal on every rank of `group`; differentiable.

    logits: [b, s, v_local], the words of this rank; v_local may be 0. targets: [b, s], global ids.
    first: global id of local column 0.
    ignore_index: a target with this value has loss and gradient 0; a mean over the other positions
    is the caller's. Any other target that no rank holds is treated as a word with logit m.
    label_smoothing: e, in 0..1. vocab: words over all ranks, without padding; needed for label
    smoothing on more than one rank. z_loss: the coefficient c.
    overwrite: backward writes the gradient over the logits. A second backward then raises
    RuntimeError, and so does the backward of any other operation that saved the logits.

    Losses are float32 (float64 for float64 logits). Raises ValueError if label_smoothing is outside
    0..1, or if it needs `vocab`.
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
    """This rank's shares of the target's (smoothed) logit and of the sum of exponentials: 2 x [n].

    Summed over the ranks they are the values of the module docstring.
    """
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
    """log sum_j exp(z_j) of each row, as a new tensor [n]."""
    return total.log().add_(peak)


def _row_maximum(flat: Tensor) -> Tensor:
    """Maximum of each row, [n, v_local] -> [n], in float32 or float64; -inf without columns."""
    dtype = torch.float64 if flat.dtype == torch.float64 else torch.float32
    peak = flat.new_full(flat.shape[:1], -torch.inf, dtype=dtype)
    for rows in _row_blocks(flat):  # in 16 bits amax takes twice as long on a CPU
        peak[rows] = flat[rows].to(dtype).amax(1)
    return peak


def _local_columns(targets: Tensor, valid: Tensor, first: int, width: int) -> Tensor:
    """Local column of each target; -1 if it is ignored or a word of another rank."""
    local = targets - first
    return local.masked_fill(~(valid & (local >= 0) & (local < width)), -1)


def _row_blocks(flat: Tensor) -> Iterator[slice]:
    count, width = flat.shape
    step = max(1, block_elements(flat.device) // max(1, width))
    return (slice(start, start + step) for start in range(0, count if width else 0, step))
