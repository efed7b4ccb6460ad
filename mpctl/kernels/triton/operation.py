"""An operation of torch in the namespace `mpctl`: a schema, what runs it, what it returns.

By hand, schema "twice(Tensor x) -> Tensor": `torch.ops.mpctl.twice(x)` calls `run` for tensors with
values and `fake` for those without.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def define_operation(
    schema: str, run: Callable[..., Any], fake: Callable[..., Any]
) -> Callable[..., Any]:
    """Register an operation and return what calls it.

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
    operation: Callable[..., Any] = getattr(torch.ops.mpctl, name).default
    return operation


def define_gradient(
    name: str, backward: Callable[..., Any], setup_context: Callable[..., None]
) -> None:
    """The gradient of a registered operation, as torch.library.register_autograd has it."""
    torch.library.register_autograd(f"mpctl::{name}", backward, setup_context=setup_context)
