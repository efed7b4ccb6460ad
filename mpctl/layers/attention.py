"""Self-attention and cross-attention split by whole heads, and the caches of incremental decoding.

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

Under context parallelism (context_parallel.py) keys and values are gathered, and each block of
queries meets the prefix of keys that it may see, so that no [s, s] mask is made: s=8 on c=2, rank 0
holds rows 0 1 and 6 7; the first block meets 2 keys, the second 8. Of cross-attention both
sequences are split, each in its own balanced blocks, and the encoder's keys are gathered.

How a block is computed is the `KernelBackend`'s to choose (kernels/backend.py). Where that keeps
scores or a mask of their size, `recompute` computes them again in backward (selective
recomputation, arXiv 2205.05198, section 5).

Letters: b batch, s sequence, h hidden, a heads, k key-value heads, d head size, q queries, t tp,
c cp.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mpctl.kernels.attention import AttentionVariant, slopes
from mpctl.kernels.backend import TORCH_BACKEND, KernelBackend
from mpctl.kernels.counter_rng import CounterRNG
from mpctl.kernels.masks import Positions
from mpctl.kernels.rotary import CosSin, Rotary
from mpctl.layers.config import AttentionConfig
from mpctl.layers.context_parallel import NO_CP, context_blocks, gather_context
from mpctl.layers.mappings import gather_sequence
from mpctl.layers.parameters import mark_partial
from mpctl.layers.recompute import recomputed
from mpctl.layers.shard_context import NORMS, ShardContext
from mpctl.sharding import divisors, splits_kv_heads
from mpctl.transport.group import Group


class _Block(NamedTuple):
    """Queries at contiguous positions and the keys that they may see: query [b, a/t, q, d], key
    and value [b, k/t, s, d], rows the q global positions, mask and bias [b or 1, a/t or 1, q,
    s]."""

    query: Tensor
    key: Tensor
    value: Tensor
    rows: range
    rng: CounterRNG | None
    mask: Tensor | None
    bias: Tensor | None


@dataclass(frozen=True, eq=False)
class AttentionCore:
    """What a layer knows of its core before it sees a tensor.

    rng_site, heads: the name and the global numbers of the local heads, for the dropout mask.
    recompute: compute scores again in backward, where any would be kept. cp: the group over which
    the sequence is split. scale: of the scores, before the bias; None is 1/sqrt(d). backend:
    computes a block. window: keys that a query sees, None for all. slopes: [a/t], of the local
    heads with ALiBi, None without.
    """

    rng_site: str
    heads: range
    dropout: float = 0.0
    causal: bool = True
    recompute: bool = False
    cp: Group = NO_CP
    scale: float | None = None
    backend: KernelBackend = TORCH_BACKEND
    window: int | None = None
    slopes: Tensor | None = None

    @classmethod
    def of(
        cls, config: AttentionConfig, shard_context: ShardContext, rng_site: str, *, recompute: bool
    ) -> AttentionCore:
        """The core of a layer's attention; ValueError where its heads do not divide by tp."""
        heads = shard_context.layers.local_heads(config.heads)
        return cls(
            rng_site,
            heads,
            dropout=config.dropout,
            causal=config.causal,
            recompute=recompute,
            cp=shard_context.cp,
            scale=config.scale,
            backend=shard_context.backend,
            window=config.window,
            slopes=slopes(config.heads, heads, shard_context.device) if config.alibi else None,
        )

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
        """query [b, a/t, q/c, d], key and value [b, k/t, s/c, d] -> [b, a/t, q/c, d].

        mask (True: may attend; combined with the causal one by and) and bias (added): [b or 1,
        a/t or 1, q/c or 1, s], rows as this rank holds them, keys of the whole sequence. A query
        that sees no key gives zeros. rows: positions of the queries where they are the last of the
        s keys' and the keys before them come from a cache. Raises ValueError for rows
        under context parallelism: a cache holds the whole sequence.
        """
        if rows is not None and self.cp.size > 1:
            raise ValueError(f"a cache under context parallelism of {self.cp.size} (use cp 1)")
        key, value = gather_context(key, value, self.cp)
        shape = (*query.shape[-2:-1], key.shape[-2])
        mask, bias = (x if x is None else x.expand(*x.shape[:2], *shape) for x in (mask, bias))
        if rows is not None:
            return self._attend(_Block(query, key, value, rows, rng, mask, bias))
        blocks = context_blocks(shape[0] * self.cp.size, self.cp.size, self.cp.rank)
        whole = _Block(query, key, value, blocks[0], rng, mask, bias)
        if len(blocks) == 1:
            return self._attend(whole)
        return torch.cat([self._attend(part) for part in self._parts(whole, blocks)], dim=-2)

    def _parts(self, whole: _Block, blocks: Sequence[range]) -> Iterator[_Block]:
        """The queries of each block with the keys before its end (all keys if not causal)."""
        start = 0
        for rows in blocks:
            own = slice(start, start := start + len(rows))
            seen = slice(rows.stop if self.causal else None)
            mask, bias = (x if x is None else x[..., own, seen] for x in (whole.mask, whole.bias))
            key, value = whole.key[..., seen, :], whole.value[..., seen, :]
            yield _Block(whole.query[..., own, :], key, value, rows, whole.rng, mask, bias)

    def _attend(self, block: _Block) -> Tensor:
        if self.recompute and self.backend.keeps_pairs(block.query, block.key, self._of(block)):
            # one argument a tensor: those are what checkpointing saves, and checks
            result: Tensor = recomputed(lambda *fields: self._run(_Block(*fields)), *block)
            return result
        return self._run(block)

    def _run(self, block: _Block) -> Tensor:
        return self.backend.attention(block.query, block.key, block.value, self._of(block))

    def _of(self, block: _Block) -> AttentionVariant:
        query, key, _, rows, rng, mask, bias = block
        dropout = None
        if rng is not None and rng.active(self.dropout):
            shape = (*query.shape[:-1], key.shape[-2])
            dropout = rng.mask(
                shape, self.dropout, rng_site=self.rng_site, heads=self.heads, rows=rows
            )
        return AttentionVariant(
            rows, self.causal, self.scale, mask, bias, self.window, self.slopes, dropout
        )


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
        cos_sin: CosSin | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """rng: draws dropout; None is no dropout. mask, bias: as AttentionCore's. positions:
        those of rotary positions, [s/c] or [b, s/c]; the tokens' indices by default. cos_sin: the
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
            cos, sin = cos_sin or self._cos_sin(self.config.rotary, query, given)
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

    def _cos_sin(self, rotary: Rotary, query: Tensor, given: Positions | None) -> CosSin:
        if given is not None:
            return rotary.table(given, query)
        return self.shard_context.rotary_tables.rows(rotary, query.shape[-2], self.core.cp, query)

    def extra_repr(self) -> str:
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


class KeyValueCache:
    """Keys and values of up to `capacity` positions of one attention layer.

    length: how many positions are stored. Memory is allocated at the first `append`.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity, self.length = capacity, 0
        self._stored: Tensor | None = None

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store key and value [b, k/t, s, d]; returns those of all positions, [b, k/t, length, d].

        Raises ValueError where the new positions exceed the capacity.
        """
        start, stop = self.length, self.length + key.shape[-2]
        if stop > self.capacity:
            raise ValueError(f"{stop} positions for a cache of {self.capacity}")
        if self._stored is None:
            shape = (2, *key.shape[:-2], self.capacity, key.shape[-1])
            self._stored = key.new_empty(shape)
        self._stored[0, ..., start:stop, :] = key
        self._stored[1, ..., start:stop, :] = value
        self.length = stop
        return self._stored[0, ..., :stop, :], self._stored[1, ..., :stop, :]


class ContextCache:
    """Keys and values of an encoder's output in one cross-attention layer, computed once.

    keys_values: 2 of [b, a/t, s, d]; None before the first use.
    """

    def __init__(self) -> None:
        self.keys_values: tuple[Tensor, Tensor] | None = None


class DecoderCaches(NamedTuple):
    """What incremental decoding keeps of a decoder layer; None keeps nothing."""

    own: KeyValueCache | None = None
    cross: ContextCache | None = None
