"""Head and cross entropy together, chunk by chunk of the tokens, over a vocabulary that stays split.

The logits of a chunk, X W^T of some rows of X, are freed before the next chunk's are made, so that the
logits of all tokens never exist (training.cross_entropy linear; chunk_rows of model/operators/loss.py).
Forward keeps of each row the maximum of this rank's words and the sum of their exponentials below it;
when all chunks are done, ranks reduce maxima, sums rescaled to the common maximum, and the target's
logit: three all-reduces of b*s floats, as many as over whole logits (cross_entropy.py). Backward makes
each chunk's logits again, writes their gradient dZ over them, and

    dX = dZ W of the chunk's rows        dW = dW + dZ^T X        both freed with the chunk

so that the head costs four products instead of three. X is saved as it came: under sequence
parallelism this rank's positions, gathered once for each pass. dX is summed over the ranks at the end.

By hand, maxima 1 and 3 and sums 2 and 1 on two ranks: 2 exp(1 - 3) + 1 below the maximum 3.

Letters: b batch, s sequence, h hidden, v vocabulary, t ranks of the group, n = b*s.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from mpctl.model.operators.loss import chunk_rows
from mpctl.train.kernels.backend import TORCH_BACKEND, KernelBackend
from mpctl.train.layers.cross_entropy import IGNORED
from mpctl.train.layers.mappings import SEQUENCE
from mpctl.train.layers.parameters import sink_of
from mpctl.train.transport.group import Group


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    group: Group,
    words: range,
    chunks: int | None = None,
    sequence_parallel: bool = False,
    backend: KernelBackend = TORCH_BACKEND,
) -> Tensor:
    """The loss of every position, [b, s], equal on every rank of `group`; differentiable.

    hidden: [b, s, h], or [b, s/t, h] with sequence_parallel. weight: this rank's rows [v/t, h] of the
    head's table, of which the first are its `words`, global ids; the rest is padding. targets: [b, s],
    global ids or IGNORED. chunks: into which the rows are cut; by default chunk_rows chooses.

    Losses are float32 (float64 for float64 hidden states).
    """
    split = sequence_parallel and group.size > 1
    return _LinearCrossEntropy.apply(hidden, weight, targets, group, words, chunks, split, backend)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        group: Group,
        words: range,
        chunks: int | None,
        split: bool,
        backend: KernelBackend,
    ) -> Tensor:
        # [b, s/t, h] -> [b, s, h] -> [n, h]
        rows = (group.all_gather(hidden, SEQUENCE) if split else hidden).flatten(0, -2)
        wanted = targets.reshape(-1)
        valid, local = wanted != IGNORED, wanted - words.start
        # of another rank's word, and of none, -1
        column = local.masked_fill(~(valid & (local >= 0) & (local < len(words))), -1)
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        peak, target, total = (rows.new_empty(len(rows), dtype=dtype) for _ in range(3))
        ctx.size = chunk_rows(len(rows), words=len(weight), hidden=weight.shape[1], chunks=chunks)
        for own in _chunks(len(rows), ctx.size):
            logits = F.linear(rows[own], weight)
            peak[own] = backend.row_maximum(logits, words=len(words))
            target[own], total[own] = backend.own_sums(logits, column[own], peak[own], words=len(words))
            del logits
        if group.size > 1:
            shift, peak = peak, group.all_reduce(peak.clone(), op="max")
            shift = shift.sub_(peak)  # -inf on a rank without words
            target = group.all_reduce(target.add_(shift).masked_fill_(column < 0, 0.0))
            total = group.all_reduce(total.mul_(shift.exp_()))
        ctx.save_for_backward(hidden, weight, column, valid, peak, total)
        ctx.group, ctx.words, ctx.split, ctx.backend, ctx.sink = group, len(words), split, backend, sink_of(weight)
        return total.log().sub_(target).masked_fill_(~valid, 0.0).view(targets.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, column, valid, peak, total = ctx.saved_tensors
        group: Group = ctx.group
        for_dx, for_dw = ctx.needs_input_grad[:2]
        whole = group.all_gather(hidden, SEQUENCE) if ctx.split else hidden
        rows = whole.flatten(0, -2)
        scale = grad.reshape(-1).masked_fill(~valid, 0.0)
        share, hits = scale / total, -scale * (column >= 0)
        dx = torch.empty_like(whole) if for_dx else None
        dw = torch.zeros_like(weight) if for_dw and ctx.sink is None else None
        for own in _chunks(len(rows), ctx.size):
            logits = F.linear(rows[own], weight)
            dz = ctx.backend.logits_gradient(
                logits, column[own], peak[own], share[own], hits[own], words=ctx.words, overwrite=True
            )
            if dx is not None:
                torch.mm(dz, weight, out=dx.flatten(0, -2)[own])
            if dw is not None:
                dw.addmm_(dz.t(), rows[own])
            elif for_dw:
                ctx.sink.add_product(dz, rows[own])
            del logits, dz
        del whole, rows
        if dx is not None:
            dx = group.reduce_scatter(dx, SEQUENCE) if ctx.split else group.all_reduce(dx)
        return dx, dw, *[None] * 6


def _chunks(count: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, count)) for start in range(0, count, max(1, size)))
