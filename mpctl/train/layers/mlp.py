"""The transformer's MLP split over a group: Z = act(X A + a) B + b, or with a gate.

Megatron-LM (arXiv 1909.08053, section 3, figure 3a): A by columns, so that the nonlinearity needs
no sync (GeLU(X1 A1 + X2 A2) != GeLU(X1 A1) + GeLU(X2 A2)), B by rows; one all-reduce of b*s*h
forward (g) and one backward (f). By hand: ffn 8 on t=2 keeps 4 columns of A and 4 rows of B.

Gated (arXiv 2002.05202, section 2: swiglu, geglu): Z = (act(X G + g) * (X A + a)) B + b, where G
and A are one fused product [gate | up], each part split separately: ffn 8 on t=2, rank 1: columns
4..8 and 12..16. Saved for backward: the fused product and the input of B, 3 f/t a token.
geglu_tanh, with the approximate gelu, is T5 1.1's gated-gelu.

Letters: b batch, s sequence, h hidden, f ffn, t ranks of the group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from torch import Tensor, nn

from mpctl.train.kernels.activation import GATED, Activation
from mpctl.train.layers.config import InitialValues, check_known, check_positive
from mpctl.train.layers.linear import summed_bias
from mpctl.train.layers.shard_context import ShardContext


@dataclass(frozen=True)
class MLPConfig(InitialValues):
    """Two matrices with an activation between them: hidden -> ffn -> hidden.

    activation: swiglu, geglu and geglu_tanh are gated (arXiv 2002.05202), with two matrices instead
    of the first. bias, init_std, output_std: as AttentionConfig's. Raises ValueError for an unknown
    activation or a width below 1.
    """

    hidden: int
    ffn: int
    activation: Activation = "gelu"
    bias: bool = True
    init_std: float = 0.02
    output_std: float | None = None

    def __post_init__(self) -> None:
        check_positive(hidden=self.hidden, ffn=self.ffn)
        check_known("activation", self.activation, get_args(Activation))

    @property
    def is_gated(self) -> bool:
        """Whether there are two first matrices, one of which gates the other."""
        return self.activation in GATED

    def build(self, shard_context: ShardContext, name: str = "mlp") -> ParallelMLP:
        """The module of this rank; nothing in it depends on its name."""
        return ParallelMLP(self, shard_context)


class ParallelMLP(nn.Module):
    """[b, s, h] -> [b, s, f/t] -> [b, s, h]; with sequence parallelism from and to [b, s/t, h].

    Raises ValueError where ffn cannot be split over the tensor-parallel ranks.
    """

    def __init__(self, config: MLPConfig, shard_context: ShardContext) -> None:
        super().__init__()
        self.activation: Activation = config.activation
        self.backend = shard_context.backend
        parts = (config.ffn, config.ffn) if config.is_gated else (config.ffn,)
        layers, h, bias = shard_context.layers, config.hidden, config.bias
        self.up = layers.column_linear(h, sum(parts), bias=bias, init=config.init, parts=parts)
        self.down = layers.row_linear(config.ffn, h, bias=bias, init=config.output_init)

    def forward(self, x: Tensor, **how: bool) -> Tensor:
        """See the class; the activation, or gate, is elementwise on this rank's columns. how: as
        RowParallelLinear's."""
        down: Tensor = self.down(self._activated(x), **how)
        return down

    def _activated(self, x: Tensor) -> Tensor:
        bias = summed_bias(self.up, self.backend, self.activation)
        if bias is None:
            return self.backend.activation(self.up(x), self.activation)
        up = self.up(x, bias_gradient=False)
        return self.backend.summed_activation(up, self.activation, bias)

    def extra_repr(self) -> str:
        return f"activation={self.activation}"
