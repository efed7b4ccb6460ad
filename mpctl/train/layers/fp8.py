"""Linear layers' products in fp8, and the scales of their operands.

    forward   Y = X W^T      X and W in e4m3
    dX        dX = dY W      dY in e5m2, W in e4m3
    dW        dW = dY^T X    dY in e5m2, X in e4m3

Tensor cores multiply fp8 along the last dimension of both operands (cuBLASLt's TN), so that a
backward needs W, and for dW also X and dY, transposed: a matrix is cast in both layouts if both are
read. X is saved for backward in fp8, transposed as dW reads it, 1 byte an element instead of 2; a
sequence-parallel layer saves the shard [b, s/t, i] in 16 bit, which is gathered and cast again. W
is a parameter and not saved, but cast again for dX. Biases and their gradients are in 16 bit, and
so are all results and all messages. Products and messages are in the same order as in linear.py.

Where a step has several micro batches, W is cast once a step instead, in both layouts by one kernel
(`HeldWeights`), and kept until the step ends: 2 bytes a parameter in memory, 4 moved a step instead
of 6 a micro batch. Parameters that are gathered for each micro batch (ZeRO 3) are to take no memory
in between, and are cast after each gather. Values are the same: scales hold for a step.

Delayed scaling (`Fp8Scales`): a table has a row for each linear layer of the unsharded model and a
column for X, W and dY. In a step every cast raises the entry of its tensor to the tensor's largest
element. After the step the entries are maximised over all ranks, in one message of 12 bytes a
layer, and become the newest of the last `length` ones; the largest of these gives the scale of the
next step (Transformer Engine's DelayedScaling with amax_compute_algo "max"; arXiv 2209.05433,
section 3.2). Length 2, a tensor whose largest elements were 3.0, 1.0 and 1.0: scales 128, 128, 256.

So a tensor has one scale over all micro batches, replicas, positions and tensor-parallel ranks:
neither the scale nor the cast values depend on the layout, bit for bit. Every rank has all rows, so
that any rank can save them, and a resumed run may use other stages. In the first step, and in a
layer that is bound to no table, each tensor is scaled by its own largest element. An entry that is
not finite, or 0, is replaced by the largest of the steps before: a step that is skipped for an
overflow must not leave a scale behind.

Letters: b batch, s sequence, i in, o out, m = b s rows, n columns, t ranks of the group.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from mpctl.train.kernels.backend import TORCH_BACKEND, KernelBackend
from mpctl.train.kernels.fp8 import (
    Fp8Cast,
    Fp8Matrix,
    Operand,
    largest,
    largest_exponents,
    note_largest,
    operand_scales,
    power_of_two_scale,
)
from mpctl.train.transport.group import Group

_APART = 4
"""Elements between two inverses: cuBLASLt takes the address of each and refuses one that 16 bytes do
not divide (CUBLAS_STATUS_NOT_SUPPORTED, seen on an H200)."""


@dataclass(frozen=True)
class ScaleRow:
    """A layer's part of a table of scales: float32 [3] each, in the order of Operand.

    scales, inverses: the factors of operands, and 1 over them; None before the first step has
    ended. amax: the largest elements in the current step, raised by every cast that is noted.
    """

    amax: Tensor
    scales: Tensor | None = None
    inverses: Tensor | None = None


class Fp8Product(NamedTuple):
    """A product in fp8: what casts its operands, and its weight [.., i]."""

    operands: Fp8Operands
    weight: Tensor


@runtime_checkable
class CastsToFp8(Protocol):
    """A layer whose products may be in fp8. It has no attributes: a parameter of an nn.Module is
    none to isinstance since Python 3.12."""

    def fp8_products(self) -> Mapping[str, Fp8Product]:
        """The products that are in fp8, by the suffix of their names after the layer's: one named
        "", or several if the layer has several weights."""


class Fp8Gradient(NamedTuple):
    """dY in fp8, [m, o] for dX or transposed for dW, and the dtype of the result."""

    matrix: Fp8Matrix
    dtype: torch.dtype


@dataclass
class HeldWeight:
    """The casts of a weight in a step. memory: of both layouts; inverse: 1 over their scale, None
    before the step has cast it; is_noted: whether its largest element counts for later steps."""

    memory: Fp8Cast
    inverse: Tensor | None = None
    is_noted: bool = False

    @classmethod
    def of(cls, weight: Tensor) -> HeldWeight:
        """Memory for a weight [.., i], whose outer dimensions are rows."""
        rows, columns = weight.numel() // weight.shape[-1], weight.shape[-1]
        dtype, device = Operand.WEIGHT.dtype, weight.device
        return cls(
            Fp8Cast(
                torch.empty(rows, columns, dtype=dtype, device=device),
                torch.empty(columns, rows, dtype=dtype, device=device),
            )
        )


class Fp8Operands:
    """Casts the operands of a linear layer and multiplies them, as `linear.Products` says. backend:
    computes casts and products. row: this layer's row of a table of scales; None to scale each
    tensor by its own largest element. held: the casts of its weight, if a step keeps them."""

    def __init__(self, backend: KernelBackend = TORCH_BACKEND) -> None:
        self.backend = backend
        self.row: ScaleRow | None = None
        self.held: HeldWeight | None = None

    def output(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, *, keep: bool, noted: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See Products. The values of the transpose of X [m, i] and their inverse scale are
        saved."""
        rows, columns = self.cast(Operand.INPUT, x.flatten(0, -2), columns=keep, noted=noted)
        w = self.weight(weight, noted=noted)
        assert rows is not None
        y = self.backend.fp8_product(rows, w, out=x.dtype, bias=bias, fast=True)
        # As torch's linear: not a view, which the sum over the group could not overwrite.
        y = torch.ops.aten._unsafe_view(y, (*x.shape[:-1], len(weight)))
        return y, () if columns is None else (columns.values, columns.inverse)

    def operand(self, x: Tensor) -> tuple[Tensor, ...]:
        """See Products."""
        columns = self.by_columns(Operand.INPUT, x.flatten(0, -2))
        return columns.values, columns.inverse

    def gradient(self, rows: Tensor, *, for_dw: bool) -> tuple[Fp8Gradient, Fp8Gradient | None]:
        """See Products."""
        by_rows, by_columns = self.cast(Operand.GRADIENT, rows, columns=for_dw, noted=True)
        assert by_rows is not None
        for_dx = Fp8Gradient(by_rows, rows.dtype)
        return for_dx, None if by_columns is None else Fp8Gradient(by_columns, rows.dtype)

    def input_gradient(self, dy: Fp8Gradient, weight: Tensor) -> Tensor:
        """See Products."""
        return self.backend.fp8_product(dy.matrix, self.transposed_weight(weight), out=dy.dtype)

    def weight_gradient(self, dy: Fp8Gradient, kept: Sequence[Tensor]) -> Tensor:
        """See Products."""
        return self.backend.fp8_product(dy.matrix, Fp8Matrix(*kept), out=dy.dtype)

    def weight(self, weight: Tensor, *, noted: bool) -> Fp8Matrix:
        """W [o, i] in fp8 for the forward product. noted: as in `cast`."""
        held = self.held
        if held is None:
            rows, _ = self.cast(Operand.WEIGHT, weight, noted=noted)
            assert rows is not None
            return rows
        if held.inverse is None:
            rows, _ = self.cast(Operand.WEIGHT, weight, columns=True, noted=noted, into=held.memory)
            assert rows is not None
            held.inverse, held.is_noted = rows.inverse, noted
        elif noted and not held.is_noted and self.row is not None:  # first cast without gradients
            note_largest(weight, self.row.amax[Operand.WEIGHT])
            held.is_noted = True
        assert held.memory.by_rows is not None
        return Fp8Matrix(held.memory.by_rows, held.inverse)

    def transposed_weight(self, weight: Tensor) -> Fp8Matrix:
        """W [o, i] in fp8 for dX, after the forward of the same step: [i, o]."""
        held = self.held
        if held is None or held.inverse is None:
            return self.by_columns(Operand.WEIGHT, weight)
        assert held.memory.by_columns is not None
        return Fp8Matrix(held.memory.by_columns, held.inverse)

    def by_columns(self, which: Operand, matrix: Tensor) -> Fp8Matrix:
        """A matrix [m, n] that was noted before, in fp8 and transposed: [n, m]."""
        _, columns = self.cast(which, matrix, rows=False, columns=True)
        assert columns is not None
        return columns

    def cast(
        self,
        which: Operand,
        matrix: Tensor,
        *,
        rows: bool = True,
        columns: bool = False,
        noted: bool = False,
        into: Fp8Cast | None = None,
    ) -> tuple[Fp8Matrix | None, Fp8Matrix | None]:
        """A matrix [m, n] in fp8: by rows [m, n] and by columns, transposed [n, m]; None for one
        that is not requested. noted: whether its largest element counts for later steps. into:
        memory for both."""
        row = self.row
        if row is not None and row.scales is not None and row.inverses is not None:
            scale, inverse = row.scales[which], row.inverses[which]
        else:
            scale = power_of_two_scale(largest(matrix), which.dtype)
            inverse = scale.reciprocal()  # exact: a power of two
        amax = row.amax[which] if row is not None and noted else None
        by_rows, by_columns = self.backend.fp8_cast(
            matrix, scale, which.dtype, rows=rows, columns=columns, amax=amax, into=into
        )
        return (
            None if by_rows is None else Fp8Matrix(by_rows, inverse),
            None if by_columns is None else Fp8Matrix(by_columns, inverse),
        )


class HeldWeights:
    """The casts of the weights of these products, made once a step."""

    def __init__(self, products: Iterable[Fp8Product] = ()) -> None:
        self.held: list[HeldWeight] = []
        for operands, weight in products:
            operands.held = HeldWeight.of(weight)
            self.held.append(operands.held)

    def release(self) -> None:
        """Have the next product cast its weight again, which changes now or may have changed."""
        for held in self.held:
            held.inverse = None


class Fp8Scales:
    """The table of a model; `names` are those of its linear layers, in the same order on every
    rank, or none without delayed scaling.

    history: [length, n, 3], the largest elements of the last steps; steps: number of valid ones, at
    most `length`.
    """

    def __init__(self, names: Sequence[str], length: int, device: torch.device) -> None:
        self.names, self.steps = tuple(names), 0
        shape = (len(names), len(Operand))
        self.history = torch.zeros(length, *shape, device=device)
        self.amax = torch.zeros(shape, device=device)
        self.scales = torch.ones(shape, device=device)
        self.inverses = torch.ones(*shape, _APART, device=device)[..., 0]
        self.exponents = largest_exponents(device)
        self._bound: dict[str, Fp8Operands] = {}

    def bind(self, layers: Mapping[str, Fp8Operands]) -> None:
        """Make these layers, by name, read their scales from this table. Raises ValueError for a
        name that is not in the table."""
        if unknown := sorted(layers.keys() - set(self.names)):
            raise ValueError(f"linear layers without a row of scales: {', '.join(unknown)}")
        self._bound.update(layers)
        self._hand_out()

    def end_step(self, world: Group) -> None:
        """End a step: take the maximum of the largest elements over all ranks, which call it
        together, and choose the scales of the next step. On CUDA the host does not wait."""
        if not self.names:
            return
        own = self.amax.nan_to_num_(nan=torch.inf, posinf=torch.inf)  # a maximum may drop a NaN
        seen = world.all_reduce(own, "max")
        newest = torch.where(torch.isfinite(seen) & (seen > 0), seen, self.history.amax(0))
        self.history.copy_(torch.cat((self.history[1:], newest[None])))
        self._choose(self.steps + 1)
        self.amax.zero_()

    def state(self) -> dict[str, list[list[float]]]:
        """The values to save in a checkpoint: by layer the largest elements of X, W and dY in each
        recorded step, oldest first."""
        known = self.history[len(self.history) - self.steps :].transpose(0, 1).tolist()
        return dict(zip(self.names, known, strict=True))

    def load(self, state: Mapping[str, Sequence[Sequence[float]]]) -> None:
        """Restore from a checkpoint. Layers that are not in it (all, if it has another dtype) begin
        with the largest element of the first step; of a longer history the end is used."""
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
        reading the same memory, so that compiled or captured graphs stay valid."""
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
