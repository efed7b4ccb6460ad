"""Self attention split by whole heads: softmax(Q K^T / sqrt(d)) V, then an output projection.

Megatron-LM (arXiv 1909.08053, section 3, figure 3b): Q, K, V by columns, so a rank owns a/t heads
and the core needs no sync; the projection by rows. One all-reduce of b*s*h forward, one backward.
Q, K and V are one product of fused parts [q | k | v]; 12 heads of 64 on t=4, rank 1: heads 3..6,
columns 192..384 of each part.

The core is torch's scaled_dot_product_attention, which keeps no [s, s] matrix. With attention
dropout it is spelled out instead, since that kernel's mask would depend on the layout. Backward
then keeps, in 16 bit, probabilities, mask and dropped probabilities: 2 + 1 + 2 bytes per element of
[b, a/t, s, s], the 5as/h term of arXiv 2205.05198, equation 1.

Letters: b batch, s sequence, h hidden, a heads, k key-value heads, d head size, t ranks.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpctl.kernels.group import Group
from mpctl.kernels.linear import ColumnParallelLinear, RowParallelLinear
from mpctl.kernels.noise import Noise
from mpctl.kernels.parameters import Init
from mpctl.sharding import local_range, local_size


class ParallelSelfAttention(nn.Module):
    """hidden [b, s, h] -> [b, s, h].

    kv_heads: fewer key and value heads, each shared by a/k queries (arXiv 2305.13245). site names
    the place to the dropout mask, with the layer's global number. Raises ValueError where heads or
    kv_heads do not divide by the group.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        *,
        group: Group,
        site: str,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        dropout: float = 0.0,
        causal: bool = True,
        bias: bool = True,
        init_std: float = 0.02,
        output_std: float | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        self.head_dim = local_size(hidden, parts=heads) if head_dim is None else head_dim
        self.shared = local_size(heads, parts=kv_heads)
        self.heads, self.kv_heads, self.group = heads, kv_heads, group
        self.local_heads = local_range(heads, parts=group.size, index=group.rank)
        self.local_kv_heads = local_range(kv_heads, parts=group.size, index=group.rank)
        self.dropout, self.causal, self.site = dropout, causal, site
        inner, outer = Init("normal", init_std), Init("normal", output_std or init_std)
        parts = (heads * self.head_dim, *[kv_heads * self.head_dim] * 2)
        self.qkv = ColumnParallelLinear(
            hidden,
            sum(parts),
            group=group,
            parts=parts,
            bias=bias,
            init=inner,
            dtype=dtype,
            device=device,
        )
        self.output = RowParallelLinear(
            parts[0], hidden, group=group, bias=bias, init=outer, dtype=dtype, device=device
        )

    def forward(self, hidden: Tensor, noise: Noise | None = None) -> Tensor:
        query, key, value = self._split(self.qkv(hidden))
        if noise is not None and noise.active(self.dropout):
            context = self._with_dropout(query, key, value, noise)
        else:
            context = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        # [b, a/t, s, d] -> [b, s, a/t*d]
        return self.output(context.transpose(1, 2).flatten(2))

    def _split(self, qkv: Tensor) -> list[Tensor]:
        a, k, d = len(self.local_heads), len(self.local_kv_heads), self.head_dim
        # [b, s, (a+2k)/t*d] -> [b, s, n/t, d] -> [b, n/t, s, d] for n = a, k, k
        parts = [
            part.unflatten(-1, (-1, d)).transpose(1, 2)
            for part in qkv.split((a * d, k * d, k * d), dim=-1)
        ]
        if self.shared == 1:
            return parts
        # [b, k/t, s, d] -> [b, a/t, s, d]
        return [parts[0], *(part.repeat_interleave(self.shared, dim=1) for part in parts[1:])]

    def _with_dropout(self, query: Tensor, key: Tensor, value: Tensor, noise: Noise) -> Tensor:
        # [b, a/t, s, d] x [b, a/t, d, s] -> [b, a/t, s, s]
        scores = query.mul(1 / math.sqrt(self.head_dim)) @ key.transpose(-1, -2)
        if self.causal:
            s = scores.shape[-1]
            future = torch.ones(s, s, dtype=torch.bool, device=scores.device).triu_(1)
            scores = scores.masked_fill_(future, -torch.inf)
        dropped = noise.attention_dropout(
            scores.softmax(-1), self.dropout, site=self.site, heads=self.local_heads
        )
        return dropped @ value

    def extra_repr(self) -> str:
        own = f"heads {self.local_heads.start}..{self.local_heads.stop} of {self.heads}"
        kv = f", {len(self.local_kv_heads)} of {self.kv_heads} kv" if self.shared > 1 else ""
        rest = f"d={self.head_dim}, causal={self.causal}, dropout={self.dropout}"
        return f"{own}{kv}, {rest}, t={self.group.size}"
