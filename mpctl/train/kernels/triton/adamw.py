"""AdamW, and the 16-bit copies of what it updates, in one kernel for many tensors.

A parameter moves 30 bytes: value, moments and gradient are read, value and moments written, 4 bytes
each, and 2 of the copy. torch's kernel moves 32, since it writes gradients back where they are
clipped, and the copies another 6.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from mpctl.train.kernels.adamw import AdamWStep
from mpctl.train.kernels.triton import define_operation
from mpctl.train.kernels.triton.launch import KernelLaunch, Launcher

CHUNK = 1 << 16  # elements of a program
BLOCK = 1024  # of them at a time: 8 a thread of 4 warps


def _kernels() -> ModuleType:
    from mpctl.train.kernels.triton.jit import adamw

    return adamw


_ADAMW = Launcher(_kernels, "adamw_kernel")


class _AddressTables:
    """The tables of the tensors that are updated, which are the same in every step."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[list[list[int]], Tensor]] = {}

    def of(self, fields: Sequence[Sequence[Tensor]], sizes: list[int]) -> Tensor:
        """int64 [chunks, 7] of tensors by field: value, gradient, moments, copy, count."""
        addresses = [[x.data_ptr() for x in field] for field in fields]
        known = self._made.get(addresses[0][0])
        if known is not None and known[0] == addresses:
            return known[1]
        rows = [
            [
                *(a + start * width if a else 0 for a, width in zip(each, WIDTHS, strict=True)),
                count,
                min(CHUNK, size - start),
            ]
            for *each, count, size in zip(*addresses, sizes, strict=True)
            for start in range(0, size, CHUNK)
        ]
        table = torch.tensor(rows, dtype=torch.int64).to(fields[0][0].device)
        self._made[addresses[0][0]] = addresses, table
        return table


WIDTHS = (4, 4, 4, 4, 2)  # bytes of an element of each field but the count
_TABLES = _AddressTables()


@torch.no_grad()
def fused_adamw(step: AdamWStep) -> None:
    """Make the update and write the copies."""
    values, updates, found_inf = step.values, list(step.updates), step.found_inf
    if not values:
        return
    torch._foreach_add_(updates, 1)
    _adamw(
        list(values),
        list(step.gradients),
        list(step.averages),
        list(step.squares),
        updates,
        list(step.copies),
        step.grad_scale,
        found_inf,
        step.rate,
        step.weight_decay,
        step.beta1,
        step.beta2,
        step.epsilon,
    )
    if found_inf is not None:
        torch._foreach_sub_(updates, [found_inf] * len(updates))


def fits(step: AdamWStep) -> bool:
    """Whether the kernel can make the update: of contiguous float32 values, with copies of all in
    one type of 16 bits, or of none."""
    copies, wide = step.copies, (step.values, step.gradients, step.averages, step.squares)
    return (
        len(copies) in (0, len(step.values))
        and all(x.dtype == torch.float32 and x.is_contiguous() for field in wide for x in field)
        and all(x.dtype == copies[0].dtype and x.itemsize == 2 for x in copies)
        and all(x.is_contiguous() for x in copies)
    )


def _run(
    values: list[Tensor],
    gradients: list[Tensor],
    averages: list[Tensor],
    squares: list[Tensor],
    updates: list[Tensor],
    copies: list[Tensor],
    scale: Tensor | None,
    found_inf: Tensor | None,
    rate: float,
    weight_decay: float,
    beta1: float,
    beta2: float,
    epsilon: float,
) -> None:
    nowhere = values[0].new_empty(0, dtype=torch.bfloat16)  # its address is 0
    large = [values, gradients, averages, squares, copies or [nowhere] * len(values)]
    table = _TABLES.of([*large, updates], [value.numel() for value in values])
    if len(table):
        facts = beta1, beta2, epsilon, (copies or [nowhere])[0].dtype
        _ADAMW((table, scale, found_inf), facts, _prepare, table, *facts, varying=(rate, rate * weight_decay))


def _prepare(table: Tensor, beta1: float, beta2: float, epsilon: float, copies: torch.dtype) -> KernelLaunch:
    import triton.language as tl

    constants = {
        "BETA1": beta1,
        "BETA2": beta2,
        "EPSILON": epsilon,
        "LOG1": math.log(beta1) if beta1 else -math.inf,
        "LOG2": math.log(beta2) if beta2 else -math.inf,
        "COPY": tl.bfloat16 if copies == torch.bfloat16 else tl.float16,
        "BLOCK": BLOCK,
    }
    return KernelLaunch((len(table),), (), constants, {})


_adamw = define_operation(
    "adamw_(Tensor(a!)[] values, Tensor[] gradients, Tensor(b!)[] averages, Tensor(c!)[] squares,"
    " Tensor[] updates, Tensor(d!)[] copies, Tensor? scale, Tensor? found_inf, float rate,"
    " float weight_decay, float beta1, float beta2, float epsilon) -> ()",
    _run,
    lambda *_: None,
)
