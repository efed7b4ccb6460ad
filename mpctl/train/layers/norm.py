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

from mpctl.train.kernels.backend import KernelBackend
from mpctl.train.layers.grid.norms import split_layer_norm, split_rms_norm
from mpctl.train.layers.parameters import shard_of
from mpctl.train.transport.group import Group

Norm = Literal["layernorm", "rmsnorm", "nonparametric"]


class ResidualNorm(nn.Module):
    """Base of the norms: of a tensor, or of the residual stream with the sum of a branch."""

    def forward(
        self, x: Tensor, branch: Tensor | None = None, *, forks: bool = False, branch_bias: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """x normalised over h; same shape and dtype. forks: returns x, plus `branch` if it is
        given, and the norm of that. Who goes on with the returned x has one gradient of it.
        branch_bias: a bias of the branch that gets its gradient here, where kernels do that."""
        return self._residual(x, branch, branch_bias) if forks else self._normed(x)

    def _normed(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def _residual(self, x: Tensor, branch: Tensor | None, branch_bias: Tensor | None) -> tuple[Tensor, Tensor]:
        total = x if branch is None else x + branch
        return total, self._normed(total)


class LayerNorm(ResidualNorm):
    """LayerNorm [b, s, h/q] -> [b, s, h/q] with parameters `weight` and `bias`, both [h/q].

    backend: the kernels that compute it (`KernelBackend.layer_norm`). group: the ranks that hold
    the other parts of a row.
    """

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter, *, eps: float, backend: KernelBackend, group: Group
    ) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = weight, bias, eps
        self.backend, self.group = backend, group

    def _normed(self, x: Tensor) -> Tensor:
        if self.group.size > 1:
            return split_layer_norm(x, self.weight, self.bias, self.eps, self.group)
        return self.backend.layer_norm(x, self.weight, self.bias, self.eps)

    def _residual(self, x: Tensor, branch: Tensor | None, branch_bias: Tensor | None) -> tuple[Tensor, Tensor]:
        if self.group.size > 1:
            return super()._residual(x, branch, branch_bias)
        return self.backend.residual_norm(
            x, branch, self.weight, self.bias, self.eps, centred=True, branch_bias=branch_bias
        )

    def extra_repr(self) -> str:
        return _sizes(self.weight, self.eps)


class RMSNorm(ResidualNorm):
    """RMSNorm [b, s, h/q] -> [b, s, h/q]: x over its root mean square, times `weight`. No mean is
    subtracted, and there is no bias.

    Its one parameter is `weight` [h/q]. backend, group: as LayerNorm's.
    """

    def __init__(self, weight: nn.Parameter, *, eps: float, backend: KernelBackend, group: Group) -> None:
        super().__init__()
        self.weight, self.eps, self.backend, self.group = weight, eps, backend, group

    def _normed(self, x: Tensor) -> Tensor:
        if self.group.size > 1:
            return split_rms_norm(x, self.weight, self.eps, self.group)
        return self.backend.rms_norm(x, self.weight, self.eps)

    def _residual(self, x: Tensor, branch: Tensor | None, branch_bias: Tensor | None) -> tuple[Tensor, Tensor]:
        if self.group.size > 1:
            return super()._residual(x, branch, branch_bias)
        return self.backend.residual_norm(
            x, branch, self.weight, None, self.eps, centred=False, branch_bias=branch_bias
        )

    def extra_repr(self) -> str:
        return _sizes(self.weight, self.eps)


class PlainLayerNorm(ResidualNorm):
    """LayerNorm [b, s, h] -> [b, s, h] without parameters, of unsplit rows."""

    def __init__(self, hidden: int, *, eps: float) -> None:
        super().__init__()
        self.hidden, self.eps = hidden, eps

    def _normed(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (self.hidden,), eps=self.eps)

    def extra_repr(self) -> str:
        return f"{self.hidden}, eps={self.eps}"


def _sizes(weight: Tensor, eps: float) -> str:
    return f"{len(weight)} of {shard_of(weight).shape[0]}, eps={eps}"
