"""Self-attention and cross-attention split by heads, and the caches of incremental decoding.

Megatron-LM's split (arXiv 1909.08053, section 3, figure 3b): Q, K, V by columns, so that a rank
owns a/t heads and softmax(scale Q K^T) V needs no communication; the output projection by rows. One
all-reduce of b*s*h forward, one backward. Q, K and V are one product of fused parts [q | k | v]; 12
heads of 64 on t=4, rank 1: heads 3..6, columns 192..384 of each part.

Fewer key-value heads than ranks (k < t, t = k*r): the projection stays split by columns, so that a
rank holds d/r columns of a head, each weight is held once and gradients and norms need no care. Its
outputs are gathered: one all-gather of 2*b*s*k*d elements forward, a reduce-scatter of as many
backward; each rank keeps the head that its queries share. 8 heads, k=2, t=4: ranks 0 and 1 use
key-value head 0, ranks 2 and 3 head 1.

Cross-attention has two column-parallel products: the query, and key and value fused with stride 2,
[k | v]. One all-reduce of b*q*h forward; two backward, of b*q*h and of b*s*h: the gradients of both
inputs are sums over the ranks.

Under context parallelism (context_parallel.py) keys and values are gathered, beside the work on a
rank's own keys where nothing but the causal mask changes the scores, and each block of queries
attends to the prefix of keys that it may see, so that no [s, s] mask is made: s=8 on c=2, rank 0
holds rows 0 1 and 6 7; the first block attends to 2 keys, the second to 8. In
cross-attention both sequences are split, each into balanced blocks, and the encoder's keys are
gathered. Or ranks exchange sequence for heads (context_exchange.py), which self-attention alone does.

The `KernelBackend` decides how a block is computed (train/kernels/backend.py). If it saves scores, or a
mask of their size, for backward, `recompute` computes them again instead (selective recomputation,
arXiv 2205.05198, section 5).

>>> attention = AttentionConfig(hidden=1024, heads=16, kv_heads=4)
>>> attention.head_size, attention.queries_per_kv_head
(64, 4)

Letters: b batch, s sequence, h hidden, a heads, k key-value heads, d head size, q queries, t tp,
c cp.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mpctl.core.sharding import divisors, local_range, local_size, splits_kv_heads
from mpctl.train.kernels.attention import AttentionVariant, slopes
from mpctl.train.kernels.counter_rng import CounterRNG
from mpctl.train.kernels.masks import Positions
from mpctl.train.kernels.rotary import CosSin, Rotary
from mpctl.train.layers.config import InitialValues, check_positive, check_probability
from mpctl.train.layers.context_exchange import to_heads, to_positions
from mpctl.train.layers.context_parallel import attend_context, context_blocks, gather_context
from mpctl.train.layers.linear import summed_bias
from mpctl.train.layers.mappings import gather_sequence
from mpctl.train.layers.norm import Norm
from mpctl.train.layers.parameters import Init
from mpctl.train.layers.recompute import recomputed
from mpctl.train.layers.shard_context import ShardContext


@dataclass(frozen=True)
class AttentionConfig(InitialValues):
    """Multi-head attention over `hidden` features.

    kv_heads: heads of keys and values, each shared by heads / kv_heads queries (grouped-query
    attention, arXiv 2305.13245); as many as heads by default. head_dim: features of a head, hidden
    / heads by default. causal: a query sees keys at its own and earlier positions only. scale:
    factor of the scores, 1 / sqrt(head_dim) by default. dropout: probability of dropping an
    attention weight. rotary: rotary positions of queries and keys. window: number of keys that a
    causal query sees, including its own; all by default. alibi: whether scores fall with the
    distance (ALiBi). qk_norm: kind of the norms of queries and keys, none by default; they are over
    each head, or with norms_width over all heads together; eps: that of these norms. bias: whether
    the projections have biases; output_bias: the output's, as bias by default. init_std: standard
    deviation of initial weights; output_std, query_std: those of the output and the query
    projection, init_std by default.

    Raises ValueError where heads do not divide hidden (and head_dim is not given), kv_heads do not
    divide heads, or a value is out of its range.
    """

    hidden: int
    heads: int
    kv_heads: int | None = None
    head_dim: int | None = None
    causal: bool = True
    scale: float | None = None
    dropout: float = 0.0
    rotary: Rotary | None = None
    window: int | None = None
    alibi: bool = False
    qk_norm: Norm | None = None
    norms_width: bool = False
    eps: float = 1e-5
    bias: bool = True
    output_bias: bool | None = None
    init_std: float = 0.02
    output_std: float | None = None
    query_std: float | None = None

    def __post_init__(self) -> None:
        check_positive(hidden=self.hidden, heads=self.heads, kv_heads=self.num_kv_heads)
        check_positive(head_dim=self.head_size)
        check_probability("attention dropout", self.dropout)
        local_size(self.heads, parts=self.num_kv_heads)
        if self.window is not None and (self.window < 1 or not self.causal):
            raise ValueError(f"window {self.window}: it is 1 or more, of causal attention")
        if self.rotary is not None and self.rotary.head_dim != self.head_size:
            raise ValueError(
                f"rotary positions of {self.rotary.head_dim} features for heads of "
                f"{self.head_size} (make it with Rotary({self.head_size}))"
            )

    @property
    def query_init(self) -> Init:
        """Initial values of the matrix that makes queries."""
        return Init("normal", self.query_std or self.init_std)

    @property
    def qkv_init(self) -> Init:
        """Initial values of queries', keys' and values' matrices, stacked in this order."""
        if self.query_std is None:
            return self.init
        return replace(self.init, first=(self.heads * self.head_size, self.query_std))

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def head_size(self) -> int:
        """Features of one head."""
        if self.head_dim is not None:
            return self.head_dim
        return local_size(self.hidden, parts=self.heads)

    @property
    def queries_per_kv_head(self) -> int:
        """Query heads that share a key-value head."""
        return self.heads // self.num_kv_heads

    def build(self, shard_context: ShardContext, rng_site: str, *, recompute: bool = False) -> ParallelSelfAttention:
        """The module of this rank."""
        return ParallelSelfAttention(self, shard_context, rng_site, recompute=recompute)


class AttentionCore:
    """Attention of queries, keys and values by head: softmax(scale Q K^T) V, as config says.

    rng_site: the layer's name, on which dropout masks depend. recompute: compute scores again in
    backward instead of saving them. heads: global numbers of the heads that this rank computes. Raises
    ValueError if the number of heads is not divisible by that of tensor-parallel ranks, and of those of
    cp that exchange them.
    """

    def __init__(
        self, config: AttentionConfig, shard_context: ShardContext, rng_site: str, *, recompute: bool = False
    ) -> None:
        self.config, self.rng_site, self.recompute = config, rng_site, recompute
        self.cp, self.backend = shard_context.cp, shard_context.backend
        self.heads = shard_context.local_heads(config.heads)
        self.exchanges = shard_context.exchanges_heads and self.cp.size > 1
        if self.exchanges:
            own = local_range(len(self.heads), parts=self.cp.size, index=self.cp.rank)
            self.heads = self.heads[own.start : own.stop]
        self.slopes: Tensor | None = None
        if config.alibi:
            self.slopes = slopes(config.heads, self.heads, shard_context.device)

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rng: CounterRNG | None = None,
        *,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        rows: range | None = None,
    ) -> Tensor:
        """query [b, a/t, q/c, d], key [b, k/t, s, d], value [b, k/t, s, e] of the full sequence
        -> [b, a/t, q/c, e].

        mask (True: may attend; combined with the causal one by and) and bias (added): [b or 1,
        a/t or 1, q/c or 1, s], rows as this rank holds them, keys of the full sequence. The result
        of a query that sees no key is 0. rows: positions of the queries if they are the last of the
        s keys' and the earlier keys come from a cache. Raises ValueError for rows under context
        parallelism: a cache holds the full sequence.
        """
        if rows is not None and self.cp.size > 1:
            raise ValueError(f"a cache under context parallelism of {self.cp.size} (use cp 1)")
        shape = (*query.shape[-2:-1], key.shape[-2])
        mask, bias = (x if x is None else x.expand(*x.shape[:2], *shape) for x in (mask, bias))
        if rows is not None:
            return self._attend(rows, rng, query, key, value, mask, bias)
        blocks = context_blocks(shape[0] * self.cp.size, self.cp.size, self.cp.rank)
        if len(blocks) == 1:
            return self._attend(blocks[0], rng, query, key, value, mask, bias)
        results = []
        for block, own in zip(blocks, _places(blocks), strict=True):
            # the queries of a block with the keys before its end (all keys if not causal)
            seen = slice(block.stop if self.config.causal else None)
            of_block = (x if x is None else x[..., own, seen] for x in (mask, bias))
            key_part, value_part = key[..., seen, :], value[..., seen, :]
            results.append(self._attend(block, rng, query[..., own, :], key_part, value_part, *of_block))
        return torch.cat(results, dim=-2)

    def split(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rng: CounterRNG | None = None,
        *,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """The same of key and value [b, k/t, s/c, d] of this rank's positions, which are gathered
        here, or exchanged for a part of the heads; mask and bias then have the rows of all positions."""
        if self.exchanges:
            query, key, value = to_heads((query, key, value), self.cp)
            seen = (*query.shape[-2:-1], key.shape[-2])
            mask, bias = (x if x is None else x.expand(*x.shape[:2], *seen) for x in (mask, bias))
            heads = self._attend(range(seen[0]), rng, query, key, value, mask, bias)
            return to_positions(heads, self.cp)
        c, kernel = self.cp.size, None
        if c > 1 and key.shape[-2] % 2 == 0:
            block = range(key.shape[-2], 2 * key.shape[-2])  # any that has keys before it
            variant = self._variant(block, rng, query, key, mask, bias)
            if variant.is_plain and variant.is_causal:
                kernel = self.backend.partial_kernel(query, key, value, variant.scale)
        if kernel is not None:
            return attend_context(query, key, value, self.cp, kernel)
        key, value = gather_context(key, value, self.cp)
        return self(query, key, value, rng, mask=mask, bias=bias)

    def _attend(
        self,
        rows: range,
        rng: CounterRNG | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        """query [b, a/t, q, d] at contiguous global positions `rows`, and the key and value
        [b, k/t, s, d], mask and bias [b or 1, a/t or 1, q, s] that it may see."""

        def run(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, bias: Tensor | None) -> Tensor:
            variant = self._variant(rows, rng, query, key, mask, bias)
            return self.backend.attention(query, key, value, variant)

        variant = self._variant(rows, rng, query, key, mask, bias)
        if self.recompute and self.backend.keeps_pairs(query, key, value, variant):
            # tensors are separate arguments, which checkpointing saves and checks
            result: Tensor = recomputed(run, query, key, value, mask, bias)
            return result
        return self.backend.attention(query, key, value, variant)

    def _variant(
        self, rows: range, rng: CounterRNG | None, query: Tensor, key: Tensor, mask: Tensor | None, bias: Tensor | None
    ) -> AttentionVariant:
        config, dropout = self.config, None
        if rng is not None and rng.active(config.dropout):
            shape = (*query.shape[:-1], key.shape[-2])
            dropout = rng.mask(shape, config.dropout, rng_site=self.rng_site, heads=self.heads, rows=rows)
        return AttentionVariant(rows, config.causal, config.scale, mask, bias, config.window, self.slopes, dropout)


def _places(blocks: Sequence[range]) -> Iterator[slice]:
    start = 0
    for block in blocks:
        yield slice(start, start := start + len(block))


class ParallelAttention(nn.Module):
    """Base of the attention layers: attention between projections, split over tp by heads.

    config, rng_site, recompute: as AttentionCore's. A subclass makes query, key and value by head;
    `output` projects the core's result.
    """

    output: nn.Module

    def __init__(
        self, config: AttentionConfig, shard_context: ShardContext, rng_site: str, *, recompute: bool = False
    ) -> None:
        super().__init__()
        self.config, self.shard_context = config, shard_context
        self.core = AttentionCore(config, shard_context, rng_site, recompute=recompute)
        self.local_heads = shard_context.local_heads(config.heads)

    def _by_head(self, part: Tensor) -> Tensor:
        # [b, s, n*d] -> [b, n, s, d]
        return part.unflatten(-1, (-1, self.config.head_size)).transpose(1, 2)

    def _projected(self, heads: Tensor, **how: bool) -> Tensor:
        # [b, a/t, s, d] -> [b, s, a/t*d] -> [b, s, h]
        output: Tensor = self.output(heads.transpose(1, 2).flatten(2), **how)
        return output

    def extra_repr(self) -> str:
        config, c = self.config, self.core.cp.size
        t = self.shard_context.grid.feature_parts
        parts = [f"heads {self.local_heads.start}..{self.local_heads.stop} of {config.heads}"]
        if config.queries_per_kv_head > 1:
            parts.append(f"{max(1, config.num_kv_heads // t)} of {config.num_kv_heads} kv")
        parts += [f"d={config.head_size}", f"causal={config.causal}", f"dropout={config.dropout}"]
        if config.scale is not None:
            parts.append(f"scale={config.scale}")
        parts.append(f"t={t}")
        return ", ".join([*parts, f"c={c}"] if c > 1 else parts)


class ParallelSelfAttention(ParallelAttention):
    """hidden [b, s/c, h] -> [b, s/c, h]; with sequence parallelism both are [b, s/(ct), h].

    Raises ValueError where heads or kv_heads cannot be split over `shard_context.tp`.
    """

    def __init__(
        self, config: AttentionConfig, shard_context: ShardContext, rng_site: str, *, recompute: bool = False
    ) -> None:
        super().__init__(config, shard_context, rng_site, recompute=recompute)
        layers, d = shard_context.layers, config.head_size
        _check_kv(config.heads, config.num_kv_heads, d, shard_context.grid.feature_parts)
        if shard_context.grid.mode != "1d":
            shard_context.local_heads(config.num_kv_heads)  # 1d alone shares columns of one head
        parts = (config.heads * d, *[config.num_kv_heads * d] * 2)
        h, bias = config.hidden, config.bias
        init = config.qkv_init
        self.qkv = layers.column_linear(h, sum(parts), bias=bias, init=init, parts=parts)
        self.query_norm = self._qk_norm(parts[0])
        self.key_norm = self._qk_norm(parts[1])
        of_output = bias if config.output_bias is None else config.output_bias
        self.output = layers.row_linear(parts[0], h, bias=of_output, init=config.output_init)

    def _qk_norm(self, width: int) -> nn.Module | None:
        """A norm of queries or of keys, which have `width` columns in all heads together."""
        config = self.config
        if config.qk_norm is None:
            return None
        size, dim = (width, "heads") if config.norms_width else (config.head_size, "head_size")
        return self.shard_context.norm(config.qk_norm, size, eps=config.eps, dim=dim)

    def forward(
        self,
        hidden: Tensor,
        rng: CounterRNG | None = None,
        *,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        positions: Positions | None = None,
        cos_sin: CosSin | None = None,
        cache: KeyValueCache | None = None,
        **how: bool,
    ) -> Tensor:
        """rng: makes dropout masks; None is no dropout. mask, bias: as AttentionCore's. positions:
        rotary positions, [s/c] or [b, s/c]; the tokens' indices by default. cos_sin: the table of
        rotary positions, if it was computed before. cache: that of the earlier positions; hidden
        holds the s positions after them, whose keys and values are appended to it, and mask and
        bias are then [.., s, all positions]. how: as RowParallelLinear's."""
        context = self.shard_context
        rng = context.own_rng(rng, inside=True)
        if isinstance(positions, Tensor) and positions.dim() > 1:
            positions = context.own_samples(positions, inside=True)
        query, key, value = self._queries_keys_values(hidden)
        if not self.config.norms_width:
            query, key = self._normed(query, key)
        rows = None if cache is None else range(cache.length, cache.length + hidden.shape[1])
        if self.config.rotary is not None:
            given = rows if positions is None else positions
            cos, sin = cos_sin or self._cos_sin(self.config.rotary, query, given)
            query, key = (self.core.backend.rotate(x, cos, sin) for x in (query, key))
        if cache is None:
            heads = self.core.split(query, key, value, rng, mask=mask, bias=bias)
            return self._projected(heads, **how)
        key, value = cache.append(key, value)
        heads = self.core(query, key, value, rng, mask=mask, bias=bias, rows=rows)
        return self._projected(heads, **how)

    def _normed(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        if self.query_norm is None or self.key_norm is None:
            return query, key
        return self.query_norm(query), self.key_norm(key)

    def _queries_keys_values(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        config, kernels = self.config, self.core.backend
        is_shared = config.num_kv_heads < self.shard_context.grid.feature_parts
        bias = None if is_shared or config.norms_width else summed_bias(self.qkv, kernels)
        if bias is None:
            return self._split(self.qkv(hidden))
        qkv = self.qkv(hidden, bias_gradient=False)
        columns = len(self.local_heads) * config.head_size
        others = (qkv.shape[-1] - columns) // 2
        return kernels.split_heads(qkv, (columns, others, others), config.head_size, bias)

    def _split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[b, s, all columns] -> query, key and value by head. The backward of one split by sizes
        is one concatenation; that of slices would be full-size zeros, a copy and a sum for each."""
        columns = len(self.local_heads) * self.config.head_size
        others, norms_width = qkv.shape[-1] - columns, self.config.norms_width
        is_shared = self.config.num_kv_heads < self.shard_context.grid.feature_parts
        if is_shared and not norms_width:
            query, kv = qkv.split((columns, others), dim=-1)
            return self._by_head(query), *self._gathered(kv)
        query, key, value = qkv.split((columns, others // 2, others // 2), dim=-1)
        if norms_width:
            query, key = self._normed(query, key)
        if is_shared:
            return self._by_head(query), *self._gathered(torch.cat((key, value), dim=-1))
        return self._by_head(query), self._by_head(key), self._by_head(value)

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

    def _cos_sin(self, rotary: Rotary, query: Tensor, given: Positions | None) -> CosSin:
        if given is not None:
            return rotary.table(given, query)
        return self.shard_context.rotary_tables.rows(rotary, query.shape[-2], self.core.cp, query)


def _check_kv(heads: int, kv_heads: int, head_dim: int, t: int) -> None:
    """Raise ValueError unless t ranks can split the key-value heads.

    Either every rank holds kv_heads / t heads, or t / kv_heads ranks share the columns of one head
    evenly.
    """
    if not splits_kv_heads(kv_heads, head_dim, parts=t):
        legal = ", ".join(str(ranks) for ranks in divisors(heads) if splits_kv_heads(kv_heads, head_dim, parts=ranks))
        raise ValueError(
            f"kv_heads: {kv_heads} is not divisible by {t} ranks, nor do {t} ranks share a head's "
            f"{head_dim} columns evenly (use one of {legal} ranks)"
        )


class ParallelCrossAttention(ParallelAttention):
    """hidden [b, q/c, h], context [b, s/c, h] -> [b, q/c, h].

    With sequence parallelism hidden, context and result are split over tp too, [b, q/(ct), h] and
    so on. A query sees the full context whatever config's `causal` says. Raises ValueError if the
    number of heads is not divisible by that of tensor-parallel ranks, and for shared key-value
    heads or rotary positions, which cross-attention does not have.
    """

    def __init__(
        self, config: AttentionConfig, shard_context: ShardContext, rng_site: str, *, recompute: bool = False
    ) -> None:
        if config.num_kv_heads != config.heads:
            raise ValueError(
                f"kv_heads {config.num_kv_heads}: cross-attention has as many as heads (set kv_heads to {config.heads})"
            )
        if config.rotary is not None:
            raise ValueError("rotary positions: cross-attention has none (leave rotary out)")
        if shard_context.exchanges_heads:
            raise ValueError("cross-attention exchanges no heads over cp (use cp_comm all_gather)")
        config = replace(config, causal=False)
        super().__init__(config, shard_context, rng_site, recompute=recompute)
        layers, width = shard_context.layers, config.heads * config.head_size
        h, bias, init = config.hidden, config.bias, config.init
        self.query = layers.column_linear(h, width, bias=bias, init=config.query_init)
        self.key_value = layers.column_linear(h, 2 * width, bias=bias, init=init, parts=(width, width))
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
        """rng: makes dropout masks; None is no dropout. mask [b or 1, a/t or 1, q/c or 1, s]: True
        where a query may see a token of the context; rows as this rank holds them, keys of the full
        context. cache: keeps keys and values of the first call's context, which later calls read
        instead of computing them; gradients do not reach them."""
        query = self._by_head(self.query(hidden))
        key, value = gather_context(*self._keys_values(context, cache), self.core.cp)
        return self._projected(self.core(query, key, value, rng, mask=mask))

    def _keys_values(self, context: Tensor, cache: ContextCache | None) -> tuple[Tensor, Tensor]:
        if cache is not None and cache.keys_values is not None:
            return cache.keys_values
        key, value = (self._by_head(part) for part in self.key_value(context).chunk(2, dim=-1))
        if cache is not None:
            cache.keys_values = key.detach(), value.detach()
        return key, value


class KeyValueCache:
    """Keys and values of up to `capacity` positions of one attention layer.

    length: how many positions are stored. Memory is allocated at the first `append`.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity, self.length = capacity, 0
        self._stored: tuple[Tensor, Tensor] | None = None

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store key [b, k/t, s, d] and value [b, k/t, s, e]; returns those of all positions,
        [b, k/t, length, d] and [b, k/t, length, e].

        Raises ValueError where the new positions exceed the capacity.
        """
        start, stop = self.length, self.length + key.shape[-2]
        if stop > self.capacity:
            raise ValueError(f"{stop} positions for a cache of {self.capacity}")
        if self._stored is None:
            self._stored = self._room_for(key), self._room_for(value)
        for stored, new in zip(self._stored, (key, value), strict=True):
            stored[..., start:stop, :] = new
        self.length = stop
        keys, values = self._stored
        return keys[..., :stop, :], values[..., :stop, :]

    def _room_for(self, new: Tensor) -> Tensor:
        return new.new_empty((*new.shape[:-2], self.capacity, new.shape[-1]))


class ContextCache:
    """Keys and values of an encoder's output in one cross-attention layer, computed once.

    keys_values: 2 of [b, a/t, s, d]; None before the first use.
    """

    def __init__(self) -> None:
        self.keys_values: tuple[Tensor, Tensor] | None = None


class DecoderCaches(NamedTuple):
    """The caches of a decoder layer in incremental decoding; None for no cache."""

    own: KeyValueCache | None = None
    cross: ContextCache | None = None
