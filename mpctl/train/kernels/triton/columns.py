"""Gradients of biases, summed by the kernels that write what they are sums of.

A sum of its own reads a gradient once more: of GPT 1.5B's five biases a layer as much as a tenth of
what the layer moves backward. Here it is made of partial sums, float32 (float64 for float64), of
blocks of rows that depend on the shape alone: two kernels, one of which reads nothing but those.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mpctl.train.kernels.activation import Activation, activated
from mpctl.train.kernels.triton import define_operation
from mpctl.train.kernels.triton.launch import KernelLaunch, Launcher, blocks, power_of_2

SUMMED: dict[Activation, str] = {name: name for name in ("gelu", "gelu_tanh", "silu")}
"""Activations with a kernel here for both the gradient and the sums of its columns."""
PARTS = 128  # blocks of rows
TILE = 2048  # elements of a program at a time: 16 a thread of 4 warps
COLUMNS = 256


def _kernels() -> ModuleType:
    from mpctl.train.kernels.triton.jit import columns

    return columns


_SUMS = Launcher(_kernels, "column_sums_kernel")
_ACTIVATION_BACKWARD = Launcher(_kernels, "activation_backward_kernel")
_DROPOUT_BACKWARD = Launcher(_kernels, "dropout_sums_kernel")
_JOIN = Launcher(_kernels, "join_kernel")


def _run_sums(partial: Tensor, dtype: torch.dtype) -> Tensor:
    out = _fake_sums(partial, dtype)
    if out.numel():
        _SUMS((partial, out), None, _prepare_sums, partial)
    return out


def _prepare_sums(partial: Tensor) -> KernelLaunch:
    count, width = partial.shape
    return KernelLaunch((blocks(width, 32),), (count, width), {"ROWS": 64, "BLOCK": 32}, {})


def _fake_sums(partial: Tensor, dtype: torch.dtype) -> Tensor:
    return partial.new_empty(partial.shape[1:], dtype=dtype)


column_sums = define_operation("column_sums(Tensor partial, ScalarType dtype) -> Tensor", _run_sums, _fake_sums)
"""partial [m, n] -> the sums of its columns [n], rounded to a dtype."""


def wide_dtype(x: Tensor) -> torch.dtype:
    """The type in which sums of x are kept."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _rows_of_part(count: int) -> int:
    return max(8, -(-count // PARTS))


def _new_partial(like: Tensor, count: int, width: int) -> Tensor:
    parts = blocks(count, _rows_of_part(count))
    return like.new_empty((parts, width), dtype=wide_dtype(like))


def _prepare_tiles(count: int, width: int, *sizes: Any, **constants: Any) -> KernelLaunch:
    """A program has a part of the rows and a block of the columns."""
    block = min(COLUMNS, power_of_2(width))
    constants |= {"ROWS": min(TILE // block, 8), "BLOCK": block}
    rows = _rows_of_part(count)
    grid = blocks(count, rows), blocks(width, block)
    return KernelLaunch(grid, (*sizes, rows), constants, {})


# ------------------------------------------------------------------------------
# The activation of a product with a bias.


def summed_activation(x: Tensor, bias: Tensor, name: Activation) -> Tensor:
    """The activation, one of SUMMED, of x [.., f], which contains `bias` [f]; backward gives the
    bias its gradient, which that of x is not to reach again."""
    result: Tensor = _SummedActivation.apply(x, bias, name)
    return result


class _SummedActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, name: Activation) -> Tensor:
        ctx.save_for_backward(x)
        ctx.name, ctx.dtype = name, bias.dtype
        return activated(x, name)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (x,) = ctx.saved_tensors
        dx, partial = _activation_backward(x, grad, SUMMED[ctx.name])
        return dx, column_sums(partial, ctx.dtype), None


def _run_activation_backward(x: Tensor, grad: Tensor, act: str) -> tuple[Tensor, Tensor]:
    out, partial = _fake_activation_backward(x, grad, act)
    if out.numel():
        tensors = x.contiguous(), grad.contiguous(), out, partial
        _ACTIVATION_BACKWARD(tensors, act, _prepare_activation, x, act)
    return out, partial


def _prepare_activation(x: Tensor, act: str) -> KernelLaunch:
    width = x.shape[-1]
    count = x.numel() // width
    return _prepare_tiles(count, width, count, width, act=act)


def _fake_activation_backward(x: Tensor, grad: Tensor, act: str) -> tuple[Tensor, Tensor]:
    width = x.shape[-1]
    return x.new_empty(x.shape), _new_partial(x, x.numel() // max(1, width), width)


_activation_backward = define_operation(
    "activation_backward(Tensor x, Tensor grad, str act) -> (Tensor, Tensor)",
    _run_activation_backward,
    _fake_activation_backward,
)


# ------------------------------------------------------------------------------
# Dropout of a branch with a bias.


def _run_dropout_backward(grad: Tensor, kept: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    out, partial = _fake_dropout_backward(grad, kept, scale)
    if out.numel():
        tensors = grad.contiguous(), kept, out, partial
        _DROPOUT_BACKWARD(tensors, scale, _prepare_dropout, grad, scale)
    return out, partial


def _prepare_dropout(grad: Tensor, scale: float) -> KernelLaunch:
    width = grad.shape[-1]
    count = grad.numel() // width
    launch = _prepare_tiles(count, width, count, width, scale=scale)
    return launch._replace(options={"enable_fp_fusion": False})


def _fake_dropout_backward(grad: Tensor, kept: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    width = grad.shape[-1]
    return grad.new_empty(grad.shape), _new_partial(grad, grad.numel() // max(1, width), width)


dropout_backward_sums = define_operation(
    "dropout_backward_sums(Tensor grad, Tensor kept, float scale) -> (Tensor, Tensor)",
    _run_dropout_backward,
    _fake_dropout_backward,
)
"""The gradient of dropout's input, with the bits of `dropout_backward`, and partial sums."""


# ------------------------------------------------------------------------------
# Queries, keys and values of one product with a bias.


def summed_split(
    qkv: Tensor, bias: Tensor, widths: tuple[int, int, int], head_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """qkv [b, s, sum of widths], which contains `bias` -> query, key and value [b, n, s, d], views
    of it; backward joins their gradients in one kernel that sums the bias's."""
    result: tuple[Tensor, Tensor, Tensor] = _SummedSplit.apply(qkv, bias, widths, head_size)
    return result


class _SummedSplit(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, bias: Tensor, widths: tuple[int, int, int], head_size: int
    ) -> tuple[Tensor, ...]:
        ctx.dtype = bias.dtype
        parts = qkv.split(widths, dim=-1)
        return tuple(part.unflatten(-1, (-1, head_size)).transpose(1, 2) for part in parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        whole = _already_joined(*grads)
        if whole is not None:
            return whole, whole.sum((0, 1)).to(ctx.dtype), None, None
        joined, partial = _join(*grads)
        return joined, column_sums(partial, ctx.dtype), None, None


def _already_joined(*parts: Tensor) -> Tensor | None:
    """[b, s, columns] of which these [b, n, s, d] are all columns, side by side, as our attention's
    gradients are; else None."""
    b, _, s, d = parts[0].shape
    widths = [x.shape[1] * d for x in parts]
    at, strides = parts[0].storage_offset(), (s * sum(widths), d, sum(widths), 1)
    for x, width in zip(parts, widths, strict=True):
        is_same = x.untyped_storage()._cdata == parts[0].untyped_storage()._cdata
        if not is_same or x.stride() != strides or x.storage_offset() != at:
            return None
        at += width
    return parts[0].as_strided((b, s, sum(widths)), (strides[0], strides[2], 1), parts[0].storage_offset())


def _run_join(first: Tensor, second: Tensor, third: Tensor) -> tuple[Tensor, Tensor]:
    parts = [x if x.stride(-1) == 1 else x.contiguous() for x in (first, second, third)]
    out, partial = _fake_join(first, second, third)
    if out.numel():
        _JOIN((*parts, out, partial), None, _prepare_join, parts)
    return out, partial


def _prepare_join(parts: list[Tensor]) -> KernelLaunch:
    b, _, s, d = parts[0].shape
    ends = [parts[0].shape[1] * d]
    ends += [ends[0] + parts[1].shape[1] * d]
    width = ends[1] + parts[2].shape[1] * d
    strides = tuple(tuple(x.stride()[:3]) for x in parts)
    return _prepare_tiles(b * s, width, strides, (s, d, *ends, width), b * s)


def _fake_join(first: Tensor, second: Tensor, third: Tensor) -> tuple[Tensor, Tensor]:
    b, _, s, d = first.shape
    width = sum(x.shape[1] for x in (first, second, third)) * d
    return first.new_empty((b, s, width)), _new_partial(first, b * s, width)


_join = define_operation(
    "join_heads(Tensor first, Tensor second, Tensor third) -> (Tensor, Tensor)", _run_join, _fake_join
)
