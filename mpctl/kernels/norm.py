"""Normalisations over the last dimension, with parameters that carry their shard: replicated.

LayerNorm (arXiv 1607.06450): y = (x - mean) / sqrt(var + eps) * weight + bias.
RMSNorm (arXiv 1910.07467, equation 4): y = x / sqrt(mean(x^2) + eps) * weight.
Statistics are float32 for 16-bit inputs; every rank of the group computes the same whole. By hand,
weight 1, bias 0, eps 0: LayerNorm (1, 3) -> (-1, 1); RMSNorm (1, 7) -> (0.2, 1.4).

RMSNorm's backward, with u = x / rms, g = dY weight: dX = (g - u mean(g u)) / rms, d weight = the
sum of dY u over rows. Kept are x and one number a row. On CPU torch spells the norm out in float32
and keeps all of it: of 16-bit inputs 8 bytes an element more.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mpctl.kernels.parameters import ONES, ZEROS, Shard, shard_parameter


class LayerNorm(nn.Module):
    """[b, s, h] -> [b, s, h]."""

    def __init__(
        self,
        hidden: int,
        *,
        eps: float = 1e-5,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.hidden, self.eps = hidden, eps
        whole = Shard((hidden,))
        self.weight = shard_parameter(whole, init=ONES, dtype=dtype, device=device)
        self.bias = shard_parameter(whole, init=ZEROS, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (self.hidden,), self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.hidden} (replicated), eps={self.eps}"


class RMSNorm(nn.Module):
    """[b, s, h] -> [b, s, h], neither centred nor shifted: half of LayerNorm's parameters."""

    def __init__(
        self,
        hidden: int,
        *,
        eps: float = 1e-5,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.hidden, self.eps = hidden, eps
        self.weight = shard_parameter(Shard((hidden,)), init=ONES, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu":
            return _RMSNorm.apply(x, self.weight, self.eps)
        return F.rms_norm(x, (self.hidden,), self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.hidden} (replicated), eps={self.eps}"


class _RMSNorm(torch.autograd.Function):
    """All in float32 (float64 for float64), rounded once at the end. Inputs are converted first: a
    product of 16 and 32 bits takes a CPU several times as long."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
        # [b, s, h] -> [b, s, 1]
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        inverse = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return (wide * inverse).mul_(weight.to(wide.dtype)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, inverse = ctx.saved_tensors
        scale, wide = weight.to(inverse.dtype), grad.to(inverse.dtype)
        unit, dx = x.to(inverse.dtype) * inverse, None
        along = wide * unit
        dw = along.flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        if ctx.needs_input_grad[0]:
            # [b, s, h] x [h] -> [b, s, 1]
            mean = (along @ scale)[..., None].div_(x.shape[-1])
            dx = torch.mul(wide, scale, out=along).addcmul_(unit, mean, value=-1).mul_(inverse)
        return None if dx is None else dx.to(x.dtype), dw, None
