"""Dropout as one kernel: mask and product forward, one product backward.

The kernel computes each element's hash from its coordinates (counter_rng.py), so that an element
moves its input, its result and 1 byte of mask: 5 bytes in 16 bits forward and 5 backward; with a
residual 7 forward. The bits and the rounding are those of `counter_rng.drop`.

By hand, p = 0.5: kept elements are doubled, the others 0, and backward doubles the same ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mpctl.kernels.counter_rng import DropoutMask, as_int32
from mpctl.kernels.masks import Positions
from mpctl.kernels.triton.operation import define_gradient, define_operation

TILE = 4096  # elements of a program: 32 a thread of 4 warps
BLOCK_COLUMNS = 1024


def fused_dropout(x: Tensor, mask: DropoutMask, residual: Tensor | None = None) -> Tensor:
    """x [b, s, h] or [b, a, s, keys] after dropout, plus `residual` of the same shape; keeps the
    mask for backward, 1 byte an element."""
    heads, rows, columns = mask.heads, mask.rows, mask.columns
    key = mask.key if isinstance(mask.key, Tensor) else None
    number = 0 if isinstance(mask.key, Tensor) else as_int32(mask.key)
    tensors = [_given(positions) for positions in (heads, rows, columns)]
    ranges = [end for positions in (heads, rows, columns) for end in _start_and_step(positions)]
    result: Tensor = _dropout(x, residual, key, number, mask.samples, *tensors, ranges, mask.p)[0]
    return result


def _given(positions: Positions | None) -> Tensor | None:
    return positions if isinstance(positions, Tensor) else None


def _start_and_step(positions: Positions | None) -> tuple[int, int]:
    return (positions.start, positions.step) if isinstance(positions, range) else (0, 1)


def _run(
    x: Tensor, residual: Tensor | None, key: Tensor | None, number: int, samples: Tensor,
    heads: Tensor | None, rows: Tensor | None, columns: Tensor | None, ranges: list[int], p: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    import triton

    from mpctl.kernels.triton.jit.dropout import dropout_kernel

    out, kept = _fake(x, residual, key, number, samples, heads, rows, columns, ranges, p)
    *outer, s, width = x.shape
    count = x.numel() // max(1, width)
    if not count or not width:
        return out, kept
    block_columns = min(BLOCK_COLUMNS, triton.next_power_of_2(width))
    block_rows = min(TILE // block_columns, triton.next_power_of_2(count))
    grid = (triton.cdiv(count, block_rows), triton.cdiv(width, block_columns))
    dropout_kernel[grid](
        x.contiguous(), None if residual is None else residual.contiguous(), out, kept,
        key, number, samples, heads, *ranges[:2], rows, *ranges[2:4], columns, *ranges[4:],
        count, width, s, a=outer[1] if len(outer) > 1 else 0,
        threshold=min(round(p * 2**32) - 2**31, 2**31 - 1), scale=1 / (1 - p),
        BLOCK_ROWS=block_rows, BLOCK_COLUMNS=block_columns, enable_fp_fusion=False,
    )  # fmt: skip
    return out, kept


def _fake(x: Tensor, residual: Tensor | None, *_: Any) -> tuple[Tensor, Tensor]:
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape, dtype=torch.bool)


def _run_backward(grad: Tensor, kept: Tensor, scale: float) -> Tensor:
    import triton

    from mpctl.kernels.triton.jit.dropout import dropout_backward_kernel

    out, count = _fake_backward(grad, kept, scale), grad.numel()
    if count:
        dropout_backward_kernel[(triton.cdiv(count, TILE),)](
            grad.contiguous(), kept, out, count, scale=scale, BLOCK=TILE, enable_fp_fusion=False
        )
    return out


def _fake_backward(grad: Tensor, kept: Tensor, scale: float) -> Tensor:
    return grad.new_empty(grad.shape)


_dropout = define_operation(
    "dropout(Tensor x, Tensor? residual, Tensor? key, SymInt number, Tensor samples, Tensor? heads,"
    " Tensor? rows, Tensor? columns, SymInt[] ranges, float p) -> (Tensor, Tensor)",
    _run,
    _fake,
)
_dropout_backward = define_operation(
    "dropout_backward(Tensor grad, Tensor kept, float scale) -> Tensor",
    _run_backward,
    _fake_backward,
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, residual, *_, p = inputs
    ctx.set_materialize_grads(False)  # no zeros for the mask's gradient
    ctx.save_for_backward(output[1])
    ctx.scale, ctx.dtype = 1 / (1 - p), x.dtype
    ctx.residual_dtype = None if residual is None else residual.dtype


def _backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    (kept,) = ctx.saved_tensors
    needs_x, needs_residual, *others = ctx.needs_input_grad
    dx = _dropout_backward(grad.to(ctx.dtype), kept, ctx.scale) if needs_x else None
    dresidual = grad.to(ctx.residual_dtype) if needs_residual else None
    return dx, dresidual, *(None for _ in others)


define_gradient("dropout", _backward, _setup)
