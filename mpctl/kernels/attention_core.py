"""The core of attention, softmax(scale Q K^T + bias) V, whole or with its sequence split.

Under context parallelism (context.py) keys and values are gathered, and each block of queries meets
the prefix of keys that it may see, so that no [s, s] mask is made.

scale is 1/sqrt(d) (arXiv 1706.03762, section 3.2.1) unless given: T5 multiplies by nothing, scale
1.0, as its initial query weights are smaller by sqrt(d) (its reference code, mesh_tensorflow).

How a block is computed is the `KernelBackend`'s to choose (backend.py). Where that keeps scores or
a mask of their size, `recompute` computes them again in backward (selective recomputation, arXiv
2205.05198, section 5).

By hand, s=8 on c=2: rank 0 holds rows 0 1 and 6 7; the first block meets 2 keys, the second 8.

Letters: b batch, s sequence, a heads, k key-value heads, d head size, q queries, t tp, c cp.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mpctl.kernels.alibi import slopes
from mpctl.kernels.attention_variant import AttentionVariant
from mpctl.kernels.backend import TORCH_BACKEND, KernelBackend
from mpctl.kernels.config import AttentionConfig
from mpctl.kernels.context import NO_CP, context_blocks, gather_context
from mpctl.kernels.counter_rng import CounterRNG
from mpctl.kernels.recompute import recomputed
from mpctl.kernels.tensor_parallel import ShardContext
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
        s keys' and the keys before them come from a cache (cache.py). Raises ValueError for rows
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
