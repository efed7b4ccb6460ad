"""The transformer's MLP split over a group: Z = act(X A + a) B + b, or with a gate.

Megatron-LM (arXiv 1909.08053, section 3, figure 3a): A by columns, so that the nonlinearity needs
no sync (GeLU(X1 A1 + X2 A2) != GeLU(X1 A1) + GeLU(X2 A2)), B by rows; one all-reduce of b*s*h
forward (g) and one backward (f). By hand: ffn 8 on t=2 keeps 4 columns of A and 4 rows of B.

Gated (arXiv 2002.05202, section 2: swiglu, geglu): Z = (act(X G + g) * (X A + a)) B + b, where G
and A are one fused product [gate | up], each part split by itself: ffn 8 on t=2, rank 1: columns
4..8 and 12..16. Kept for backward: the fused product and what B multiplies, 3 f/t a token.
geglu_tanh, with the approximate gelu, is T5 1.1's gated-gelu.

Letters: b batch, s sequence, h hidden, f ffn, t ranks of the group.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpctl.kernels.linear import ColumnParallelLinear, RowParallelLinear
from mpctl.kernels.parameters import Init
from mpctl.transport.group import Group

Activation = Literal["gelu", "gelu_tanh", "relu", "silu", "swiglu", "geglu", "geglu_tanh"]

# gelu is exact (arXiv 1606.08415), gelu_tanh the approximation that GPT-2 was trained with.
_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}
_GATES: dict[Activation, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,
    "geglu": F.gelu,
    "geglu_tanh": _ACTIVATIONS["gelu_tanh"],
}


def activation_of(name: Activation) -> Callable[[Tensor], Tensor]:
    """The function itself; of a gated MLP, its gate's."""
    return {**_ACTIVATIONS, **_GATES}[name]


class ParallelMLP(nn.Module):
    """[b, s, h] -> [b, s, f/t] -> [b, s, h]; with sequence_parallel from and to [b, s/t, h]."""

    def __init__(
        self,
        hidden: int,
        ffn: int,
        *,
        group: Group,
        activation: Activation = "gelu",
        bias: bool = True,
        sequence_parallel: bool = False,
        init_std: float = 0.02,
        output_std: float | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        known = {**_ACTIVATIONS, **_GATES}
        if activation not in known:
            raise ValueError(f"activation {activation!r} is not one of {', '.join(known)}")
        self.activation: Activation = activation
        parts = (ffn, ffn) if activation in _GATES else (ffn,)
        inner, outer = Init("normal", init_std), Init("normal", output_std or init_std)
        self.up = ColumnParallelLinear(
            hidden, sum(parts), group=group, parts=parts, bias=bias,
            sequence_parallel=sequence_parallel, init=inner, dtype=dtype, device=device,
        )  # fmt: skip
        self.down = RowParallelLinear(
            ffn, hidden, group=group, bias=bias, sequence_parallel=sequence_parallel,
            init=outer, dtype=dtype, device=device,
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        gate = _GATES.get(self.activation)
        if gate is None:
            return self.down(_ACTIVATIONS[self.activation](up))
        return self.down(_Gated.apply(up, gate))

    def extra_repr(self) -> str:
        return f"activation={self.activation}"


def _gated(fused: Tensor, act: Callable[[Tensor], Tensor]) -> Tensor:
    # [b, s, 2f/t] -> 2 of [b, s, f/t] -> [b, s, f/t]
    gate, up = fused.chunk(2, dim=-1)
    return act(gate) * up


class _Gated(torch.autograd.Function):
    """act(gate) * up that keeps [gate | up] alone: act(gate) is cheap to compute again."""

    @staticmethod
    def forward(ctx: Any, fused: Tensor, act: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(fused)
        ctx.act = act
        return _gated(fused, act)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        with torch.enable_grad():
            fused = ctx.saved_tensors[0].detach().requires_grad_()
            return torch.autograd.grad(_gated(fused, ctx.act), fused, grad)[0], None
