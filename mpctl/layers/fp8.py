"""Linear layers' products in fp8, and the scales of their operands.

    forward   Y = X W^T      X and W in e4m3
    dX        dX = dY W      dY in e5m2, W in e4m3
    dW        dW = dY^T X    dY in e5m2, X in e4m3

Tensor cores multiply fp8 along the last dimension of both operands (cuBLASLt's TN), so that a
backward needs W, and for dW also X and dY, transposed: each is cast both ways where it is read both
ways. What is kept for backward is X in fp8, transposed as dW reads it, 1 byte an element in place
of 2; of a sequence-parallel layer the shard [b, s/t, i] in 16 bit, which is gathered and cast
again. W is a parameter: it is not kept, and cast again for dX. Biases and their gradients are in 16
bit, and so are all results and all messages. As in linear.py, dX comes first, and its sum over the
group travels while dW is computed.

Delayed scaling (`Fp8Scales`): a table has a row for each linear layer of the whole model and a
column for X, W and dY. In a step every cast raises the entry of its tensor to the largest element
that it met. After the step the entries are maximised over all ranks, in one message of 12 bytes a
layer, and become the newest of the last `length` ones; the largest of these gives the scale of the
next step (Transformer Engine's DelayedScaling with amax_compute_algo "max"; arXiv 2209.05433,
section 3.2). Length 2, a tensor whose largest elements were 3.0, 1.0 and 1.0: scales 128, 128, 256.

So the scale of a tensor is that of the whole tensor, over all micro batches, replicas, positions
and tensor-parallel ranks: it depends on no layout, bit for bit, and neither do the values that are
cast. Every rank knows all rows, so that any of them can save them, and a resumed run may cut its
stages otherwise. In the first step nothing is known, and a layer that is bound to no table never
knows: each tensor is then scaled by its own largest element. An entry that is not finite, or 0, is
replaced by the largest of the steps before: a step that is skipped for an overflow must not leave a
scale behind.

Letters: b batch, s sequence, i in, o out, m = b s rows, n columns, t ranks of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mpctl.kernels.backend import TORCH_BACKEND, KernelBackend
from mpctl.kernels.fp8 import (
    Fp8Cast,
    Fp8Matrix,
    Operand,
    largest,
    largest_exponents,
    operand_scales,
    power_of_two_scale,
)
from mpctl.layers.mappings import SEQUENCE, start_sum
from mpctl.layers.parameters import deferred_wgrad_of
from mpctl.transport.group import Group, Pending


@dataclass(frozen=True)
class ScaleRow:
    """A layer's part of a table of scales: float32 [3] each, in the order of Operand.

    scales, inverses: what operands are multiplied by, and 1 over it; None before a step has been
    seen. amax: the largest elements of the step under way, raised by every cast that is noted.
    """

    amax: Tensor
    scales: Tensor | None = None
    inverses: Tensor | None = None


@runtime_checkable
class CastsToFp8(Protocol):
    """A layer whose products may be in fp8."""

    def fp8_operands(self) -> Mapping[str, Fp8Operands]:
        """What casts the operands of each product, by the rest of its name behind the layer's: one
        of the name "", several where a layer multiplies by several weights."""


class Fp8Operands:
    """Casts the operands of a linear layer. backend: computes casts and products. row: this layer's
    part of a table of scales; None to scale each tensor by its own largest element."""

    def __init__(self, backend: KernelBackend = TORCH_BACKEND) -> None:
        self.backend = backend
        self.row: ScaleRow | None = None

    def by_rows(self, which: Operand, matrix: Tensor, *, noted: bool) -> Fp8Matrix:
        """A matrix [m, n] in fp8. noted: its largest element counts for the steps to come."""
        scale, inverse = self._scale(which, matrix)
        cast = self._cast(which, matrix, scale, noted=noted)
        assert cast.by_rows is not None
        return Fp8Matrix(cast.by_rows, inverse)

    def by_columns(self, which: Operand, matrix: Tensor) -> Fp8Matrix:
        """A matrix [m, n] that was noted before, in fp8 and transposed: [n, m]."""
        scale, inverse = self._scale(which, matrix)
        cast = self._cast(which, matrix, scale, rows=False, columns=True)
        assert cast.by_columns is not None
        return Fp8Matrix(cast.by_columns, inverse)

    def both_ways(
        self, which: Operand, matrix: Tensor, *, noted: bool
    ) -> tuple[Fp8Matrix, Fp8Matrix]:
        """A matrix [m, n] in fp8, as it is and transposed [n, m]; noted: as of `by_rows`."""
        scale, inverse = self._scale(which, matrix)
        cast = self._cast(which, matrix, scale, columns=True, noted=noted)
        assert cast.by_rows is not None and cast.by_columns is not None
        return Fp8Matrix(cast.by_rows, inverse), Fp8Matrix(cast.by_columns, inverse)

    def _scale(self, which: Operand, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """What to multiply by, and its inverse."""
        row = self.row
        if row is not None and row.scales is not None and row.inverses is not None:
            return row.scales[which], row.inverses[which]
        scale = power_of_two_scale(largest(matrix), which.dtype)
        return scale, scale.reciprocal()  # exact: a power of two

    def _cast(
        self, which: Operand, matrix: Tensor, scale: Tensor, *, rows: bool = True,
        columns: bool = False, noted: bool = False,
    ) -> Fp8Cast:  # fmt: skip
        amax = self.row.amax[which] if self.row is not None and noted else None
        return self.backend.fp8_cast(
            matrix, scale, which.dtype, rows=rows, columns=columns, amax=amax
        )


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


class Fp8Scales:
    """The table of a model; `names` are those of its linear layers, on any rank in the same order,
    or none where nothing is scaled with a delay.

    history: [length, n, 3], the largest elements of the last steps; steps: how many of them there
    were, at most `length`.
    """

    def __init__(self, names: Sequence[str], length: int, device: torch.device) -> None:
        self.names, self.steps = tuple(names), 0
        shape = (len(names), len(Operand))
        self.history = torch.zeros(length, *shape, device=device)
        self.amax = torch.zeros(shape, device=device)
        self.scales = torch.ones(shape, device=device)
        self.inverses = torch.ones(shape, device=device)
        self.exponents = largest_exponents(device)
        self._bound: dict[str, Fp8Operands] = {}

    def bind(self, layers: Mapping[str, Fp8Operands]) -> None:
        """Let these layers, by name, read their scales here. Raises ValueError for a name that the
        table does not have."""
        if unknown := sorted(layers.keys() - set(self.names)):
            raise ValueError(f"linear layers without a row of scales: {', '.join(unknown)}")
        self._bound.update(layers)
        self._hand_out()

    def end_step(self, world: Group) -> None:
        """The step has been computed: agree with all ranks, which call together, on what was seen,
        and choose the scales of the next one. The host waits for nothing on CUDA."""
        if not self.names:
            return
        own = self.amax.nan_to_num_(nan=torch.inf, posinf=torch.inf)  # a maximum may lose a NaN
        seen = world.all_reduce(own, "max")
        newest = torch.where(torch.isfinite(seen) & (seen > 0), seen, self.history.amax(0))
        self.history.copy_(torch.cat((self.history[1:], newest[None])))
        self._choose(self.steps + 1)
        self.amax.zero_()

    def state(self) -> dict[str, list[list[float]]]:
        """What a checkpoint keeps: by layer the largest elements of X, W and dY of each step that
        is known, oldest first."""
        known = self.history[len(self.history) - self.steps :].transpose(0, 1).tolist()
        return dict(zip(self.names, known, strict=True))

    def load(self, state: Mapping[str, Sequence[Sequence[float]]]) -> None:
        """From a checkpoint. Layers that it does not have, and all where it is of another dtype,
        begin with the largest element of the first step; of a longer history the end counts."""
        length = len(self.history)
        kept = {name: list(rows)[-length:] for name, rows in state.items() if rows}
        if not self.names or not set(self.names) <= kept.keys():
            return
        steps = min(len(kept[name]) for name in self.names)
        known = [kept[name][-steps:] for name in self.names]
        values = torch.tensor(known, dtype=torch.float32).transpose(0, 1)
        self.history[length - steps :] = values.to(self.history.device)
        self._choose(steps)

    def _choose(self, steps: int) -> None:
        """Scales of the next step from the largest elements of the last `steps` ones. Layers keep
        reading the same memory, so that what is compiled or captured goes on."""
        largest = self.history.amax(0)
        self.scales.copy_(operand_scales(largest, self.exponents))
        torch.reciprocal(self.scales, out=self.inverses)
        was_known, self.steps = self.steps > 0, min(steps, len(self.history))
        if not was_known:
            self._hand_out()

    def _hand_out(self) -> None:
        rows = {name: row for row, name in enumerate(self.names)}
        for name, operands in self._bound.items():
            row = rows[name]
            known = (self.scales[row], self.inverses[row]) if self.steps else (None, None)
            operands.row = ScaleRow(self.amax[row], *known)
