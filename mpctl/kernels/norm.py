"""Layer normalisation (arXiv 1607.06450) with parameters that carry their shard: replicated.

y = (x - mean) / sqrt(var + eps) * weight + bias over the last dimension; every rank of the group
computes the same whole. By hand: (1, 3) -> (-1, 1) for weight 1, bias 0, eps 0.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
