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

All is computed in float32 (in float64 for float64 logits), by three passes of the `KernelBackend`:
maximum, sums, gradient (kernels/cross_entropy.py). Backward saves the logits and two floats a row,
and computes the exponentials again. So the peak is the logits and their gradient, both in the
logits' dtype; no float32 copy of either exists. With `overwrite` the
gradient takes the memory of the logits, and the peak is the logits alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mpctl.kernels.backend import TORCH_BACKEND, KernelBackend
from mpctl.transport.group import Group

IGNORED = -100  # as torch's cross entropy has it


@dataclass(frozen=True)
class _Law:
    """The settings of one loss: which words the local columns are, and the terms of the loss."""

    group: Group
    backend: KernelBackend
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
    overwrite: bool = False, backend: KernelBackend = TORCH_BACKEND,
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
    backend: the kernels of the three passes.

    Losses are float32 (float64 for float64 logits). Raises ValueError if label_smoothing is outside
    0..1, or if it needs `vocab`.
    """
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing {label_smoothing} is not in 0 <= smoothing <= 1")
    if label_smoothing and vocab is None and group.size > 1:
        raise ValueError(f"label_smoothing {label_smoothing} on {group.size} ranks needs vocab")
    words = logits.shape[-1] if vocab is None else vocab
    law = _Law(
        group, backend, first, ignore_index, label_smoothing, max(1, words), z_loss, overwrite
    )
    return _CrossEntropy.apply(logits, targets, law)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, law: _Law) -> Tensor:
        # [b, s, v_local] -> [n, v_local], n = b*s
        flat, wanted = logits.flatten(0, -2), targets.reshape(-1)
        valid = wanted != law.ignore_index
        column = _local_columns(wanted, valid, law.first, flat.shape[1])
        peak = law.group.all_reduce(law.backend.row_maximum(flat), op="max")
        target, total = law.backend.own_sums(flat, column, peak, law.smoothing, law.spread)
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
        shift = weight * law.spread if law.smoothing else None
        result = law.backend.logits_gradient(
            flat, column, peak, share, shift, hits, overwrite=law.overwrite
        )
        return result.view(ctx.shape), None, None


def _log_sum(peak: Tensor, total: Tensor) -> Tensor:
    """log sum_j exp(z_j) of each row, as a new tensor [n]."""
    return total.log().add_(peak)


def _local_columns(targets: Tensor, valid: Tensor, first: int, width: int) -> Tensor:
    """Local column of each target; -1 if it is ignored or a word of another rank."""
    local = targets - first
    return local.masked_fill(~(valid & (local >= 0) & (local < width)), -1)
