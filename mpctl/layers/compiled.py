"""What torch.compile is given of a model: whole layers, or the pieces between their messages.

A layer that sends nothing and takes its random keys as tensors (`StepKeys`) is one function of
tensors: it is compiled whole, with attention's own kernel in its midst. Under full recomputation
the function that is computed twice is the one that is compiled; the checkpoint stays outside.

Messages end a graph, and so does whatever waits for one. Where a layer has any (tensor or context
parallelism), the operations between them are compiled each by itself: dropout, dropout with the
residual sum, activations, rotary positions. An operation for which the device has a kernel of its
own already is left to that.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from mpctl.kernels.activation import plain_activation
from mpctl.kernels.backend import KernelBackend
from mpctl.kernels.counter_rng import DropoutMask, drop
from mpctl.kernels.rotary import rotated
from mpctl.layers.transformer_layer import ResidualLayer

Compiler = Callable[..., Any]


def _dropout_add(x: Tensor, mask: DropoutMask, residual: Tensor) -> Tensor:
    return residual + drop(x, mask)


PIECES: dict[str, Callable[..., Tensor]] = {
    "dropout": drop, "dropout_add": _dropout_add, "activation": plain_activation, "rotate": rotated,
}  # fmt: skip
"""Operations of a KernelBackend as functions of tensors that a compiler can follow."""


def compiled_pieces(kernels: KernelBackend) -> list[str]:
    """Which of PIECES are compiled: those that the backend has no kernel of its own for."""
    own = type(kernels)
    return [name for name in PIECES if getattr(own, name) is getattr(KernelBackend, name)]


def with_compiled_pieces(
    kernels: KernelBackend, compiler: Compiler = torch.compile
) -> KernelBackend:
    """The same kernels with these pieces compiled, each for the shapes that it meets. Random keys
    must be tensors (`StepKeys`). compiler: torch.compile, or it with another backend."""
    compiled = copy.copy(kernels)
    for name in compiled_pieces(kernels):
        setattr(compiled, name, compiler(PIECES[name], fullgraph=True))
    return compiled


def compile_layers(modules: Iterable[nn.Module], compiler: Compiler = torch.compile) -> None:
    """Compile each transformer layer among the modules whole; hooks and the checkpoint of full
    recomputation stay outside of what is compiled."""
    for module in modules:
        if isinstance(module, ResidualLayer):
            layer: Any = module
            layer._compute = compiler(layer._compute)
