"""Bytes that the backward of one matrix product takes for a moment, in every tensor mode.

Beside dY of bytes y, with x and w the bytes of a rank's parts of X and W:

    1d         dX and dW                                   x + w
    2d, 2.5d   b buffers for blocks that arrive, and p partial sums: one that is made, one on its
               way, this rank's own (layers/grid/products.py)
               max(b w + p x, x + b x + p w)               b = min(q - 1, 2), p = min(q, 3)
    3d         gathered dY and X, partial dX and dW, dX and dW (layers/grid/products.py)
               l (y + 2 x + w) + x + w

In 3d dW is laid out in blocks where partial dX has gone; a transport that still holds partial dX
then takes l w more. A head's logits are the other way round in 2d and 2.5d: their gradient arrives
in blocks, and dX stays, b y + b w + x + p w. What comes back from a lookup is gathered over the
ranks that share it, and once more without the words of others, then the table's gradient is made.

By hand, 2d with q = 2, x 8 bytes, w 4: max(4 + 16, 8 + 8 + 8) = 24 bytes, and 12 in 1d.
"""

from __future__ import annotations

from mpctl.estimate.activation_shapes import ActivationShapes

MOST_BUFFERS, MOST_SUMS = 2, 3


def product_bytes(shapes: ActivationShapes, *, x: float, w: float, y: float) -> float:
    """Bytes for a moment of the backward of Y = X W; x, w, y: of this rank's parts."""
    if shapes.mode == "1d":
        return x + w
    side = shapes.side
    if shapes.mode == "3d":
        return side * (y + 2 * x + w) + x + w
    buffers, sums = min(side - 1, MOST_BUFFERS), min(side, MOST_SUMS)
    return max(buffers * w + sums * x, x + buffers * x + sums * w)


def cast_bytes(shapes: ActivationShapes, *, x: float, y: float) -> float:
    """Bytes for a moment of the same backward in fp8, under our own kernels: dY is cast twice, as
    it is and transposed, and a CPU multiplies 16-bit copies of what was cast. x, y: bytes of X and
    dY in 16 bit."""
    if not shapes.kernels.casts or shapes.operand == shapes.value:
        return 0.0
    return y if shapes.is_cuda else x + 2 * y


def head_bytes(shapes: ActivationShapes, *, x: float, w: float, y: float) -> float:
    """The same of an output head on a grid, Y its logits and W its table."""
    if shapes.mode == "3d":
        return product_bytes(shapes, x=x, w=w, y=y)
    buffers, sums = min(shapes.side - 1, MOST_BUFFERS), min(shapes.side, MOST_SUMS)
    return buffers * (y + w) + x + sums * w


def matrix_bytes(shapes: ActivationShapes, features: int) -> int:
    """Bytes of this rank's part of a matrix between the hidden states and so many features of the
    rank."""
    parts = shapes.side if shapes.mode == "3d" else 1  # a third axis cuts the matrix as well
    return shapes.hidden * features * shapes.value // parts


def table_bytes(shapes: ActivationShapes) -> int:
    """Bytes of this rank's part of the word table."""
    return shapes.hidden * shapes.table_rows * shapes.value


def lookup_bytes(shapes: ActivationShapes, seq: str) -> float:
    """Bytes for a moment of the backward of a lookup in the word table."""
    table = table_bytes(shapes)
    if shapes.mode == "1d":
        return table
    rows: int = shapes.looked_up * getattr(shapes, seq)
    vectors = rows * shapes.hidden * shapes.value
    return vectors + max(vectors, table)
