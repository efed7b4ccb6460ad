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

from dataclasses import replace

from torch import Tensor, nn

from mpctl.kernels.attention_core import AttentionCore
from mpctl.kernels.cache import ContextCache
from mpctl.kernels.config import AttentionConfig
from mpctl.kernels.counter_rng import CounterRNG
from mpctl.kernels.tensor_parallel import ShardContext


class ParallelCrossAttention(nn.Module):
    """hidden [b, q/c, h], context [b, s/c, h_context] -> [b, q/c, h].

    With sequence parallelism hidden, context and result are split over tp too, [b, q/(ct), h] and
    so on. config: of the attention; a query sees the whole context whatever `causal` says.
    rng_site: names the layer to the dropout mask. recompute: scores are not kept for backward.
    context_hidden: features of the context, h by default. Raises ValueError where heads do not
    divide by the tensor-parallel ranks, and for shared key-value heads or rotary positions, which
    cross-attention does not have.
    """

    def __init__(
        self,
        config: AttentionConfig,
        shard_context: ShardContext,
        rng_site: str,
        *,
        recompute: bool = False,
        context_hidden: int | None = None,
    ) -> None:
        super().__init__()
        _check(config)
        layers, width = shard_context.layers, config.heads * config.head_size
        self.config, self.shard_context = config, shard_context
        bidirectional = replace(config, causal=False)
        self.core = AttentionCore.of(bidirectional, shard_context, rng_site, recompute=recompute)
        self.local_heads = self.core.heads
        h, bias, init = config.hidden, config.bias, config.init
        self.query = layers.column_linear(h, width, bias=bias, init=config.query_init)
        self.key_value = layers.column_linear(
            context_hidden or h, 2 * width, bias=bias, init=init, parts=(width, width)
        )
        self.output = layers.row_linear(width, h, bias=bias, init=config.output_init)

    def forward(
        self,
        hidden: Tensor,
        context: Tensor,
        rng: CounterRNG | None = None,
        *,
        mask: Tensor | None = None,
        cache: ContextCache | None = None,
    ) -> Tensor:
        """rng: draws dropout; None is no dropout. mask [b or 1, a/t or 1, q/c or 1, s]: True where
        a query may see a token of the context; rows as this rank holds them, keys of the whole
        context. cache: keeps keys and values of the first call's context, which later calls read
        instead of computing them; gradients do not reach them."""
        query = self._by_head(self.query(hidden))
        key, value = self._keys_values(context, cache)
        seen = self.core(query, key, value, rng, mask=mask)
        # [b, a/t, q, d] -> [b, q, a/t*d]
        output: Tensor = self.output(seen.transpose(1, 2).flatten(2))
        return output

    def _keys_values(self, context: Tensor, cache: ContextCache | None) -> tuple[Tensor, Tensor]:
        if cache is not None and cache.keys_values is not None:
            return cache.keys_values
        key, value = (self._by_head(part) for part in self.key_value(context).chunk(2, dim=-1))
        if cache is not None:
            cache.keys_values = key.detach(), value.detach()
        return key, value

    def _by_head(self, part: Tensor) -> Tensor:
        # [b, s, a/t*d] -> [b, a/t, s, d]
        return part.unflatten(-1, (-1, self.config.head_size)).transpose(1, 2)

    def extra_repr(self) -> str:
        """Heads of this rank, head size and sizes of tp and cp, for `print(module)`."""
        config, c = self.config, self.core.cp.size
        heads = f"heads {self.local_heads.start}..{self.local_heads.stop} of {config.heads}"
        scale = "" if config.scale is None else f", scale={config.scale}"
        split = f", c={c}" if c > 1 else ""
        core = f"d={config.head_size}, dropout={config.dropout}{scale}"
        return f"{heads}, {core}, t={self.shard_context.tp.size}{split}"


def _check(config: AttentionConfig) -> None:
    if config.num_kv_heads != config.heads:
        raise ValueError(
            f"kv_heads {config.num_kv_heads}: cross-attention has as many as heads "
            f"(set kv_heads to {config.heads})"
        )
    if config.rotary is not None:
        raise ValueError("rotary positions: cross-attention has none (leave rotary out)")
