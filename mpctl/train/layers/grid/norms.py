"""Norms of rows of which each of q ranks holds an equal part, on a grid that cuts hidden states.

LayerNorm (arXiv 1607.06450) needs the mean and the variance of a full row. Each of the q ranks
computes the mean m_j and the sum of squares M_j about it of its n = h/q numbers; one all-gather of
these two a row gives, without a difference of large numbers (Chan, Golub and LeVeque, 1983),

    mean = sum_j m_j / q        h var = sum_j M_j + n sum_j (m_j - mean)^2

RMSNorm (arXiv 1910.07467) needs the sum of squares alone: one all-reduce of a number a row.
Backward of y = x^ w + b with x^ = (x - mean) r, r = 1/sqrt(var + eps), g = dy w, is

    dx = r (g - sum(g)/h - x^ sum(g x^)/h)

where the two sums (RMSNorm: the second alone) are one all-reduce. Statistics are computed in
float32 at least. The gradients of weight and bias, both [h/q], are sums over the rank's own samples
only (`parameters.partial_kind`). Saved for backward: x and one or two numbers a row.

Letters: b batch, s sequence, h hidden, q ranks of the group.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mpctl.train.transport.group import Group


def split_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, group: Group) -> Tensor:
    """x [b, s, h/q] normalised over all of h, times weight, plus bias; same shape and dtype."""
    result: Tensor = _LayerNorm.apply(x, weight, bias, eps, group)
    return result


def split_rms_norm(x: Tensor, weight: Tensor, eps: float, group: Group) -> Tensor:
    """x [b, s, h/q] divided by its root mean square over all of h, times weight; same shape and
    dtype."""
    result: Tensor = _RMSNorm.apply(x, weight, eps, group)
    return result


def _wide(x: Tensor) -> Tensor:
    """[b, s, h/q] -> [b*s, h/q] in float32 at least."""
    return x.flatten(0, -2).to(torch.promote_types(x.dtype, torch.float32))


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, group: Group) -> Tensor:
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
