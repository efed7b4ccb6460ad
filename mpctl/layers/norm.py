"""LayerNorm and RMSNorm over the last dimension.

LayerNorm (arXiv 1607.06450): y = (x - mean) / sqrt(var + eps) * weight + bias.
RMSNorm (arXiv 1910.07467, equation 4): y = x / sqrt(mean(x^2) + eps) * weight.
Mean and variance of 16-bit inputs are computed in float32. PlainLayerNorm is LayerNorm without
weight and bias, as OLMo has it (arXiv 2402.00838, section 2.1). By hand, with weight 1, bias 0 and
eps 0: LayerNorm maps (1, 3) to (-1, 1), RMSNorm maps (1, 7) to (0.2, 1.4).

There is no communication: each rank normalises the positions that it holds. Only on a grid whose
ranks hold parts of a row do they exchange statistics (grid/norms.py).

Letters: b batch, s sequence, h hidden, q ranks that hold parts of a row.
"""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from mpctl.kernels.backend import KernelBackend
from mpctl.layers.grid.norms import split_layer_norm, split_rms_norm
from mpctl.layers.parameters import shard_of
from mpctl.transport.group import Group

Norm = Literal["layernorm", "rmsnorm", "nonparametric"]


class LayerNorm(nn.Module):
    """LayerNorm [b, s, h/q] -> [b, s, h/q] with parameters `weight` and `bias`, both [h/q].

    backend: the kernels that compute it (`KernelBackend.layer_norm`). group: the ranks that hold
    the other parts of a row.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter,
        *,
        eps: float,
        backend: KernelBackend,
        group: Group,
    ) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = weight, bias, eps
        self.backend, self.group = backend, group

    def forward(self, x: Tensor) -> Tensor:
        """x normalised over h, times `weight`, plus `bias`; same shape and dtype."""
        if self.group.size > 1:
            return split_layer_norm(x, self.weight, self.bias, self.eps, self.group)
        return self.backend.layer_norm(x, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return _sizes(self.weight, self.eps)


class RMSNorm(nn.Module):
    """RMSNorm [b, s, h/q] -> [b, s, h/q]: no mean is subtracted, and there is no bias.

    Its one parameter is `weight` [h/q]. backend, group: as LayerNorm's.
    """

    def __init__(
        self, weight: nn.Parameter, *, eps: float, backend: KernelBackend, group: Group
    ) -> None:
        super().__init__()
        self.weight, self.eps, self.backend, self.group = weight, eps, backend, group

    def forward(self, x: Tensor) -> Tensor:
        """x divided by its root mean square over h, times `weight`; same shape and dtype."""
        if self.group.size > 1:
            return split_rms_norm(x, self.weight, self.eps, self.group)
        return self.backend.rms_norm(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        return _sizes(self.weight, self.eps)


class PlainLayerNorm(nn.Module):
    """LayerNorm [b, s, h] -> [b, s, h] without parameters, of unsplit rows."""

    def __init__(self, hidden: int, *, eps: float) -> None:
        super().__init__()
        self.hidden, self.eps = hidden, eps

    def forward(self, x: Tensor) -> Tensor:
        """x [b, s, h] normalised over h; same shape and dtype."""
        return F.layer_norm(x, (self.hidden,), eps=self.eps)

    def extra_repr(self) -> str:
        return f"{self.hidden}, eps={self.eps}"


def _sizes(weight: Tensor, eps: float) -> str:
    return f"{len(weight)} of {shard_of(weight).shape[0]}, eps={eps}"
