"""T5's relative positions: a learned bias per head and bucket of distances, added to the scores.

Raffel et al. (arXiv 1910.10683, section 2.1; the formula is their reference code's, mesh_tensorflow
transformer_layers.py). Half of the buckets are exact distances, the other half grow by equal ratios
up to max_distance, beyond which all share the last. Bidirectional: half of the buckets look back,
half ahead. By hand, 32 buckets, causal: distance 15 -> 15, 16 -> 16, 32 -> 21, 128 and more -> 31.

The table [buckets, heads] is split over heads: each rank makes the bias of its heads, and no
traffic is needed. Letters: q queries, k keys, a heads, t ranks.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpctl.train.kernels.masks import Positions, numbers
from mpctl.train.layers.parameters import Init
from mpctl.train.layers.shard_context import ShardContext


def relative_buckets(relative: Tensor, *, buckets: int, max_distance: int, bidirectional: bool) -> Tensor:
    """relative: key position - query position, any shape -> bucket numbers of that shape.

    The logarithm is float32, as in the reference: its rounding decides the bucket of a distance.
    """
    back = -relative
    side = torch.zeros_like(back)
    if bidirectional:
        buckets //= 2
        side = (back < 0) * buckets
    back = back.abs() if bidirectional else back.clamp(min=0)
    exact = buckets // 2
    ratio = torch.log(back.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    far = (exact + (ratio * (buckets - exact)).long()).clamp(max=buckets - 1)
    return side + torch.where(back < exact, back, far)


class RelativeBias(nn.Module):
    """forward(query_len, key_len, offset) -> [1, a/t, q, k], added to the scores of local heads.

    T5 makes one for the encoder and one for the decoder, at the first layer, and every layer of the
    stack adds it. Raises ValueError for a table that is too small or too short, and where heads do
    not divide by the tensor-parallel ranks.
    """

    def __init__(
        self,
        buckets: int,
        max_distance: int,
        heads: int,
        shard_context: ShardContext,
        *,
        bidirectional: bool,
        init_std: float = 0.02,
    ) -> None:
        super().__init__()
        _check(buckets, max_distance, bidirectional)
        self.buckets, self.max_distance, self.bidirectional = buckets, max_distance, bidirectional
        self.heads, self.local_heads = heads, shard_context.local_heads(heads)
        self.shard_context = shard_context
        self.weight = shard_context.parameter((buckets, heads), ("buckets", "heads"), Init("normal", init_std))

    def forward(self, query_len: int, key_len: int, offset: int = 0) -> Tensor:
        """Queries at positions offset..offset + query_len, keys at 0..key_len."""
        return self.at(range(offset, offset + query_len), range(key_len))

    def at(self, queries: Positions, keys: Positions) -> Tensor:
        """[1, a/t, q, k] for any global positions [q] and [k]: a context-parallel rank's too.

        Contiguous: CUDA's fused attention takes no bias whose last stride is not 1.
        """
        device = self.weight.device
        # [1, k] - [q, 1] -> [q, k] -> [q, k, a/t] -> [1, a/t, q, k]
        relative = numbers(keys, device) - numbers(queries, device)[:, None]
        rows = relative_buckets(
            relative, buckets=self.buckets, max_distance=self.max_distance, bidirectional=self.bidirectional
        )
        return F.embedding(rows, self.weight).permute(2, 0, 1).contiguous()[None]

    def extra_repr(self) -> str:
        heads = f"heads {self.local_heads.start}..{self.local_heads.stop} of {self.heads}"
        table = f"{self.buckets} buckets to {self.max_distance}, bidirectional={self.bidirectional}"
        return f"{heads}, {table}, t={self.shard_context.tp.size}"


def _check(buckets: int, max_distance: int, bidirectional: bool) -> None:
    exact = buckets // (4 if bidirectional else 2)
    if exact < 1 or buckets % (2 if bidirectional else 1):
        raise ValueError(f"{buckets} relative buckets (use an even number of at least 4)")
    if max_distance <= exact:
        raise ValueError(f"max_distance {max_distance} must exceed the {exact} exact distances")
