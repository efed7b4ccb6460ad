"""The product of a linear layer in fp8: as product.py, with operands of one byte.

Y = X W^T + b with X and W cast to e4m3, dX = dY W and dW = dY^T X with dY in e5m2
(fp8_operands.py). What is kept for backward is X in fp8, transposed as dW reads it, 1 byte an
element in place of 2; of a sequence-parallel layer the shard [b, s/t, i] in 16 bit, which is
gathered and cast again. W is a parameter: it is kept by no one, and cast again for dX. Biases and
their gradients are in 16 bit, and so are all results and all messages.

As there, dX comes first, and its sum over the group travels while dW is computed.

By hand, b=1, s=16, i=32, o=64: kept 512 bytes of X in place of 1024.

Letters: b batch, s sequence, i in, o out, m = b s rows, t ranks of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mpctl.kernels.fp8 import Fp8Matrix, Operand
from mpctl.kernels.fp8_operands import Fp8Operands
from mpctl.kernels.parameters import deferred_wgrad_of
from mpctl.kernels.product import start_sum
from mpctl.kernels.regions import SEQUENCE
from mpctl.transport.group import Group, Pending


def fp8_column_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    operands: Fp8Operands,
    group: Group,
    sequence_parallel: bool = False,
) -> Tensor:
    """x [b, s, i], equal on every rank, by weight [o/t, i] -> [b, s, o/t] in the dtype of x;
    backward sums dX.

    operands: of the layer, casts X, W and dY. sequence_parallel: x is this rank's [b, s/t, i], and
    so is dX.
    """
    is_training = torch.is_grad_enabled()
    result: Tensor = _Fp8Product.apply(
        x, weight, bias, operands, group, sequence_parallel and group.size > 1, is_training
    )
    return result


class _Fp8Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, operands: Fp8Operands,
        group: Group, split: bool, is_training: bool,
    ) -> Tensor:  # fmt: skip
        ctx.operands, ctx.group, ctx.split = operands, group, split
        ctx.deferred, ctx.out = deferred_wgrad_of(weight), x.dtype
        ctx.leaf = weight if ctx.deferred else None
        for_dx, for_dw = ctx.needs_input_grad[:2]
        whole = group.all_gather(x, SEQUENCE) if split else x
        rows, kept = _cast_input(whole, operands, noted=is_training, kept=for_dw and not split)
        shard = x if for_dw and split else None
        ctx.save_for_backward(weight if for_dx else None, shard, *kept)
        w = operands.by_rows(Operand.WEIGHT, weight, noted=is_training)
        y = operands.backend.fp8_product(rows, w, out=x.dtype, bias=bias, fast=True)
        # As torch's own linear: no view, which the sum over the group may not overwrite.
        return torch.ops.aten._unsafe_view(y, (*whole.shape[:-1], len(weight)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, shard, *kept = ctx.saved_tensors
        operands, is_deferred = ctx.operands, ctx.deferred is not None
        # [b, s, o/t] -> [b*s, o/t]
        rows = grad.flatten(0, -2)
        db = rows.sum(0) if ctx.needs_input_grad[2] else None
        arriving = None if shard is None or is_deferred else _gather(shard, ctx.group)
        for_dw = shard is not None or kept[0] is not None
        dy, dy_columns = _cast_gradient(rows, operands, for_dw=for_dw)
        dx = None
        if weight is not None:
            dx = start_sum(_input_gradient(dy, weight, grad, ctx), ctx.group, split=ctx.split)
        dw = None
        if dy_columns is not None:
            wgrad = partial(_weight_gradient, operands, dy_columns, ctx.out)
            if is_deferred:
                ctx.deferred.add(ctx.leaf, partial(_later, wgrad, kept, shard, ctx.group))
            else:
                dw = wgrad(kept, arriving)
        return None if dx is None else dx.wait(), dw, db, *[None] * 4


def _cast_input(
    whole: Tensor, operands: Fp8Operands, *, noted: bool, kept: bool
) -> tuple[Fp8Matrix, tuple[Tensor | None, Tensor | None]]:
    """X for the forward product, and what of it is kept for dW: values [i, m] and their inverse."""
    matrix = whole.flatten(0, -2)
    if not kept:
        return operands.by_rows(Operand.INPUT, matrix, noted=noted), (None, None)
    rows, columns = operands.both_ways(Operand.INPUT, matrix, noted=noted)
    return rows, (columns.values, columns.inverse)


def _cast_gradient(
    rows: Tensor, operands: Fp8Operands, *, for_dw: bool
) -> tuple[Fp8Matrix, Fp8Matrix | None]:
    """dY [m, o] for dX, and transposed for dW where there is one."""
    if for_dw:
        return operands.both_ways(Operand.GRADIENT, rows, noted=True)
    return operands.by_rows(Operand.GRADIENT, rows, noted=True), None


def _input_gradient(dy: Fp8Matrix, weight: Tensor, grad: Tensor, ctx: Any) -> Tensor:
    # [m, o] x [o, i] -> [b, s, i]
    w = ctx.operands.by_columns(Operand.WEIGHT, weight)
    product: Tensor = ctx.operands.backend.fp8_product(dy, w, out=ctx.out)
    return product.view(*grad.shape[:-1], -1)


def _weight_gradient(
    operands: Fp8Operands, dy: Fp8Matrix, out: torch.dtype, kept: Sequence[Tensor | None],
    arriving: Pending | None,
) -> Tensor:  # fmt: skip
    """dY^T [o, m] by X [m, i] -> [o, i]; X as it was kept, or gathered."""
    values, inverse = kept
    if values is None or inverse is None:
        assert arriving is not None
        columns = operands.by_columns(Operand.INPUT, arriving.wait().flatten(0, -2))
    else:
        columns = Fp8Matrix(values, inverse)
    return operands.backend.fp8_product(dy, columns, out=out)


def _later(
    wgrad: Callable[..., Tensor], kept: Sequence[Tensor | None], shard: Tensor | None, group: Group
) -> Tensor:
    return wgrad(kept, None if shard is None else _gather(shard.detach(), group))


def _gather(shard: Tensor, group: Group) -> Pending:
    return group.start_all_gather(shard, SEQUENCE)
