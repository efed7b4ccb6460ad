"""Kernels written in Triton (Tillet et al., MAPL 2019, doi 10.1145/3315508.3329973), for CUDA.

Each is an operation of torch in the namespace `mpctl`, made of three parts:

- a schema and what tensors it returns (`define_operation`), which needs no triton: fake tensors, a
  rehearsal and torch.compile see exactly one operation;
- a function that launches the kernel (launch.py), and imports `jit/` when it first does;
- the kernel in Triton's language, in `jit/`. With TRITON_INTERPRET=1 in the environment when it is
  imported, it runs on CPU tensors; tests/train/kernels/triton holds it to the reference that way.

torch's dispatcher spends 20 us of the host on an operation of Python and some 80 us on its gradient
(torch 2.13, without a device). Plain tensors that nobody watches do not need it: an operation is
then the function itself, or an autograd.Function of it.

`TritonKernels` (backend.py) is the `KernelBackend` that calls them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import _get_current_dispatch_mode

R = TypeVar("R")


class Gradient(NamedTuple):
    """backward(ctx, *gradients of results) -> gradients of arguments; setup(ctx, inputs, output)
    keeps what it needs: as torch.library.register_autograd has them."""

    backward: Callable[..., Any]
    setup: Callable[..., None]


def define_operation(
    schema: str, run: Callable[..., R], fake: Callable[..., R], gradient: Gradient | None = None
) -> Callable[..., R]:
    """Register an operation and return what calls it, with all of its arguments by position.

    schema: its name and types, in torch's syntax of schemas. run: computes it, on any device. fake:
    returns new tensors in the shapes, dtypes and on the device of its results, for fake tensors and
    those on `meta`.
    """
    name = schema.partition("(")[0]
    qualified = f"mpctl::{name}"
    tag = torch.Tag.pt2_compliant_tag
    torch.library.define(qualified, schema.removeprefix(name), tags=(tag,))
    torch.library.impl(qualified, "default", run)
    torch.library.register_fake(qualified, fake)
    if gradient is not None:
        torch.library.register_autograd(qualified, gradient.backward, setup_context=gradient.setup)
    operation: Callable[..., R] = getattr(torch.ops.mpctl, name).default
    differentiable = run if gradient is None else _function(name, run, gradient)

    def call(*arguments: Any) -> R:
        if torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None:
            return operation(*arguments)
        needs_gradient = False
        for x in arguments:
            if isinstance(x, Tensor):
                if type(x) not in PLAIN or x.is_meta:
                    return operation(*arguments)
                needs_gradient = needs_gradient or x.requires_grad
        if needs_gradient and torch.is_grad_enabled():
            return differentiable(*arguments)
        return run(*arguments)

    return call


PLAIN = (Tensor, Parameter)


def _function(name: str, run: Callable[..., R], gradient: Gradient) -> Callable[..., R]:
    """An autograd.Function that runs an operation, called."""

    def forward(ctx: Any, *arguments: Any) -> R:
        output = run(*arguments)
        gradient.setup(ctx, arguments, output)
        return output

    members = {"forward": staticmethod(forward), "backward": staticmethod(gradient.backward)}
    apply: Callable[..., R] = type(name, (torch.autograd.Function,), members).apply  # type: ignore[attr-defined]
    return apply
