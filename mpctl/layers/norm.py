"""LayerNorm and RMSNorm over the last dimension; every tensor-parallel rank holds all parameters.

LayerNorm (arXiv 1607.06450): y = (x - mean) / sqrt(var + eps) * weight + bias.
RMSNorm (arXiv 1910.07467, equation 4): y = x / sqrt(mean(x^2) + eps) * weight.
Mean and variance of 16-bit inputs are computed in float32. There is no communication: each rank
normalises the positions that it holds. PlainLayerNorm is LayerNorm without weight and bias, as
OLMo has it (arXiv 2402.00838, section 2.1). By hand, with weight 1, bias 0 and eps 0: LayerNorm
maps (1, 3) to (-1, 1), RMSNorm maps (1, 7) to (0.2, 1.4).
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpctl.kernels.backend import TORCH_BACKEND, KernelBackend
from mpctl.layers.parameters import ONES, ZEROS, shard_parameter
from mpctl.shard import Shard

Norm = Literal["layernorm", "rmsnorm", "nonparametric"]


class LayerNorm(nn.Module):
    """LayerNorm [b, s, h] -> [b, s, h] with parameters `weight` and `bias`, both [h].

    backend: the kernels that compute it (`KernelBackend.layer_norm`).
    """

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
        """x [b, s, h] normalised over h, times `weight`, plus `bias`; same shape and dtype."""
        return self.backend.layer_norm(x, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.hidden} (replicated), eps={self.eps}"


class RMSNorm(nn.Module):
    """RMSNorm [b, s, h] -> [b, s, h]: no mean is subtracted, and there is no bias.

    Its one parameter is `weight` [h]. backend: the kernels that compute it
    (`KernelBackend.rms_norm`).
    """

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
        """x [b, s, h] divided by its root mean square over h, times `weight`; same shape."""
        return self.backend.rms_norm(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.hidden} (replicated), eps={self.eps}"


class PlainLayerNorm(nn.Module):
    """LayerNorm [b, s, h] -> [b, s, h] without parameters. dtype and device are of none."""

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
        self.hidden, self.eps = hidden, eps

    def forward(self, x: Tensor) -> Tensor:
        """x [b, s, h] normalised over h; same shape and dtype."""
        return F.layer_norm(x, (self.hidden,), eps=self.eps)

    def extra_repr(self) -> str:
        return f"{self.hidden}, eps={self.eps}"
