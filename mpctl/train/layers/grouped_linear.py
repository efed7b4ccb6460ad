"""A linear layer for each expert: rows sorted by expert, Y_e = X_e W_e^T.

The three products are those of linear.py, each grouped (train/kernels/grouped.py). dX is computed before
dW, and dW of a weight with a `DeferredWgrad` when that is due. Experts without rows get zeros.

In fp8 the operands of all experts of a rank are cast as one matrix each, [R, i], [E o, i] and
[R, o], under one row of the table of scales: with delayed scaling a layer's experts have one scale
in every layout. With tensorwise scaling a rank scales by the experts, and the rows, that it has, as
a tensor-parallel rank does by its part of a matrix: scales are powers of two, so that what is cast
differs only where an element is too small for a normal number (train/kernels/fp8.py).

Letters: R rows, E experts of this rank, i inputs, o outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mpctl.train.kernels.fp8 import Fp8Matrix, Operand
from mpctl.train.kernels.grouped import RowGroups, grouped_input_gradient, grouped_output, grouped_weight_gradient
from mpctl.train.layers.fp8 import Fp8Gradient, Fp8Operands, Fp8Product
from mpctl.train.layers.linear import Adapters
from mpctl.train.layers.parameters import DeferredWgrad, StoredWeight, defer_wgrad, deferred_wgrad_of, stored_of

_FP8_MULTIPLE = 16  # what cuBLASLt asks of the contracted dimension in fp8


class GroupedLinear(nn.Module):
    """[R, i] -> [R, o] by a weight [E, .., i] whose inner dimensions are the outputs."""

    lora: Adapters | None

    def __init__(self, weight: nn.Parameter, fp8: Fp8Operands | None = None) -> None:
        super().__init__()
        self.weight, self.fp8, self.lora = weight, fp8, None

    def forward(self, rows: Tensor, groups: RowGroups) -> Tensor:
        """rows sorted by expert; groups: numbers of rows of each expert."""
        products: GroupedProducts = PlainGrouped() if self.fp8 is None else Fp8Grouped(self.fp8)
        if (stored := stored_of(self.weight)) is not None:
            products = StoredGrouped(stored)
        is_training = torch.is_grad_enabled()
        result: Tensor = _Grouped.apply(rows, self.weight, products, groups, is_training)
        return result if self.lora is None else self.lora.added(result, rows, self.weight, groups)

    def defer_wgrad(self, deferred: DeferredWgrad) -> None:
        """Make backward defer the weight's gradient to `deferred`."""
        defer_wgrad(self.weight, deferred)

    def fp8_products(self) -> dict[str, Fp8Product]:
        """The product, if it is in fp8."""
        return {} if self.fp8 is None else {"": Fp8Product(self.fp8, self.weight)}

    def extra_repr(self) -> str:
        return f"{' x '.join(map(str, self.weight.shape))}"


class GroupedProducts(Protocol):
    """As linear.Products, for grouped rows: weights are [E, o, i]."""

    def output(
        self, rows: Tensor, weight: Tensor, groups: RowGroups, *, keep: bool, noted: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """[R, i] -> [R, o], and with `keep` the tensors of X for `weight_gradient`."""

    def gradient(self, grad: Tensor, *, for_dw: bool) -> tuple[Any, Any]:
        """dY [R, o] as `input_gradient` takes it, and as `weight_gradient` does."""

    def input_gradient(self, dy: Any, weight: Tensor, groups: RowGroups) -> Tensor:
        """dX [R, i]."""

    def weight_gradient(self, dy: Any, kept: Sequence[Tensor], groups: RowGroups) -> Tensor:
        """dW [E, o, i]."""


class PlainGrouped:
    """Products of operands that are not cast."""

    def output(
        self, rows: Tensor, weight: Tensor, groups: RowGroups, *, keep: bool, noted: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See GroupedProducts."""
        return grouped_output(rows, weight, groups), (rows,) if keep else ()

    def gradient(self, grad: Tensor, *, for_dw: bool) -> tuple[Tensor, Tensor]:
        """See GroupedProducts."""
        return grad, grad

    def input_gradient(self, dy: Tensor, weight: Tensor, groups: RowGroups) -> Tensor:
        """See GroupedProducts."""
        return grouped_input_gradient(dy, weight, groups)

    def weight_gradient(self, dy: Tensor, kept: Sequence[Tensor], groups: RowGroups) -> Tensor:
        """See GroupedProducts."""
        return grouped_weight_gradient(dy, kept[0], groups)


class StoredGrouped(PlainGrouped):
    """Products by a frozen weight that is made of its stored bits for each of them."""

    def __init__(self, stored: StoredWeight) -> None:
        self.stored = stored

    def output(
        self, rows: Tensor, weight: Tensor, groups: RowGroups, *, keep: bool, noted: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See GroupedProducts."""
        return super().output(rows, _matrices(self.stored.whole()), groups, keep=keep, noted=noted)

    def input_gradient(self, dy: Tensor, weight: Tensor, groups: RowGroups) -> Tensor:
        """See GroupedProducts."""
        return super().input_gradient(dy, _matrices(self.stored.whole()), groups)


class Fp8Grouped:
    """Products of operands in fp8: each cast as one matrix, multiplied group by group."""

    def __init__(self, operands: Fp8Operands) -> None:
        self.operands, self.backend = operands, operands.backend

    def output(
        self, rows: Tensor, weight: Tensor, groups: RowGroups, *, keep: bool, noted: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See GroupedProducts. The transpose of X [i, R] in fp8 and its inverse scale are saved."""
        result = rows.new_empty(len(rows), weight.shape[1])
        w = self.operands.weight(weight.flatten(0, 1), noted=noted)
        if not len(rows):
            return result, (rows, rows) if keep else ()
        x, columns = self.operands.cast(Operand.INPUT, rows, columns=keep, noted=noted)
        assert x is not None
        values = w.values.view(weight.shape)
        for own, matrix in zip(groups.slices(), values, strict=True):
            if own.stop > own.start:
                a, b = Fp8Matrix(x.values[own], x.inverse), Fp8Matrix(matrix, w.inverse)
                result[own] = self.backend.fp8_product(a, b, out=rows.dtype, fast=True)
        return result, () if columns is None else tuple(columns)

    def gradient(self, grad: Tensor, *, for_dw: bool) -> tuple[Fp8Gradient, Fp8Gradient | None]:
        """See GroupedProducts."""
        if not len(grad):
            none = Fp8Gradient(Fp8Matrix(grad, grad), grad.dtype)
            return none, none
        by_rows, columns = self.operands.cast(Operand.GRADIENT, grad, columns=for_dw, noted=True)
        assert by_rows is not None
        for_dx = Fp8Gradient(by_rows, grad.dtype)
        return for_dx, None if columns is None else Fp8Gradient(columns, grad.dtype)

    def input_gradient(self, dy: Fp8Gradient, weight: Tensor, groups: RowGroups) -> Tensor:
        """See GroupedProducts."""
        rows, inverse = dy.matrix
        experts, outputs, inputs = weight.shape
        result = weight.new_empty(len(rows), inputs, dtype=dy.dtype)
        if not len(rows):
            return result
        w = self.operands.transposed_weight(weight.flatten(0, 1))
        matrices = w.values.view(inputs, experts, outputs).unbind(1)
        for own, matrix in zip(groups.slices(), matrices, strict=True):
            if own.stop > own.start:
                a, b = Fp8Matrix(rows[own], inverse), Fp8Matrix(matrix.contiguous(), w.inverse)
                result[own] = self.backend.fp8_product(a, b, out=dy.dtype)
        return result

    def weight_gradient(self, dy: Fp8Gradient, kept: Sequence[Tensor], groups: RowGroups) -> Tensor:
        """See GroupedProducts. Rows are contracted: they are filled up with zeros to a multiple of
        16, as tensor cores want them."""
        (grad, inverse), (columns, x_inverse) = dy.matrix, kept
        is_empty = not sum(groups.sizes)
        outputs, inputs = (grad.shape[1], columns.shape[1]) if is_empty else (len(grad), len(columns))
        result = grad.new_zeros(len(groups.sizes), outputs, inputs, dtype=dy.dtype)
        for own, into in zip(groups.slices(), result, strict=True):
            if own.stop > own.start:
                a = Fp8Matrix(_filled(grad[:, own]), inverse)
                b = Fp8Matrix(_filled(columns[:, own]), x_inverse)
                into.copy_(self.backend.fp8_product(a, b, out=dy.dtype))
        return result


def _filled(matrix: Tensor) -> Tensor:
    """[m, r] in fp8 -> [m, r'] contiguous, with zeros up to a multiple of 16."""
    missing = -matrix.shape[1] % _FP8_MULTIPLE
    return F.pad(matrix.view(torch.uint8), (0, missing)).view(matrix.dtype)


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, products: GroupedProducts, groups: RowGroups, is_training: bool
    ) -> Tensor:
        ctx.products, ctx.groups, ctx.shape = products, groups, weight.shape
        ctx.deferred = deferred_wgrad_of(weight)
        ctx.leaf = weight if ctx.deferred else None
        for_dx, for_dw = ctx.needs_input_grad[:2]
        y, kept = products.output(rows, _matrices(weight), groups, keep=for_dw, noted=is_training)
        ctx.save_for_backward(weight if for_dx else None, *kept)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, *kept = ctx.saved_tensors
        products, groups, shape = ctx.products, ctx.groups, ctx.shape
        for_dw, dx, dw = bool(kept), None, None
        dy, dy_for_dw = products.gradient(grad.contiguous(), for_dw=for_dw)
        if weight is not None:
            dx = products.input_gradient(dy, _matrices(weight), groups)
        if for_dw and ctx.deferred is None:
            dw = products.weight_gradient(dy_for_dw, kept, groups).view(shape)
        elif for_dw:  # see linear.py
            values = [tensor.detach() for tensor in kept]
            ctx.deferred.add(ctx.leaf, lambda: products.weight_gradient(dy_for_dw, values, groups).view(shape))
        return dx, dw, None, None, None


def _matrices(weight: Tensor) -> Tensor:
    """[E, .., i] -> [E, o, i]."""
    return weight.flatten(1, -2)
