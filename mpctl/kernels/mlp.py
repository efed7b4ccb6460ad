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
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpctl.kernels.config import Activation, MLPConfig
from mpctl.kernels.tensor_parallel import ShardContext


class _SquaredReLU(torch.autograd.Function):
    """relu(x)^2, which keeps x alone: torch's own operations keep relu(x) beside their result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.relu(x).square_()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return F.relu(x).mul_(2).mul_(grad)


def squared_relu(x: Tensor) -> Tensor:
    """relu(x)^2 (arXiv 2109.08668, section 3.1; Nemotron-4, arXiv 2402.16819)."""
    result: Tensor = _SquaredReLU.apply(x)
    return result


# gelu is exact (arXiv 1606.08415), gelu_tanh the approximation that GPT-2 was trained with.
_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": squared_relu,
    "silu": F.silu,
}
_GATES: dict[Activation, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,
    "geglu": F.gelu,
    "geglu_tanh": _ACTIVATIONS["gelu_tanh"],
}


def activation_of(name: Activation) -> Callable[[Tensor], Tensor]:
    """The elementwise function; of a gated activation, the function of its gate."""
    return {**_ACTIVATIONS, **_GATES}[name]


class ParallelMLP(nn.Module):
    """[b, s, h] -> [b, s, f/t] -> [b, s, h]; with sequence parallelism from and to [b, s/t, h].

    Raises ValueError where ffn cannot be split over the tensor-parallel ranks.
    """

    def __init__(self, config: MLPConfig, shard_context: ShardContext) -> None:
        super().__init__()
        self.activation: Activation = config.activation
        parts = (config.ffn, config.ffn) if config.is_gated else (config.ffn,)
        layers, h, bias = shard_context.layers, config.hidden, config.bias
        self.up = layers.column_linear(h, sum(parts), bias=bias, init=config.init, parts=parts)
        self.down = layers.row_linear(config.ffn, h, bias=bias, init=config.output_init)

    def forward(self, x: Tensor) -> Tensor:
        """As the class says; the activation, or gate, is elementwise on this rank's columns."""
        down: Tensor = self.down(activated(self.up(x), self.activation))
        return down

    def extra_repr(self) -> str:
        """The activation's name, for `print(module)`."""
        return f"activation={self.activation}"


def activated(up: Tensor, activation: Activation) -> Tensor:
    """The activation of what the first product wrote: [.., f] -> [.., f]; of a gated one, the gate
    times the rest: [.., 2f] -> [.., f]."""
    gate = _GATES.get(activation)
    result: Tensor = _ACTIVATIONS[activation](up) if gate is None else _Gated.apply(up, gate)
    return result


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
