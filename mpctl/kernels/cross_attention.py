"""Cross attention split by whole heads: queries of a decoder, keys and values of an encoder.

Megatron-LM's split (arXiv 1909.08053, section 3, figure 3b) with two column-parallel products: the
query, and key and value fused with stride 2, [k | v], each part split by itself; then the output
by rows. One all-reduce of b*q*h forward; two backward, of b*q*h and of b*s*h: the gradients of both
inputs are sums over the ranks. 4 heads of 8 on t=2, rank 1: query columns 16..32, key-value columns
16..32 and 48..64.

Under context parallelism both sequences are split, each in its own balanced blocks (context.py):
one all-gather of 2*b*(a/t)*s*d elements forward brings keys and values of the whole encoder, a
reduce-scatter of as many backward; the queries stay. q=8, s=16 on c=2, rank 1: decoder positions
2..6, encoder positions 4..12.

Letters: b batch, q decoder positions, s encoder positions, h hidden, a heads, d head size, t tp,
c cp.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mpctl.kernels.backend import TORCH_BACKEND, KernelBackend
from mpctl.kernels.cache import ContextCache
from mpctl.kernels.context import WHOLE, AttentionCore
from mpctl.kernels.counter_rng import CounterRNG
from mpctl.kernels.linear import ColumnParallelLinear, RowParallelLinear
from mpctl.kernels.parameters import Init
from mpctl.sharding import local_range, local_size
from mpctl.transport.group import Group


class ParallelCrossAttention(nn.Module):
    """hidden [b, q/c, h], context [b, s/c, h_context] -> [b, q/c, h].

    context_hidden: width of the encoder, h by default. scale: of the scores, by default 1/sqrt(d).
    cp: the group over which both sequences are split. sequence_parallel: hidden, context and
    result are split over the group too, [b, q/(ct), h] and so on. Raises ValueError where heads do
    not divide by the group.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        *,
        group: Group,
        site: str,
        context_hidden: int | None = None,
        head_dim: int | None = None,
        dropout: float = 0.0,
        scale: float | None = None,
        bias: bool = True,
        recompute_core: bool = False,
        sequence_parallel: bool = False,
        cp: Group | None = None,
        init_std: float = 0.02,
        output_std: float | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        backend: KernelBackend = TORCH_BACKEND,
    ) -> None:
        super().__init__()
        self.heads, self.group = heads, group
        self.head_dim = local_size(hidden, parts=heads) if head_dim is None else head_dim
        self.local_heads = local_range(heads, parts=group.size, index=group.rank)
        self.core = AttentionCore(
            site, self.local_heads, dropout, False, recompute_core, cp or WHOLE, scale, backend
        )
        inner, outer = Init("normal", init_std), Init("normal", output_std or init_std)
        width, source = heads * self.head_dim, context_hidden or hidden
        self.query = ColumnParallelLinear(
            hidden, width, group=group, bias=bias, sequence_parallel=sequence_parallel,
            init=inner, dtype=dtype, device=device,
        )  # fmt: skip
        self.key_value = ColumnParallelLinear(
            source, 2 * width, group=group, stride=2, bias=bias,
            sequence_parallel=sequence_parallel, init=inner, dtype=dtype, device=device,
        )  # fmt: skip
        self.output = RowParallelLinear(
            width, hidden, group=group, bias=bias, sequence_parallel=sequence_parallel,
            init=outer, dtype=dtype, device=device,
        )  # fmt: skip

    def forward(
        self, hidden: Tensor, context: Tensor, noise: CounterRNG | None = None, *,
        mask: Tensor | None = None, cache: ContextCache | None = None,
    ) -> Tensor:  # fmt: skip
        """mask [b or 1, a/t or 1, q/c or 1, s], True where a query may see a token of the context;
        rows as this rank holds them, keys of the whole encoder. cache: keeps the keys and values of
        the first call's context, which later calls then read; gradients do not reach them."""
        query = self._by_head(self.query(hidden))
        key, value = self._keys_values(context, cache)
        seen = self.core(query, key, value, noise, mask=mask)
        # [b, a/t, q, d] -> [b, q, a/t*d]
        return self.output(seen.transpose(1, 2).flatten(2))

    def _keys_values(self, context: Tensor, cache: ContextCache | None) -> tuple[Tensor, Tensor]:
        if cache is not None and cache.held is not None:
            return cache.held
        key, value = (self._by_head(part) for part in self.key_value(context).chunk(2, dim=-1))
        if cache is not None:
            cache.held = key.detach(), value.detach()
        return key, value

    def _by_head(self, part: Tensor) -> Tensor:
        # [b, s, a/t*d] -> [b, a/t, s, d]
        return part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def extra_repr(self) -> str:
        own = f"heads {self.local_heads.start}..{self.local_heads.stop} of {self.heads}"
        core = self.core
        scale = "" if core.scale is None else f", scale={core.scale}"
        split = f", c={core.cp.size}" if core.cp.size > 1 else ""
        rest = f"d={self.head_dim}, dropout={core.dropout}{scale}"
        return f"{own}, {rest}, t={self.group.size}{split}"
