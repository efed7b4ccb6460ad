"""Messages of one product, norm or loss between the tensor-parallel ranks, in every tensor mode.

The planner lists these messages (plan/estimate/layer_messages.py), the layers send them, and every run
compares the two. With r rows (samples x positions of a micro batch), a product of [r, k] by [k, n]
over a grid (tensor_grid.py) sends, in elements of full messages:

    1d    by the contraction law (matmul.py)
    2d    forward     q broadcasts of X's block r k / t along col, q of W's k n / q^2 along row
          dX          q broadcasts of W's block along row, q reductions of dX's block along col
          dW          q broadcasts of X's block along col, q reductions of dW's block along row
    head  forward     q broadcasts of the table's block along row, q reductions of the logits' block
                      r v / t along col
          backward    q broadcasts of the logits' gradient along col; for dX also q of the table
                      along row; for dW q reductions of the table's gradient along row
    2.5d  as 2d at each depth
    3d    forward     all-gather of X, r k / l^2, and of W, k n / l^2; reduce-scatter of Y,
                      r n / l^2
          backward    all-gather of dY; for dX all-gather of W, reduce-scatter of dX; for dW
                      all-gather of X, reduce-scatter of dW

In a lookup in the word table each rank finds the vectors of its words, and these are summed: one
reduce-scatter over the axes that cut the vocabulary, of r h / hidden parts (in 2.5d of this depth's
rows), and an all-gather in backward. Norms over hidden states that are cut exchange the statistics
of their rows, in float32 at least: layernorm gathers a mean and a sum of squares of each part
forward and sums two numbers a row backward, rmsnorm sums one each way; norms over all heads
together, whose columns are cut, do so in 1d too.

By hand, 2d with q=2, r=8, k=n=4: forward 2 x 8 elements along col and 2 x 4 along row.

Sources: arXiv 2104.05343, section 3 (2d); 2105.14500, section 3 (2.5d); 2105.14450, section 3 (3d).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from mpctl.core.collectives import Kind
from mpctl.core.tensor_grid import TensorGrid
from mpctl.model.operators.matmul import GradNeeds, MatMul

Direction = Literal["forward", "backward"]


class TensorMessage(NamedTuple):
    """`count` equal collectives over the group `axis` of the grid; elements: of the full message.
    is_float: whether they are float32 at least, whatever the training dtype is."""

    axis: str
    kind: Kind
    elements: int
    count: int = 1  # type: ignore[assignment]  # which hides tuple.count
    phase: Direction = "forward"
    is_float: bool = False


class ProductSize(NamedTuple):
    """The sizes of a product X W of [rows, inputs] by [inputs, outputs], before any of them is cut
    over the tensor-parallel ranks. rows: positions of this rank's part of the sequence, times the
    samples of a micro batch."""

    rows: int
    inputs: int
    outputs: int


def product_messages(grid: TensorGrid, product: MatMul, size: ProductSize, needs: GradNeeds) -> list[TensorMessage]:
    """Messages of one product and micro batch, forward and backward; none on one rank."""
    if grid.size == 1:
        return []
    if product.is_lookup and grid.mode != "1d":
        return list(_lookup(grid, size, needs))
    makers = {"1d": _one_dimension, "2d": _summa, "2.5d": _summa, "3d": _three_dimensions}
    return list(makers[grid.mode](grid, product, size, needs))


def _one_dimension(grid: TensorGrid, product: MatMul, size: ProductSize, needs: GradNeeds) -> Iterator[TensorMessage]:
    phases = product.collectives(sequence_parallel=grid.sequence_parallel, needs=needs)
    elements = size.rows * (size.outputs if "tp" in product.forward_axes else size.inputs)
    for kind in phases.forward:
        yield TensorMessage("tp", kind, elements)
    for kind in phases.backward:
        yield TensorMessage("tp", kind, elements, phase="backward")
    if product.is_gathered:  # backward each rank takes its part of dY, which the sequence may split
        yield TensorMessage("tp", "all_gather", size.rows * size.outputs)
        if grid.sequence_parallel and (needs.x or needs.w):
            yield TensorMessage("tp", "all_gather", size.rows * size.outputs, phase="backward")


def _lookup(grid: TensorGrid, size: ProductSize, needs: GradNeeds) -> Iterator[TensorMessage]:
    axes = grid.weight_axes(("vocab", "hidden"))[0]
    # Of the samples that these ranks share: all of them, in 2.5d those of one depth.
    shared = grid.parts(grid.sample_axes()) // grid.parts(axes)
    elements = size.rows // shared * (size.outputs // grid.hidden_parts)
    yield TensorMessage(grid.kind_of(axes), "reduce_scatter", elements)
    if needs.w:
        yield TensorMessage(grid.kind_of(axes), "all_gather", elements, phase="backward")


def _summa(grid: TensorGrid, product: MatMul, size: ProductSize, needs: GradNeeds) -> Iterator[TensorMessage]:
    q = grid.axes["col"]
    x, y = size.rows * size.inputs // grid.size, size.rows * size.outputs // grid.size
    w = size.inputs * size.outputs // q**2
    if product.is_head:
        yield TensorMessage("row", "broadcast", w, q)
        yield TensorMessage("col", "reduce", y, q)
        if needs.x or needs.w:
            yield TensorMessage("col", "broadcast", y, q, "backward")
    else:
        yield TensorMessage("col", "broadcast", x, q)
        yield TensorMessage("row", "broadcast", w, q)
    if needs.x:
        yield TensorMessage("row", "broadcast", w, q, "backward")
        if not product.is_head:
            yield TensorMessage("col", "reduce", x, q, "backward")
    if needs.w:
        if not product.is_head:
            yield TensorMessage("col", "broadcast", x, q, "backward")
        yield TensorMessage("row", "reduce", w, q, "backward")


def _three_dimensions(
    grid: TensorGrid, product: MatMul, size: ProductSize, needs: GradNeeds
) -> Iterator[TensorMessage]:
    side = grid.axes["weight"]
    x, y, w = (
        a * b // side**2 for a, b in ((size.rows, size.inputs), (size.rows, size.outputs), (size.inputs, size.outputs))
    )
    # From inside to outside the roles of the input's and the output's axis are swapped.
    source, target = ("input", "output") if product.is_column else ("output", "input")
    yield TensorMessage(source, "all_gather", x)
    yield TensorMessage("weight", "all_gather", w)
    yield TensorMessage(target, "reduce_scatter", y)
    if needs.x or needs.w:
        yield TensorMessage(target, "all_gather", y, phase="backward")
    if needs.x:
        yield TensorMessage("weight", "all_gather", w, phase="backward")
        yield TensorMessage(source, "reduce_scatter", x, phase="backward")
    if needs.w:
        yield TensorMessage(source, "all_gather", x, phase="backward")
        yield TensorMessage("weight", "reduce_scatter", w, phase="backward")


def norm_messages(
    grid: TensorGrid, norm: str, rows: int, *, goes_back: bool, dim: str = "hidden"
) -> list[TensorMessage]:
    """Messages of one norm over the last dimension of activations, `hidden` between layers or
    `heads` inside, of `rows` rows before they are cut. goes_back: whether backward computes the
    gradient of its input."""
    axes = grid.hidden_axes if dim == "hidden" else grid.feature_axes
    if (parts := grid.parts(axes)) == 1:
        return []
    axis, own = grid.kind_of(axes), rows // grid.sample_parts
    if norm == "layernorm":
        forward = TensorMessage(axis, "all_gather", 2 * own * parts, is_float=True)
    else:
        forward = TensorMessage(axis, "all_reduce", own, is_float=True)
    width = 2 if norm == "layernorm" else 1
    back = TensorMessage(axis, "all_reduce", width * own, phase="backward", is_float=True)
    return [forward, back] if goes_back else [forward]


LOSS_ALL_REDUCES = 3  # maximum, target logit, sum of exponentials


def loss_messages(grid: TensorGrid, rows: int) -> list[TensorMessage]:
    """Messages of the cross entropy of logits whose vocabulary is cut."""
    if grid.feature_parts == 1:
        return []
    axis = grid.kind_of(grid.feature_axes)
    own = rows // grid.sample_parts
    return [TensorMessage(axis, "all_reduce", own, LOSS_ALL_REDUCES, is_float=True)]
