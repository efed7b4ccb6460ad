"""Bytes that a loss takes at the exit of a stack beside what was saved.

On a CPU the three passes over the logits work on blocks of rows in 32 bits; CUDA's kernels
(kernels/triton/cross_entropy.py) hold a row's block in registers. The gradient is written over the
logits either way.

By hand, bf16 logits of 2 words a token and 4 tokens fit a CPU's block: 8 floats, 32 bytes.
"""

from __future__ import annotations

from mpctl.estimate.activation_shapes import ActivationShapes
from mpctl.estimate.product_memory import head_bytes, table_bytes

LOSS_BLOCK = 1 << 17  # elements of a loss's working block on a CPU; CUDA's kernels have none


def loss_bytes(shapes: ActivationShapes, seq: str, logit_bytes: float) -> float:
    """The loss's working block, then the gradients of the head's input and of its table."""
    rows: int = shapes.batch * getattr(shapes, seq)
    logits, stream = rows * shapes.vocab, rows * shapes.hidden * shapes.value
    if shapes.kernels.loss == "logits":
        return logits * logit_bytes + stream
    block = max(shapes.vocab, LOSS_BLOCK // shapes.vocab * shapes.vocab)
    working = shapes.wide * (logits if logits <= block else 2 * block)
    if shapes.is_cuda or (shapes.wide == shapes.value and logits <= block):
        working = 0  # in place
    if shapes.mode != "1d":
        table = table_bytes(shapes)
        return max(working, head_bytes(shapes, x=stream, w=table, y=logits * shapes.value))
    gathers = 2 * stream if shapes.splits else 0.0
    padded = shapes.table_rows if shapes.table_rows > shapes.vocab else 0
    table = (shapes.vocab + padded) * shapes.hidden * shapes.value
    return max(working, stream + gathers + table)
