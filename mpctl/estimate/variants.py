"""What decoders that differ from the common shape cost beside their matrix products.

A norm beyond the two of a layer, which the runtime's profile counts, and norms of queries and keys:
a norm reads its input and writes its result; backward reads the gradient and the input and writes.

By hand, a layer with two norms of results, b 1, s 2, h 4 in bf16: 2 x 16 B, passed over 2 + 3
times: 160 B.
"""

from __future__ import annotations

from mpctl.spec.model import ModelSpec
from mpctl.spec.runtime import MemoryPasses

NORM_PASSES = MemoryPasses(forward=2.0, backward=3.0)


def extra_norm_bytes(
    model: ModelSpec, *, branches: int, hidden: float, row: float, parts: int
) -> float:
    """Bytes that the norms of a layer beyond the usual ones pass over on one rank.

    branches: of the layer, each with a norm. hidden: bytes of the hidden states; row: bytes of one
    column of features over all positions; parts: into how many parts heads are cut.
    """
    size = branches * hidden if model.norm_order == "sandwich" else 0.0
    if model.qk_norm:
        size += row * (model.heads + model.kv_heads) * model.head_size / parts
    return size
