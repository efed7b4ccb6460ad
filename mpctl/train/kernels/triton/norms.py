"""Norms of the residual stream, whose gradient adds that of the stream itself.

x is read by the norm and by the sum at the end of the branch, so that autograd would add two
gradients in a kernel of its own; torch's backward of a norm is two kernels, of which the second
reads both of its inputs again for the gradients of weight and bias. Here one kernel reads dY, x and
the stream's gradient, writes their sum, and leaves sums over rows behind (columns.py). Forward, a
branch is added in the norm's kernel. By count, of 16-bit elements: 8 bytes each way, for 10 and 16.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mpctl.train.kernels.triton import define_operation
from mpctl.train.kernels.triton.columns import column_sums, wide_dtype
from mpctl.train.kernels.triton.launch import KernelLaunch, Launcher, blocks, power_of_2

PROGRAMS = 512  # of backward; each has some rows and writes one row of partial sums
WIDEST = 32_768  # bytes of a row in the type that it is computed in: registers of 512 threads


def _kernels() -> ModuleType:
    from mpctl.train.kernels.triton.jit import norms

    return norms


_NORM = Launcher(_kernels, "norm_kernel")
_NORM_BACKWARD = Launcher(_kernels, "norm_backward_kernel")


def fits(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernels can compute the norm of rows of x: they fit a program's registers."""
    return weight.numel() * wide_dtype(x).itemsize <= WIDEST and weight.dtype == x.dtype


def fused_norm(
    x: Tensor,
    branch: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    centred: bool,
    branch_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """x [.., h], plus `branch` if it is given, and its norm; centred: LayerNorm's. branch_bias [h]:
    a bias that the branch contains, which gets its gradient here."""
    result: tuple[Tensor, Tensor] = _Norm.apply(x, branch, weight, bias, branch_bias, eps, centred)
    return result


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        branch: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        branch_bias: Tensor | None,
        eps: float,
        centred: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        if branch is None:
            total = x
            y, mean, inverse = _norm(x, weight, bias, eps, centred)
        else:
            total, y, mean, inverse = _add_norm(x, branch, weight, bias, eps, centred)
        ctx.save_for_backward(total, weight, mean, inverse)
        ctx.has_branch = branch is not None
        ctx.has_bias, ctx.has_branch_bias = bias is not None, branch_bias is not None
        return total, y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, residual: Tensor | None, grad: Tensor | None) -> tuple[Any, ...]:
        x, weight, mean, inverse = ctx.saved_tensors
        grad = torch.zeros_like(x) if grad is None else grad
        dx, partial = _norm_backward(grad, residual, x, weight, mean, inverse, ctx.has_bias, ctx.has_branch_bias)
        sums = iter(column_sums(partial, weight.dtype).view(-1, weight.numel()))
        of_weight = next(sums)
        of_bias = next(sums) if ctx.has_bias else None
        of_branch = next(sums) if ctx.has_branch_bias else None
        return dx, dx if ctx.has_branch else None, of_weight, of_bias, of_branch, None, None


def _launch(
    x: Tensor,
    branch: Tensor | None,
    total: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    centred: bool,
    y: Tensor,
    mean: Tensor,
    inverse: Tensor,
) -> None:
    if y.numel():
        branch = None if branch is None else branch.contiguous()
        own_mean = mean if centred else None
        tensors = (x.contiguous(), branch, total, weight, bias, y, own_mean, inverse)
        _NORM(tensors, eps, _prepare, y, eps)


def _prepare(y: Tensor, eps: float) -> KernelLaunch:
    """A program has a row."""
    width = y.shape[-1]
    return KernelLaunch((y.numel() // width,), (width,), {"eps": eps, **_block(width)}, _warps(y))


def _block(width: int) -> dict[str, int]:
    return {"BLOCK": power_of_2(width)}


def _warps(x: Tensor) -> dict[str, int]:
    """16 numbers of a row a thread, in 4 to 16 warps."""
    return {"num_warps": min(16, max(4, power_of_2(x.shape[-1]) // 512))}


def _run(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centred: bool) -> tuple[Tensor, Tensor, Tensor]:
    y, mean, inverse = _fake(x, weight, bias, eps, centred)
    _launch(x, None, None, weight, bias, eps, centred, y, mean, inverse)
    return y, mean, inverse


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centred: bool) -> tuple[Tensor, Tensor, Tensor]:
    rows = x.shape[:-1]
    mean, inverse = (x.new_empty(shape, dtype=wide_dtype(x)) for shape in (rows if centred else (0,), rows))
    return x.new_empty(x.shape), mean, inverse


def _run_add(
    x: Tensor, branch: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total, y, mean, inverse = _fake_add(x, branch, weight, bias, eps, centred)
    _launch(x, branch, total, weight, bias, eps, centred, y, mean, inverse)
    return total, y, mean, inverse


def _fake_add(
    x: Tensor, branch: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), *_fake(x, weight, bias, eps, centred)


def _run_backward(
    grad: Tensor,
    residual: Tensor | None,
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    inverse: Tensor,
    has_bias: bool,
    has_branch: bool,
) -> tuple[Tensor, Tensor]:
    out, partial = _fake_backward(grad, residual, x, weight, mean, inverse, has_bias, has_branch)
    if out.numel():
        residual = None if residual is None else residual.contiguous()
        own_mean = mean if mean.numel() else None
        tensors = (grad.contiguous(), residual, x.contiguous(), weight, own_mean, inverse, out, partial)
        facts = has_bias, has_branch
        _NORM_BACKWARD(tensors, facts, _prepare_backward, x, partial, *facts)
    return out, partial


def _prepare_backward(x: Tensor, partial: Tensor, has_bias: bool, has_branch: bool) -> KernelLaunch:
    width = x.shape[-1]
    count = x.numel() // width
    constants = {"HAS_BIAS": has_bias, "HAS_BRANCH": has_branch, **_block(width)}
    sizes = count, width, -(-count // PROGRAMS)
    return KernelLaunch((len(partial),), sizes, constants, _warps(x))


def _fake_backward(
    grad: Tensor,
    residual: Tensor | None,
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    inverse: Tensor,
    has_bias: bool,
    has_branch: bool,
) -> tuple[Tensor, Tensor]:
    width = x.shape[-1]
    count = x.numel() // max(1, width)
    programs = blocks(count, -(-count // PROGRAMS)) if count else 0
    partial = x.new_empty((programs, (1 + has_bias + has_branch) * width), dtype=wide_dtype(x))
    return x.new_empty(x.shape), partial


_ROWS = "Tensor weight, Tensor? bias, float eps, bool centred"
_norm = define_operation(f"norm(Tensor x, {_ROWS}) -> (Tensor, Tensor, Tensor)", _run, _fake)
_add_norm = define_operation(
    f"add_norm(Tensor x, Tensor branch, {_ROWS}) -> (Tensor, Tensor, Tensor, Tensor)", _run_add, _fake_add
)
_norm_backward = define_operation(
    "norm_backward(Tensor grad, Tensor? residual, Tensor x, Tensor weight, Tensor mean,"
    " Tensor inverse, bool has_bias, bool has_branch) -> (Tensor, Tensor)",
    _run_backward,
    _fake_backward,
)
