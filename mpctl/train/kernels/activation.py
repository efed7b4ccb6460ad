"""The elementwise functions of an MLP, by name, and those with a gate.

gelu is exact (arXiv 1606.08415), gelu_tanh the approximation that GPT-2 was trained with; swiglu,
geglu and geglu_tanh multiply a second half of the input by the function of the first (arXiv
2002.05202, section 2). By hand, swiglu of [gate | up] = [0 | 5] is silu(0) * 5 = 0.

Letters: b batch, s sequence, f ffn, t ranks of the group.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Activation = Literal["gelu", "gelu_tanh", "relu", "relu2", "silu", "swiglu", "geglu", "geglu_tanh"]
GATED: tuple[Activation, ...] = ("swiglu", "geglu", "geglu_tanh")


class _SquaredReLU(torch.autograd.Function):
    """relu(x)^2, which saves only x: torch's operations also save relu(x)."""

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


def activated(up: Tensor, activation: Activation) -> Tensor:
    """The activation of what the first product wrote: [.., f] -> [.., f]; of a gated one, the gate
    times the rest: [.., 2f] -> [.., f]."""
    gate = _GATES.get(activation)
    result: Tensor = _ACTIVATIONS[activation](up) if gate is None else _Gated.apply(up, gate)
    return result


def plain_activation(up: Tensor, activation: Activation) -> Tensor:
    """The same as `activated` in torch's own operations, for a compiler, which decides itself what
    to save for backward."""
    gate = _GATES.get(activation)
    if activation == "relu2":
        return F.relu(up).square()
    return _ACTIVATIONS[activation](up) if gate is None else _gated(up, gate)


def _gated(fused: Tensor, act: Callable[[Tensor], Tensor]) -> Tensor:
    # [b, s, 2f/t] -> 2 of [b, s, f/t] -> [b, s, f/t]
    gate, up = fused.chunk(2, dim=-1)
    return act(gate) * up


class _Gated(torch.autograd.Function):
    """act(gate) * up that saves only [gate | up]: act(gate) is cheap to recompute."""

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
