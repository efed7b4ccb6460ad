"""The product of a column-parallel layer, whose backward computes while its messages travel.

Y = X W^T + b with W [o/t, i] (arXiv 1909.08053, section 3). Backward has two products and one sum:

    dX = dY W      partial: summed over the group
    dW = dY^T X    complete: needs no message          db = dY summed over rows

dX comes first, its sum is started, and dW and db are computed before it is waited for; so the
message is hidden where dW takes longer. With sequence parallelism (arXiv 2205.05198, section 4.2.2)
X is kept as the shard [b, s/t, i]; its second all-gather travels while dX is computed, then the
reduce-scatter of dX while dW is. A weight with a `DeferredWgrad` has dW, and the gathering of X,
deferred (deferred_wgrad.py). What needs no gradient costs neither product nor message.

By hand, t=2, i=h, 32-bit, b=1, s=8, h=16: each message is 512 bytes whole.

Letters: b batch, s sequence, i in, o out, t ranks of the group.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from mpctl.kernels.parameters import deferred_wgrad_of
from mpctl.kernels.regions import SEQUENCE
from mpctl.transport.group import Group, Pending


def column_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: Group,
    sequence_parallel: bool = False,
) -> Tensor:
    """x [b, s, i], equal on every rank, by weight [o/t, i] -> [b, s, o/t]; backward sums dX.

    sequence_parallel: x is this rank's [b, s/t, i], and so is dX. A group of one is F.linear.
    """
    if group.size == 1 and deferred_wgrad_of(weight) is None:
        return F.linear(x, weight, bias)
    return _ColumnProduct.apply(x, weight, bias, group, sequence_parallel)


def save_operands(ctx: Any, x: Tensor, weight: Tensor) -> None:
    """Keep what the backward of X W^T needs: X for dW, W for dX; where one of them needs no
    gradient, the other is not kept. ctx: of a function whose first two arguments they are."""
    for_dx, for_dw = ctx.needs_input_grad[:2]
    ctx.save_for_backward(x if for_dw else None, weight if for_dx else None)


class _ColumnProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, split: bool
    ) -> Tensor:
        ctx.group, ctx.split, ctx.deferred = group, split, deferred_wgrad_of(weight)
        ctx.leaf = weight if ctx.deferred else None
        save_operands(ctx, x, weight)
        # [b, s/t, i] -> [b, s, i] -> [b, s, o/t]
        return F.linear(group.all_gather(x, SEQUENCE) if split else x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        is_deferred = ctx.deferred is not None and x is not None
        group, split = ctx.group, ctx.split
        whole = None if x is None or is_deferred else _gathering(x, group, split)
        # [b, s, o/t] -> [b*s, o/t]
        rows = grad.flatten(0, -2)
        dx = None
        if weight is not None:
            dx = start_sum((rows @ weight).view(*grad.shape[:-1], -1), group, split=split)
        db = rows.sum(0) if ctx.needs_input_grad[2] else None
        # [o/t, b*s] x [b*s, i] -> [o/t, i]
        dw = None if whole is None else rows.T @ whole.wait().flatten(0, -2)
        if is_deferred:
            values = x.detach()  # x itself and ctx would keep the graph, and all that it ends in
            ctx.deferred.add(
                ctx.leaf, lambda: rows.T @ _gathering(values, group, split).wait().flatten(0, -2)
            )
        return None if dx is None else dx.wait(), dw, db, None, None


def _gathering(x: Tensor, group: Group, split: bool) -> Pending:
    return group.start_all_gather(x, SEQUENCE) if split else Pending(x)


def start_sum(dx: Tensor, group: Group, *, split: bool) -> Pending:
    """Begin to sum dX [b, s, i], partial and read by nobody else, over the ranks; split: to this
    rank's [b, s/t, i], else whole."""
    if split:
        return group.start_reduce_scatter(dx, SEQUENCE)
    return group.start_all_reduce(dx)
