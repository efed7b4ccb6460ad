"""Cross entropy of logits that stay split over the vocabulary.

For logits z of a row with maximum m, loss = log(sum_j exp(z_j - m)) - (z_target - m), and
d loss / d z = softmax(z) - onehot(target) (arXiv 1909.08053, section 3). Three all-reduces of b*s
floats (the maximum, the target's logit, the sum) replace a gather of b*s*v logits. By hand, with
z = (0, 0 | 0, 0) on two ranks: m = 0, the sum is 2 + 2, the loss is log 4.

All is computed in float32 (in float64 for float64 logits), by three passes of the `KernelBackend`:
maximum, sums, gradient. The logits and two floats a row are saved for backward, which computes the
exponentials again. So the peak is the logits and their gradient, both in the logits' dtype; no
float32 copy of either exists. With `overwrite` the gradient takes the memory of the logits, and the
peak is the logits alone. Columns behind the words, which pad the table of a head, are not read, and
their gradient is 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mpctl.train.kernels.backend import TORCH_BACKEND, KernelBackend
from mpctl.train.transport.group import Group

IGNORED = -100  # as torch's cross entropy has it


def vocab_parallel_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    group: Group,
    first: int,
    words: int | None = None,
    overwrite: bool = False,
    backend: KernelBackend = TORCH_BACKEND,
) -> Tensor:
    """The loss of every position, [b, s], equal on every rank of `group`; differentiable.

    logits: [b, s, v_local], the words of this rank, then padding; v_local may be 0. words: how many
    of the columns are words, which may be none; by default all. targets: [b, s], global ids.
    first: global id of local column 0. A target IGNORED has loss and gradient 0; a mean over the
    other positions is the caller's. Any other target that no rank holds is treated as a word with
    logit m. overwrite: backward writes the gradient over the logits. A second backward then raises
    RuntimeError, and so does the backward of any other operation that saved the logits. backend:
    the kernels of the three passes.

    Losses are float32 (float64 for float64 logits).
    """
    words = logits.shape[-1] if words is None else words
    return _CrossEntropy.apply(logits, targets, group, first, words, overwrite, backend)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        group: Group,
        first: int,
        words: int,
        overwrite: bool,
        backend: KernelBackend,
    ) -> Tensor:
        # [b, s, v_local] -> [n, v_local], n = b*s
        flat, wanted = logits.flatten(0, -2), targets.reshape(-1)
        valid, local = wanted != IGNORED, wanted - first
        # of another rank's word, and of none, -1
        column = local.masked_fill(~(valid & (local >= 0) & (local < words)), -1)
        peak = group.all_reduce(backend.row_maximum(flat, words=words), op="max")
        target, total = backend.own_sums(flat, column, peak, words=words)
        target, total = group.all_reduce(target), group.all_reduce(total)
        ctx.save_for_backward(flat, column, valid, peak, total)
        ctx.words, ctx.overwrite, ctx.backend = words, overwrite, backend
        ctx.shape = logits.shape
        return total.log().sub_(target).masked_fill_(~valid, 0.0).view(targets.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        flat, column, valid, peak, total = ctx.saved_tensors
        weight = grad.reshape(-1).masked_fill(~valid, 0.0)
        hits = -weight * (column >= 0)
        result = ctx.backend.logits_gradient(
            flat, column, peak, weight / total, hits, words=ctx.words, overwrite=ctx.overwrite
        )
        return result.view(ctx.shape), *[None] * 6
