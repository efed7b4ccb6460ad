"""The transformer's MLP split over a group: Z = act(X A + a) B + b.

Megatron-LM (arXiv 1909.08053, section 3, figure 3a): A by columns, so that the nonlinearity needs
no sync (GeLU(X1 A1 + X2 A2) != GeLU(X1 A1) + GeLU(X2 A2)), B by rows; one all-reduce of b*s*h
forward (g) and one backward (f). By hand: ffn 8 on t=2 keeps 4 columns of A and 4 rows of B.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpctl.kernels.group import Group
from mpctl.kernels.linear import ColumnParallelLinear, RowParallelLinear
from mpctl.kernels.parameters import Init

Activation = Literal["gelu", "gelu_tanh", "relu", "silu"]

# gelu is exact (arXiv 1606.08415), gelu_tanh the approximation that GPT-2 was trained with.
_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


class ParallelMLP(nn.Module):
    """[b, s, h] -> [b, s, f/t] -> [b, s, h]."""

    def __init__(
        self,
        hidden: int,
        ffn: int,
        *,
        group: Group,
        activation: Activation = "gelu",
        bias: bool = True,
        init_std: float = 0.02,
        output_std: float | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if activation not in _ACTIVATIONS:
            raise ValueError(f"activation {activation!r} is not one of {', '.join(_ACTIVATIONS)}")
        self.activation: Activation = activation
        inner, outer = Init("normal", init_std), Init("normal", output_std or init_std)
        self.up = ColumnParallelLinear(
            hidden, ffn, group=group, bias=bias, init=inner, dtype=dtype, device=device
        )
        self.down = RowParallelLinear(
            ffn, hidden, group=group, bias=bias, init=outer, dtype=dtype, device=device
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down(_ACTIVATIONS[self.activation](self.up(x)))

    def extra_repr(self) -> str:
        return f"activation={self.activation}"
