"""Products of matrices cut in blocks over a grid of ranks, for 2d, 2.5d and 3d tensor parallelism.

SUMMA (2d, 2.5d). Rank (i, j) of row i and column j holds X(i,j) [b/q, s, h/q] and the block A(i,j)
of a matrix from h to o, stored transposed as torch has it: `weight` [o/q, h/q]. Three loops of q
steps (arXiv 2104.05343, section 3.1), each of which broadcasts blocks and multiplies them:

    Y(i,j)  = sum_l X(i,l) A(l,j)       X(i,l) travels along col, A(l,j) along row; sums stay here
    dX(i,l) = sum_j dY(i,j) A(l,j)^T    A(l,j) travels along row; partial sums are reduced along col
    dA(l,j) = sum_i X(i,l)^T dY(i,j)    X(i,l) travels along col; partial sums are reduced along row

The group `col` has the ranks of one row of the grid, which differ in their column; `row` has those
of one column. The table of words E [v, h] is held with E(i,j) at rank (i, j), so that logits L = X
E^T are the second loop and its backward the other two:

    L(i,l)  = sum_j X(i,j) E(l,j)^T
    dX(i,j) = sum_l dL(i,l) E(l,j)      dE(l,j) = sum_i dL(i,l)^T X(i,j)

In each loop, while step l is multiplied, the blocks of step l + 1 are broadcast and the sums of
step l - 1 are reduced: two buffers per operand. Only a rank's own blocks are saved for backward.
Sums of 16-bit blocks are rounded to 16 bit at each of the q steps, as those of an all-reduce are.

Tesseract (2.5d; arXiv 2105.14500) runs this at each depth for its share of the samples. Each depth
then has a part of the sum dA; it is summed over depth once a step, with the other partial gradients
(train/layers/parameters.py), not once a product.

The cube (3d). On a cube of l^3 ranks (arXiv 2105.14450, section 3) every operand is cut l^3 ways.
One product

    Y = X W^T      X [b, s, i],  W [o, i],  Y [b, s, o]

gathers X along the axis `source`, W along `weight`, and scatters the partial sums of Y along
`target`; each of the three gathered matrices has 1/l^2 of the full one:

    X  [b/l^2, s, i/l] -> [b/l, s, i/l]        samples gathered
    W  [o/l, i/l^2] -> [o/l, i/l]              columns gathered; of a table of words its rows
    Y  [b/l, s, o/l] -> [b/l^2, s, o/l]        summed, samples scattered

Outside, X's samples are split by (input, weight) and its hidden states by output. The product to
the inside has source = input and target = output, the one back to the outside source = output and
target = input, so that after two of them samples are split as before (mpctl/core/tensor_grid.py).
Backward mirrors it: dY is gathered along target; dX = dY W is scattered along source, dW = dY^T X
along weight. Its gathers start together, and dX is summed while dW is computed. Only a rank's own
parts are saved for backward.

Letters: b batch, s sequence, h or i in, o out, v vocabulary, q side of the grid, l of the cube.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from mpctl.train.layers.linear import save_operands
from mpctl.train.layers.mappings import SAMPLES
from mpctl.train.transport.group import Group, Pending


@dataclass(frozen=True)
class Square:
    """The two groups of a rank of a q x q grid: `col` has the ranks in its row of the grid, which
    differ in their column, and `row` those in its column."""

    col: Group
    row: Group


def summa_linear(x: Tensor, weight: Tensor, square: Square) -> Tensor:
    """Y = X A: x [b/q, s, h/q], weight [o/q, h/q] -> [b/q, s, o/q]; differentiable."""
    result: Tensor = _Linear.apply(x, weight, square)
    return result


def summa_logits(x: Tensor, table: Tensor, square: Square) -> Tensor:
    """L = X E^T: x [b/q, s, h/q], table [v/q, h/q], whose rows are cut over `row` -> [b/q, s, v/q],
    cut over `col`; differentiable."""
    result: Tensor = _Logits.apply(x, table, square)
    return result


def broadcasts(block: Tensor, group: Group) -> Iterator[Tensor]:
    """The blocks of the group's ranks in order, all of one shape. The broadcast of the first starts
    at once, that of each next one while the caller uses the one before. A block may be overwritten
    once the next one was returned."""
    block, spare = block.contiguous(), dict[int, Tensor]()

    def start(source: int) -> Pending:
        if source == group.rank:
            return group.start_broadcast(block, source)
        if source % 2 not in spare:
            spare[source % 2] = torch.empty_like(block)
        return group.start_broadcast(spare[source % 2], source)

    def arrivals(coming: Pending) -> Iterator[Tensor]:
        for following in range(1, group.size):
            arriving, coming = coming, start(following)
            yield arriving.wait()
        yield coming.wait()

    return arrivals(start(0))


@dataclass
class Reductions:
    """Pending reductions of partial sums, one for each rank of `group`, which keeps the total."""

    group: Group
    result: Tensor | None = None
    _last: tuple[int, Pending] | None = field(default=None, repr=False)

    def add(self, partial: Tensor, target: int) -> None:
        """Start the sum of `partial`, which rank `target` of the group keeps."""
        started = target, self.group.start_reduce(partial, target)
        self._finish()
        self._last = started

    def total(self) -> Tensor:
        """This rank's total, once all partial sums were added."""
        self._finish()
        assert self.result is not None, f"no sum for rank {self.group.rank} of {self.group.size}"
        return self.result

    def _finish(self) -> None:
        if self._last is not None:
            target, pending = self._last
            summed = pending.wait()
            if target == self.group.rank:
                self.result = summed
            self._last = None


def reduced(left: Tensor, blocks: Iterable[Tensor], group: Group) -> Tensor:
    """This rank's sum of left @ block; the blocks are one for each rank of the group, and each
    product is reduced while the next is computed."""
    sums = Reductions(group)
    for target, block in enumerate(blocks):
        sums.add(left @ block, target)
    return sums.total()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, square: Square) -> Tensor:
        ctx.square = square
        save_operands(ctx, x, weight)
        # [b/q, s, h/q] -> [n, h/q] -> [n, o/q], n = b/q * s
        rows, y = x.flatten(0, -2), x.new_empty(*x.shape[:-1], len(weight))
        sums = y.view(len(rows), -1)
        for step, (x_l, w_l) in enumerate(
            zip(broadcasts(rows, square.col), broadcasts(weight, square.row), strict=True)
        ):
            torch.addmm(sums, x_l, w_l.T, beta=min(step, 1), out=sums)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (x, weight), square = ctx.saved_tensors, ctx.square
        # [b/q, s, o/q] -> [n, o/q]
        rows, dx, dw = grad.flatten(0, -2), None, None
        if weight is not None:
            dx = reduced(rows, broadcasts(weight, square.row), square.col)
            dx = dx.view(*grad.shape[:-1], -1)
        if x is not None:
            dw = reduced(rows.T, broadcasts(x.flatten(0, -2), square.col), square.row)
        return dx, dw, None


class _Logits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor, square: Square) -> Tensor:
        ctx.square = square
        save_operands(ctx, x, table)
        tables = (e_l.T for e_l in broadcasts(table, square.row))
        return reduced(x.flatten(0, -2), tables, square.col).view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (x, table), square = ctx.saved_tensors, ctx.square
        # [b/q, s, v/q] -> [n, v/q]
        rows, sums = grad.flatten(0, -2), Reductions(square.row)
        tables = None if table is None else broadcasts(table, square.row)
        dx: Tensor | None = None
        for step, l_l in enumerate(broadcasts(rows, square.col)):
            if tables is not None:
                e_l = next(tables)
                dx = rows.new_empty(len(rows), e_l.shape[1]) if dx is None else dx
                torch.addmm(dx, l_l, e_l, beta=min(step, 1), out=dx)
            if x is not None:
                sums.add(l_l.T @ x.flatten(0, -2), step)
        whole = None if dx is None else dx.view(*grad.shape[:-1], -1)
        return whole, None if x is None else sums.total(), None


@dataclass(frozen=True)
class CubeGroups:
    """The groups of one product; weight_dim: the dimension along which W is split."""

    source: Group
    weight: Group
    target: Group
    weight_dim: int = 1


def cube_linear(x: Tensor, weight: Tensor, groups: CubeGroups) -> Tensor:
    """Y = X W^T: x [b/l^2, s, i/l], weight [o/l, i/l^2] (a table of words: [v/l^2, i/l]) ->
    [b/l^2, s, o/l]; differentiable."""
    result: Tensor = _Product.apply(x, weight, groups)
    return result


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, groups: CubeGroups) -> Tensor:
        ctx.groups = groups
        save_operands(ctx, x, weight)
        inputs = groups.source.start_all_gather(x, SAMPLES)
        weights = groups.weight.start_all_gather(weight, groups.weight_dim)
        return groups.target.reduce_scatter(F.linear(inputs.wait(), weights.wait()), SAMPLES)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (x, weight), groups = ctx.saved_tensors, ctx.groups
        grads = groups.target.start_all_gather(grad, SAMPLES)
        weights = None if weight is None else groups.weight.start_all_gather(weight, groups.weight_dim)
        inputs = None if x is None else groups.source.start_all_gather(x, SAMPLES)
        # [b/l, s, o/l] -> [n, o/l], n = b/l * s
        whole = grads.wait()
        rows, dx, dw = whole.flatten(0, -2), None, None
        if weights is not None:
            partial = (rows @ weights.wait()).view(*whole.shape[:-1], -1)
            dx = groups.source.start_reduce_scatter(partial, SAMPLES)
            weights = None  # free it before dW needs as much
        if inputs is not None:
            partial = rows.T @ inputs.wait().flatten(0, -2)
            dw = groups.weight.reduce_scatter(partial, groups.weight_dim)
        return None if dx is None else dx.wait(), dw, None
