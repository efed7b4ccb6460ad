"""Normalisations over the last dimension, with parameters that carry their shard: replicated.

LayerNorm (arXiv 1607.06450): y = (x - mean) / sqrt(var + eps) * weight + bias.
RMSNorm (arXiv 1910.07467, equation 4): y = x / sqrt(mean(x^2) + eps) * weight.
Statistics are float32 for 16-bit inputs; every rank of the group computes the same whole. By hand,
weight 1, bias 0, eps 0: LayerNorm (1, 3) -> (-1, 1); RMSNorm (1, 7) -> (0.2, 1.4).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mpctl.kernels.backend import TORCH_BACKEND, KernelBackend
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
        backend: KernelBackend = TORCH_BACKEND,
    ) -> None:
        super().__init__()
        self.hidden, self.eps, self.backend = hidden, eps, backend
        whole = Shard((hidden,))
        self.weight = shard_parameter(whole, init=ONES, dtype=dtype, device=device)
        self.bias = shard_parameter(whole, init=ZEROS, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return self.backend.layer_norm(x, self.weight, self.bias, self.eps)

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
        backend: KernelBackend = TORCH_BACKEND,
    ) -> None:
        super().__init__()
        self.hidden, self.eps, self.backend = hidden, eps, backend
        self.weight = shard_parameter(Shard((hidden,)), init=ONES, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return self.backend.rms_norm(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.hidden} (replicated), eps={self.eps}"
