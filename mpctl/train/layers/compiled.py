"""The parts of a model for torch.compile: entire layers, or the pieces between messages.

A layer that sends nothing and takes its random keys as tensors (`StepKeys`) is one function of
tensors: it is compiled as a unit, which calls the kernel of attention. Under full recomputation the
function that is computed twice is compiled, without the checkpoint around it.

Messages, and waiting for one, end a graph. If a layer has any (tensor or context parallelism), the
operations between them are compiled separately: dropout, dropout with the residual sum,
activations, rotary positions. An operation for which the device already has a fused kernel is not
compiled.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from mpctl.train.kernels.activation import plain_activation
from mpctl.train.kernels.backend import KernelBackend
from mpctl.train.kernels.counter_rng import DropoutMask, drop
from mpctl.train.kernels.rotary import rotated
from mpctl.train.layers.transformer_layer import ResidualLayer

Compiler = Callable[..., Any]


def _dropout_add(x: Tensor, mask: DropoutMask, residual: Tensor) -> Tensor:
    return residual + drop(x, mask)


PIECES: dict[str, Callable[..., Tensor]] = {
    "dropout": drop,
    "dropout_add": _dropout_add,
    "activation": plain_activation,
    "rotate": rotated,
}
"""Operations of a KernelBackend as functions of tensors that a compiler can follow."""


def compiled_pieces(kernels: KernelBackend) -> list[str]:
    """The names in PIECES that are compiled, because the backend has no fused kernel for them."""
    own = type(kernels)
    return [name for name in PIECES if getattr(own, name) is getattr(KernelBackend, name)]


def with_compiled_pieces(kernels: KernelBackend, compiler: Compiler = torch.compile) -> KernelBackend:
    """The same kernels with these pieces compiled for each shape that occurs. Random keys must be
    tensors (`StepKeys`). compiler: torch.compile, possibly with another backend."""
    compiled = copy.copy(kernels)
    for name in compiled_pieces(kernels):
        setattr(compiled, name, compiler(PIECES[name], fullgraph=True))
    return compiled


def compile_layers(modules: Iterable[nn.Module], compiler: Compiler = torch.compile) -> None:
    """Compile each transformer layer among the modules as a unit, without its hooks and the
    checkpoint of full recomputation."""
    for module in modules:
        if isinstance(module, ResidualLayer):
            layer: Any = module
            layer._compute = compiler(layer._compute)
