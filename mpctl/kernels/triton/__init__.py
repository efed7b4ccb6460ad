"""Kernels written in Triton (Tillet et al., MAPL 2019, doi 10.1145/3315508.3329973), for CUDA.

Each is an operation of torch in the namespace `mpctl`, made of three parts:

- a schema and what tensors it returns (`define_operation`), which needs no triton: fake tensors, a
  rehearsal and torch.compile see exactly one operation;
- a function that launches the kernel, and imports `jit/` when it is first called;
- the kernel in Triton's language, in `jit/`. With TRITON_INTERPRET=1 in the environment when it is
  imported, it runs on CPU tensors; tests/kernels/triton holds it to the reference that way.

`TritonKernels` (backend.py) is the `KernelBackend` that calls them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def define_operation(schema: str, run: Callable[P, R], fake: Callable[..., R]) -> Callable[P, R]:
    """Register an operation and return what calls it, by the signature of `run`.

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
    operation: Callable[P, R] = getattr(torch.ops.mpctl, name).default
    return operation


def define_gradient(
    name: str, backward: Callable[..., Any], setup_context: Callable[..., None]
) -> None:
    """The gradient of a registered operation, as torch.library.register_autograd has it."""
    torch.library.register_autograd(f"mpctl::{name}", backward, setup_context=setup_context)
