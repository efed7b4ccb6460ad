"""LayerNorm and RMSNorm over hidden states of which each rank of a group holds one part.

LayerNorm (arXiv 1607.06450) needs the mean and the variance of a whole row. Each of the q ranks
computes the mean m_j and the sum of squares M_j about it of its n = h/q numbers; one all-gather of
these two a row gives, without a difference of large numbers (Chan, Golub and LeVeque, 1983),

    mean = sum_j m_j / q        h var = sum_j M_j + n sum_j (m_j - mean)^2

RMSNorm (arXiv 1910.07467) needs the sum of squares alone: one all-reduce of a number a row.
Backward of y = x^ w + b with x^ = (x - mean) r, r = 1/sqrt(var + eps), g = dy w, is

    dx = r (g - sum(g)/h - x^ sum(g x^)/h)

where the two sums (RMSNorm: the second alone) are one all-reduce. Statistics are computed in
float32 at least. A rank holds h/q of weight and bias; their gradients are sums over its own samples
only (parameters.mark_partial). Kept for backward: x and one or two numbers a row.

By hand, (1, 3 | 5, 7) on two ranks: m = 2 and 6, M = 2 and 2; mean 4, variance
(4 + 2 (4 + 4)) / 4 = 5.

Letters: b batch, s sequence, h hidden, q ranks of the group.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mpctl.kernels.parameters import ONES, ZEROS, mark_partial, shard_parameter
from mpctl.shard import Shard
from mpctl.transport.group import Group


class SplitNorm(nn.Module):
    """Base of the norms over split hidden states, [b, s, h/q] -> [b, s, h/q].

    shard: this rank's part of a vector [h]. group: the ranks that hold the other parts. partial:
    the group over which the gradients of its parameters are partial sums, empty for none.
    """

    def __init__(
        self,
        shard: Shard,
        group: Group,
        *,
        partial: str,
        bias: bool,
        eps: float,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        (self.hidden,), self.group, self.eps = shard.shape, group, eps
        self.weight = shard_parameter(shard, init=ONES, dtype=dtype, device=device)
        if bias:
            self.bias = shard_parameter(shard, init=ZEROS, dtype=dtype, device=device)
        mark_partial(self, partial)

    def extra_repr(self) -> str:
        """Hidden size, here and in all, and eps, for `print(module)`."""
        return f"{len(self.weight)} of {self.hidden}, eps={self.eps}"


class SplitLayerNorm(SplitNorm):
    """LayerNorm with `weight` and `bias`, both [h/q]."""

    def forward(self, x: Tensor) -> Tensor:
        """x [b, s, h/q] normalised over all of h; same shape and dtype."""
        result: Tensor = _LayerNorm.apply(x, self.weight, self.bias, self.eps, self.group)
        return result


class SplitRMSNorm(SplitNorm):
    """RMSNorm with `weight` [h/q]: no mean is subtracted, and there is no bias."""

    def forward(self, x: Tensor) -> Tensor:
        """x [b, s, h/q] divided by its root mean square over all of h; same shape and dtype."""
        result: Tensor = _RMSNorm.apply(x, self.weight, self.eps, self.group)
        return result


def _wide(x: Tensor) -> Tensor:
    """[b, s, h/q] -> [b*s, h/q] in float32 at least."""
    return x.flatten(0, -2).to(torch.promote_types(x.dtype, torch.float32))


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, group: Group
    ) -> Tensor:
        rows = _wide(x)
        n = rows.shape[1]
        # 2 of [b*s] -> [q, 2, b*s]
        squares, own = torch.var_mean(rows, dim=1, correction=0)
        parts = group.all_gather(torch.stack((own, squares.mul_(n)))[None], 0)
        mean = parts[:, 0].mean(0)
        spread = parts[:, 1].sum(0) + n * (parts[:, 0] - mean).square().sum(0)
        scale = spread.div_(n * group.size).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.group = group
        normed = rows.sub(mean[:, None]).mul_(scale[:, None])
        return torch.addcmul(bias, normed, weight).to(x.dtype).view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, scale = ctx.saved_tensors
        normed = _wide(x).sub(mean[:, None]).mul_(scale[:, None])
        rows = _wide(grad)
        dw, db = torch.linalg.vecdot(rows, normed, dim=0), rows.sum(0)
        dw, db = dw.to(weight.dtype), db.to(weight.dtype)
        if not ctx.needs_input_grad[0]:
            return None, dw, db, None, None
        inner = rows * weight
        sums = torch.stack((inner.sum(1), torch.linalg.vecdot(inner, normed, dim=1)))
        first, second = ctx.group.all_reduce(sums).div_(x.shape[-1] * ctx.group.size)
        inner.sub_(first[:, None]).sub_(normed.mul_(second[:, None])).mul_(scale[:, None])
        return inner.to(x.dtype).view(x.shape), dw, db, None, None


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, group: Group) -> Tensor:
        rows = _wide(x)
        squares = group.all_reduce(torch.linalg.vecdot(rows, rows, dim=1))
        scale = squares.div_(rows.shape[1] * group.size).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        ctx.group = group
        return (rows * scale[:, None]).mul_(weight).to(x.dtype).view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        normed = _wide(x) * scale[:, None]
        rows = _wide(grad)
        dw = torch.linalg.vecdot(rows, normed, dim=0).to(weight.dtype)
        if not ctx.needs_input_grad[0]:
            return None, dw, None, None
        inner = rows * weight
        sums = ctx.group.all_reduce(torch.linalg.vecdot(inner, normed, dim=1))
        mean = sums.div_(x.shape[-1] * ctx.group.size)
        inner.sub_(normed.mul_(mean[:, None])).mul_(scale[:, None])
        return inner.to(x.dtype).view(x.shape), dw, None, None
