"""Activations, dropout and rotary positions in one kernel each way.

A gated activation moves 3 elements a result forward and 5 backward (gate, up and gradient are read,
two gradients are written), where torch's kernels move 5 and 18. Forward rounds act(gate) as its own
kernel would; backward rounds once. GELU, ReLU and SiLU are one kernel of torch's already.

Dropout computes each element's hash from its coordinates (counter_rng.py), so that an element
moves its input, its result and 1 byte of mask: 5 bytes in 16 bits forward and 5 backward; with a
residual 7 forward. The bits and the rounding are those of `counter_rng.drop`.

Rotary positions. Backward turns the gradient by the opposite angles, so that the table alone is
kept. In 16 bits an element of the heads moves 4 bytes each way, where separate kernels move some
50. Forward has the bits of `rotary.rotated`; backward rounds once, which torch's separate kernels
do twice.

The result lies in memory as [b, s, a, d], so that attention's own result, which is laid out as its
queries are, needs no copy to become [b, s, a d].
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from mpctl.train.kernels.activation import Activation
from mpctl.train.kernels.counter_rng import DropoutMask, as_int32
from mpctl.train.kernels.masks import Positions
from mpctl.train.kernels.triton import Gradient, define_operation
from mpctl.train.kernels.triton.columns import column_sums, dropout_backward_sums
from mpctl.train.kernels.triton.launch import KernelLaunch, Launcher, blocks, power_of_2

GATES: dict[Activation, str] = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh"}
ACTIVATION_BLOCK = 2048  # results of a program: 16 a thread of 4 warps


def _kernels() -> ModuleType:
    from mpctl.train.kernels.triton.jit import elementwise

    return elementwise


_GATED = Launcher(_kernels, "gated_kernel")
_GATED_BACKWARD = Launcher(_kernels, "gated_backward_kernel")
_SQUARED = Launcher(_kernels, "squared_relu_kernel")
_SQUARED_BACKWARD = Launcher(_kernels, "squared_relu_backward_kernel")


def _run_gated(fused: Tensor, act: str) -> Tensor:
    out, fused = _fake_gated(fused, act), fused.contiguous()
    if out.numel():
        _GATED((fused, out), act, _prepare_gated, out, act)
    return out


def _fake_gated(fused: Tensor, act: str) -> Tensor:
    return fused.new_empty((*fused.shape[:-1], fused.shape[-1] // 2))


def _run_gated_backward(fused: Tensor, grad: Tensor, act: str) -> Tensor:
    out, fused, grad = _fake_like(fused, grad), fused.contiguous(), grad.contiguous()
    if out.numel():
        _GATED_BACKWARD((fused, grad, out), act, _prepare_gated, grad, act)
    return out


def _prepare_gated(results: Tensor, act: str) -> KernelLaunch:
    """A program has a row and a block of its columns."""
    width = results.shape[-1]
    block = min(ACTIVATION_BLOCK, power_of_2(width))
    grid = results.numel() // width, blocks(width, block)
    return KernelLaunch(grid, (2 * width, width), {"act": act, "BLOCK": block}, {})


def _run_squared(x: Tensor) -> Tensor:
    out, x = _fake_like(x), x.contiguous()
    if out.numel():
        _SQUARED((x, out), None, _prepare_squared, out)
    return out


def _run_squared_backward(x: Tensor, grad: Tensor) -> Tensor:
    out, x, grad = _fake_like(x), x.contiguous(), grad.contiguous()
    if out.numel():
        _SQUARED_BACKWARD((x, grad, out), None, _prepare_squared, out)
    return out


def _prepare_squared(out: Tensor) -> KernelLaunch:
    count = out.numel()
    grid = (blocks(count, ACTIVATION_BLOCK),)
    return KernelLaunch(grid, (count,), {"BLOCK": ACTIVATION_BLOCK}, {})


def _fake_like(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


_gated_backward = define_operation(
    "gated_backward(Tensor fused, Tensor grad, str act) -> Tensor", _run_gated_backward, _fake_like
)
_squared_relu_backward = define_operation(
    "squared_relu_backward(Tensor x, Tensor grad) -> Tensor", _run_squared_backward, _fake_like
)


def _setup_activation(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.act = inputs[1] if len(inputs) > 1 else ""


def _backward_gated(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (fused,) = ctx.saved_tensors
    return _gated_backward(fused, grad, ctx.act), None


def _backward_squared(ctx: Any, grad: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    return _squared_relu_backward(x, grad)


gated = define_operation(
    "gated(Tensor fused, str act) -> Tensor", _run_gated, _fake_gated, Gradient(_backward_gated, _setup_activation)
)
squared_relu = define_operation(
    "squared_relu(Tensor x) -> Tensor", _run_squared, _fake_like, Gradient(_backward_squared, _setup_activation)
)


DROPOUT_TILE = 4096  # elements of a program: 32 a thread of 4 warps
BLOCK_COLUMNS = 1024
_DROPOUT = Launcher(_kernels, "dropout_kernel")
_DROPOUT_BACKWARD = Launcher(_kernels, "dropout_backward_kernel")


def fused_dropout(x: Tensor, mask: DropoutMask, residual: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """x [b, s, h] or [b, a, s, keys] after dropout, plus `residual` of the same shape; keeps the
    mask for backward, 1 byte an element. bias: one that x contains, whose gradient is summed in
    that of x."""
    heads, rows, columns = mask.heads, mask.rows, mask.columns
    key = mask.key if isinstance(mask.key, Tensor) else None
    number = 0 if isinstance(mask.key, Tensor) else as_int32(mask.key)
    ranges = [end for places in (heads, rows, columns) for end in _start_and_step(places)]
    return _dropout(
        x, residual, key, number, mask.samples, _given(heads), _given(rows), _given(columns), ranges, mask.p, bias
    )[0]


def _given(positions: Positions | None) -> Tensor | None:
    return positions if isinstance(positions, Tensor) else None


def _start_and_step(positions: Positions | None) -> tuple[int, int]:
    return (positions.start, positions.step) if isinstance(positions, range) else (0, 1)


def _run_dropout(
    x: Tensor,
    residual: Tensor | None,
    key: Tensor | None,
    number: int,
    samples: Tensor,
    heads: Tensor | None,
    rows: Tensor | None,
    columns: Tensor | None,
    ranges: list[int],
    p: float,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    out, kept = _fake_dropout(x, residual, key, number, samples, heads, rows, columns, ranges, p)
    if out.numel():
        x, residual = x.contiguous(), None if residual is None else residual.contiguous()
        tensors = (x, residual, out, kept, key, samples, heads, rows, columns)
        _DROPOUT(tensors, (*ranges, p), _prepare_dropout, x, ranges, p, varying=(number,))
    return out, kept


def _prepare_dropout(x: Tensor, ranges: list[int], p: float) -> KernelLaunch:
    *outer, s, width = x.shape
    count = x.numel() // width
    block_columns = min(BLOCK_COLUMNS, power_of_2(width))
    block_rows = min(DROPOUT_TILE // block_columns, power_of_2(count))
    constants = {
        "a": outer[1] if len(outer) > 1 else 0,
        "threshold": min(round(p * 2**32) - 2**31, 2**31 - 1),
        "scale": 1 / (1 - p),
        "BLOCK_ROWS": block_rows,
        "BLOCK_COLUMNS": block_columns,
    }
    grid = blocks(count, block_rows), blocks(width, block_columns)
    return KernelLaunch(grid, (*ranges, count, width, s), constants, {"enable_fp_fusion": False})


def _fake_dropout(x: Tensor, residual: Tensor | None, *_: Any) -> tuple[Tensor, Tensor]:
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape, dtype=torch.bool)


def _run_dropout_backward(grad: Tensor, kept: Tensor, scale: float) -> Tensor:
    out, grad = _fake_dropout_backward(grad, kept, scale), grad.contiguous()
    if out.numel():
        _DROPOUT_BACKWARD((grad, kept, out), scale, _prepare_dropout_backward, grad, scale)
    return out


def _prepare_dropout_backward(grad: Tensor, scale: float) -> KernelLaunch:
    count, constants = grad.numel(), {"scale": scale, "BLOCK": DROPOUT_TILE}
    grid = (blocks(count, DROPOUT_TILE),)
    return KernelLaunch(grid, (count,), constants, {"enable_fp_fusion": False})


def _fake_dropout_backward(grad: Tensor, kept: Tensor, scale: float) -> Tensor:
    return grad.new_empty(grad.shape)


_dropout_backward = define_operation(
    "dropout_backward(Tensor grad, Tensor kept, float scale) -> Tensor", _run_dropout_backward, _fake_dropout_backward
)


def _setup_dropout(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, residual, *_, p, bias = inputs
    ctx.set_materialize_grads(False)  # no zeros for the mask's gradient
    ctx.save_for_backward(output[1])
    ctx.scale, ctx.dtype = 1 / (1 - p), x.dtype
    ctx.residual_dtype = None if residual is None else residual.dtype
    ctx.bias_dtype = None if bias is None else bias.dtype


def _backward_dropout(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    (kept,) = ctx.saved_tensors
    needs_x, needs_residual, *others, needs_bias = ctx.needs_input_grad
    dx = dbias = None
    if needs_bias:
        dx, partial = dropout_backward_sums(grad.to(ctx.dtype), kept, ctx.scale)
        dbias = column_sums(partial, ctx.bias_dtype)
    elif needs_x:
        dx = _dropout_backward(grad.to(ctx.dtype), kept, ctx.scale)
    dresidual = grad.to(ctx.residual_dtype) if needs_residual else None
    return dx, dresidual, *(None for _ in others), dbias


_dropout = define_operation(
    "dropout(Tensor x, Tensor? residual, Tensor? key, SymInt number, Tensor samples, Tensor? heads,"
    " Tensor? rows, Tensor? columns, SymInt[] ranges, float p, Tensor? bias)"
    " -> (Tensor, Tensor)",
    _run_dropout,
    _fake_dropout,
    Gradient(_backward_dropout, _setup_dropout),
)


ROTARY_TILE = 2048  # pairs of a program: 16 a thread of 4 warps
_ROTATE = Launcher(_kernels, "rotate_kernel")


def fused_rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [b, a, s, d] turned by a table, cos and sin [s, r/2] or [b, 1, s, r/2]."""
    return _rotate(x, cos, sin, False)


def _run_rotate(x: Tensor, cos: Tensor, sin: Tensor, is_back: bool) -> Tensor:
    out = _fake_rotate(x, cos, sin, is_back)
    if out.numel():
        x = x if x.stride(-1) == 1 else x.contiguous()
        cos, sin = cos.contiguous(), sin.contiguous()
        _ROTATE((x, cos, sin, out), is_back, _prepare_rotate, x, cos, out, is_back)
    return out


def _prepare_rotate(x: Tensor, cos: Tensor, out: Tensor, is_back: bool) -> KernelLaunch:
    (b, a, s, d), half = x.shape, cos.shape[-1]
    rest, block_half = d - 2 * half, power_of_2(half)
    block_rows = max(1, min(ROTARY_TILE // block_half, power_of_2(s)))
    constants = {
        "half": half,
        "rest": rest,
        "is_back": is_back,
        "BLOCK_ROWS": block_rows,
        "BLOCK_HALF": block_half,
        "BLOCK_REST": power_of_2(max(1, rest)),
    }
    of_table = cos.stride(0) if cos.ndim == 4 and cos.shape[0] > 1 else 0
    sizes = *x.stride()[:3], *out.stride()[:3], of_table, s
    return KernelLaunch((blocks(s, block_rows), a, b), sizes, constants, {"enable_fp_fusion": False})


def _fake_rotate(x: Tensor, cos: Tensor, sin: Tensor, is_back: bool) -> Tensor:
    b, a, s, d = x.shape
    return x.new_empty((b, s, a, d)).transpose(1, 2)


def _setup_rotate(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, cos, sin, ctx.is_back = inputs
    ctx.save_for_backward(cos, sin)


def _backward_rotate(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    cos, sin = ctx.saved_tensors
    return _rotate(grad, cos, sin, not ctx.is_back), None, None, None


_rotate = define_operation(
    "rotate(Tensor x, Tensor cos, Tensor sin, bool is_back) -> Tensor",
    _run_rotate,
    _fake_rotate,
    Gradient(_backward_rotate, _setup_rotate),
)
