"""Self attention split by whole heads: softmax(scale Q K^T) V, then an output projection.

Megatron-LM (arXiv 1909.08053, section 3, figure 3b): Q, K, V by columns, so a rank owns a/t heads
and the core (attention_core.py) needs no sync; the projection by rows. One all-reduce of b*s*h
forward, one backward. Q, K and V are one product of fused parts [q | k | v]; 12 heads of 64 on
t=4, rank 1: heads 3..6, columns 192..384 of each part.

Fewer key-value heads than ranks (k < t, t = k*r): the projection stays split by columns, so that a
rank holds d/r columns of a head, each weight is held once and gradients and norms need no care. Its
outputs are gathered: one all-gather of 2*b*s*k*d elements forward, a reduce-scatter of as many
backward; each rank keeps the head that its queries share. 8 heads, k=2, t=4: ranks 0 and 1 use
key-value head 0, ranks 2 and 3 head 1.

Letters: b batch, s sequence, h hidden, a heads, k key-value heads, d head size, t tp, c cp.
"""

from __future__ import annotations

from torch import Tensor, nn

from mpctl.kernels.attention_core import AttentionCore
from mpctl.kernels.cache import KeyValueCache
from mpctl.kernels.config import AttentionConfig
from mpctl.kernels.counter_rng import CounterRNG
from mpctl.kernels.masks import Positions
from mpctl.kernels.parameters import mark_partial
from mpctl.kernels.regions import gather_sequence
from mpctl.kernels.rotary import Rotary, Turns
from mpctl.kernels.tensor_parallel import NORMS, ShardContext
from mpctl.sharding import divisors, splits_kv_heads


class ParallelSelfAttention(nn.Module):
    """hidden [b, s/c, h] -> [b, s/c, h]; with sequence parallelism both are [b, s/(ct), h].

    rng_site names the layer to the dropout mask, with the layer's global number. recompute: scores
    are not kept for backward. Raises ValueError where heads or kv_heads cannot be split over
    `shard_context.tp`.
    """

    def __init__(
        self,
        config: AttentionConfig,
        shard_context: ShardContext,
        rng_site: str,
        *,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        layers, d = shard_context.layers, config.head_size
        self.config, self.shard_context = config, shard_context
        self.core = AttentionCore.of(config, shard_context, rng_site, recompute=recompute)
        self.local_heads = self.core.heads
        _check_kv(config.heads, config.num_kv_heads, d, layers.feature_parts)
        if shard_context.grid.mode != "1d":
            layers.local_heads(config.num_kv_heads)  # columns of one head are shared in 1d alone
        parts = (config.heads * d, *[config.num_kv_heads * d] * 2)
        h, bias = config.hidden, config.bias
        init = config.qkv_init
        self.qkv = layers.column_linear(h, sum(parts), bias=bias, init=init, parts=parts)
        self.query_norm = _head_norm(config, shard_context)
        self.key_norm = _head_norm(config, shard_context)
        of_output = bias if config.output_bias is None else config.output_bias
        self.output = layers.row_linear(parts[0], h, bias=of_output, init=config.output_init)

    def forward(
        self,
        hidden: Tensor,
        rng: CounterRNG | None = None,
        *,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        positions: Positions | None = None,
        turns: Turns | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """rng: draws dropout; None is no dropout. mask, bias: as AttentionCore's. positions:
        those of rotary positions, [s/c] or [b, s/c]; the tokens' indices by default. turns: the
        table of rotary positions, where it was computed before. cache: of the
        earlier positions; hidden holds the s positions behind them, whose keys and values are
        added to it, and mask and bias are then [.., s, all positions]."""
        context = self.shard_context
        rng = context.own_rng(rng, inside=True)
        if isinstance(positions, Tensor) and positions.dim() > 1:
            positions = context.own_samples(positions, inside=True)
        query, key, value = self._split(self.qkv(hidden))
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        rows = None if cache is None else range(cache.length, cache.length + hidden.shape[1])
        if self.config.rotary is not None:
            given = rows if positions is None else positions
            cos, sin = turns or self._turns(self.config.rotary, query, given)
            query, key = (self.core.backend.rotate(x, cos, sin) for x in (query, key))
        if cache is not None:
            key, value = cache.append(key, value)
        heads = self.core(query, key, value, rng, mask=mask, bias=bias, rows=rows)
        # [b, a/t, s, d] -> [b, s, a/t*d]
        output: Tensor = self.output(heads.transpose(1, 2).flatten(2))
        return output

    def _split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[b, s, all columns] -> query, key and value by head. One split by sizes, whose backward
        is one concatenation; that of slices would be zeros of the whole, a copy and a sum each."""
        columns = len(self.local_heads) * self.config.head_size
        others = qkv.shape[-1] - columns
        if self.config.num_kv_heads < self.shard_context.layers.feature_parts:
            query, kv = qkv.split((columns, others), dim=-1)
            return self._by_head(query), *self._gathered(kv)
        query, key, value = qkv.split((columns, others // 2, others // 2), dim=-1)
        return self._by_head(query), self._by_head(key), self._by_head(value)

    def _by_head(self, part: Tensor) -> Tensor:
        # [b, s, n*d] -> [b, n, s, d]
        return part.unflatten(-1, (-1, self.config.head_size)).transpose(1, 2)

    def _gathered(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        """A rank's columns of key and value -> 2 of [b, 1, s, d], the head of its queries."""
        tp = self.shard_context.tp
        ranks = tp.size // self.config.num_kv_heads
        first = tp.rank // ranks * ranks
        # [b, s, 2kd/t] -> [b, t*s, 2kd/t] -> [b, t, s, 2, kd/t]
        columns = gather_sequence(kv, tp).unflatten(1, (tp.size, -1)).unflatten(-1, (2, -1))
        # -> [b, t/k, s, 2, kd/t] -> [2, b, s, t/k, kd/t] -> [2, b, 1, s, d]
        head = columns[:, first : first + ranks].permute(3, 0, 2, 1, 4).flatten(-2)[:, :, None]
        return head[0], head[1]

    def _turns(self, rotary: Rotary, query: Tensor, given: Positions | None) -> Turns:
        if given is not None:
            return rotary.table(given, query)
        return self.shard_context.rotary_tables.rows(rotary, query.shape[-2], self.core.cp, query)

    def extra_repr(self) -> str:
        """Heads of this rank, head size and sizes of tp and cp, for `print(module)`."""
        config, c = self.config, self.core.cp.size
        t = self.shard_context.layers.feature_parts
        heads = f"heads {self.local_heads.start}..{self.local_heads.stop} of {config.heads}"
        is_shared = config.queries_per_kv_head > 1
        kv = (
            f", {max(1, config.num_kv_heads // t)} of {config.num_kv_heads} kv" if is_shared else ""
        )
        scale = "" if config.scale is None else f", scale={config.scale}"
        core = f"d={config.head_size}, causal={config.causal}, dropout={config.dropout}{scale}"
        return f"{heads}{kv}, {core}, t={t}" + (f", c={c}" if c > 1 else "")


def _head_norm(config: AttentionConfig, shard_context: ShardContext) -> nn.Module | None:
    """A norm over the d columns of a head, the same for all heads: each rank meets its own heads
    only, so that its gradients are partial sums over tp."""
    if config.qk_norm is None:
        return None
    norm = NORMS[config.qk_norm](
        config.head_size, eps=config.eps, dtype=shard_context.dtype, device=shard_context.device,
        backend=shard_context.backend,
    )  # fmt: skip
    if shard_context.tp.size > 1:
        mark_partial(norm)
    return norm


def _check_kv(heads: int, kv_heads: int, head_dim: int, t: int) -> None:
    """Raise ValueError unless t ranks can split the key-value heads.

    Either every rank holds kv_heads / t whole heads, or t / kv_heads ranks share the columns of one
    head evenly.
    """
    if not splits_kv_heads(kv_heads, head_dim, parts=t):
        legal = ", ".join(str(ranks) for ranks in divisors(heads)
                          if splits_kv_heads(kv_heads, head_dim, parts=ranks))  # fmt: skip
        raise ValueError(
            f"kv_heads: {kv_heads} is not divisible by {t} ranks, nor do {t} ranks share a head's "
            f"{head_dim} columns evenly (use one of {legal} ranks)"
        )
