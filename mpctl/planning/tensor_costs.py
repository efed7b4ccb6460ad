"""What a linear layer costs in each tensor mode, in symbols and as numbers.

The first five columns are those of Colossal-AI's documentation of 1D, 2D, 2.5D and 3D tensor
parallelism (docs/features, "Efficiency"): of one layer Y = X W on P ranks, forward and backward,
with collectives as rings. `sent` and `hops` are the same two of communication for what mpctl sends
(operators/tensor_messages.py), with X, W and Y of as many elements, which is the unit.

By hand, P = 4: a square of q = 2 sends 6 (q-1)/q^2 = 1.5 of its unit, a row 2 (P-1)/P = 1.5 too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from mpctl.tensor_grid import TensorGrid


class GridSizes(NamedTuple):
    """The sizes that symbols stand for: P ranks; q (in 3d written l) a side of the grid; d deep."""

    P: int
    q: int
    d: int


class Cost(NamedTuple):
    """A cost as a symbol, and the function that gives its value."""

    symbol: str
    value: Callable[[GridSizes], float]


# Columns by name, with what they mean.
COLUMNS = {
    "computation": "a rank's share of the FLOP",
    "parameters": "a rank's share of the weights, their gradients and optimizer states",
    "activations": "a rank's share of the activations",
    "bandwidth": "what a rank sends, as documented, in units of one matrix",
    "latency": "steps of the rings that follow each other, as documented",
    "sent": "what a rank of mpctl sends, in units of X, W or Y, each as large",
    "hops": "steps of mpctl's rings, one after the other",
}

_ROW = {
    "computation": Cost("1/P", lambda n: 1 / n.P),
    "parameters": Cost("1/P", lambda n: 1 / n.P),
    "activations": Cost("1", lambda n: 1.0),
    "bandwidth": Cost("2(P-1)/P", lambda n: 2 * (n.P - 1) / n.P),
    "latency": Cost("2(P-1)", lambda n: 2 * (n.P - 1)),
    "sent": Cost("2(P-1)/P", lambda n: 2 * (n.P - 1) / n.P),
    "hops": Cost("2(P-1)", lambda n: 2 * (n.P - 1)),
}
_SQUARE = {
    "computation": Cost("1/q^2", lambda n: 1 / n.q**2),
    "parameters": Cost("1/q^2", lambda n: 1 / n.q**2),
    "activations": Cost("1/q^2", lambda n: 1 / n.q**2),
    "bandwidth": Cost("6(q-1)/q", lambda n: 6 * (n.q - 1) / n.q),
    "latency": Cost("6(q-1)", lambda n: 6 * (n.q - 1)),
    "sent": Cost("6(q-1)/q^2", lambda n: 6 * (n.q - 1) / n.q**2),
    "hops": Cost("6q(q-1)", lambda n: 6 * n.q * (n.q - 1)),
}
_SQUARES = {
    "computation": Cost("1/dq^2", lambda n: 1 / (n.d * n.q**2)),
    "parameters": Cost("1/q^2", lambda n: 1 / n.q**2),
    "activations": Cost("1/dq^2", lambda n: 1 / (n.d * n.q**2)),
    "bandwidth": Cost("3(q-1)(d+1)/dq", lambda n: 3 * (n.q - 1) * (n.d + 1) / (n.d * n.q)),
    "latency": Cost("6(q-1)", lambda n: 6 * (n.q - 1)),
    "sent": Cost("3(q-1)(d+1)/dq^2", lambda n: 3 * (n.q - 1) * (n.d + 1) / (n.d * n.q**2)),
    "hops": Cost("6q(q-1)", lambda n: 6 * n.q * (n.q - 1)),
}
_CUBE = {
    "computation": Cost("1/l^3", lambda n: 1 / n.q**3),
    "parameters": Cost("1/l^3", lambda n: 1 / n.q**3),
    "activations": Cost("1/l^3", lambda n: 1 / n.q**3),
    "bandwidth": Cost("6(l-1)/l^3", lambda n: 6 * (n.q - 1) / n.q**3),
    "latency": Cost("6(l-1)", lambda n: 6 * (n.q - 1)),
    "sent": Cost("8(l-1)/l^3", lambda n: 8 * (n.q - 1) / n.q**3),
    "hops": Cost("8(l-1)", lambda n: 8 * (n.q - 1)),
}
COSTS: dict[str, dict[str, Cost]] = {"1d": _ROW, "2d": _SQUARE, "2.5d": _SQUARES, "3d": _CUBE}

NOTES = (
    "Symbols: P ranks; in 2d a square of q x q, in 2.5d d of them, in 3d a cube of l x l x l.",
    "1d keeps activations whole between the layers and cuts them inside attention and MLP; with "
    "sequence parallelism they are 1/P everywhere.",
    "2d and 2.5d, bandwidth: a rank's block is 1/q^2 of a matrix, and q of them pass by in each of "
    "the six broadcasts and reductions, so that rings send 1/q of what is documented. Each is q "
    "messages and not one, so that there are q times as many steps; all but the first are sent "
    "while the block before them is multiplied.",
    "3d, bandwidth: 8 and not 6, because X and W are gathered again for the backward instead of "
    "being kept, which the share of activations rests on.",
    "2.5d sums the gradients of weights over depth once a step, 2(d-1)/dq^2 more of W, which the "
    "columns leave out.",
    "The columns are of one linear layer. This job's numbers also have norms, which exchange "
    "statistics of rows where hidden states are cut, and, in those of a step, the lookup of words "
    "(a reduce-scatter), the head (Y = X W^T: it sends the table and reduces logits) and the loss.",
)


def grid_sizes(grid: TensorGrid) -> GridSizes:
    """What the symbols stand for on a grid."""
    return GridSizes(grid.size, grid.hidden_parts, grid.axes.get("depth", 1))
