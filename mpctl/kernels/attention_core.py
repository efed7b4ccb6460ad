"""The core of attention, softmax(scale Q K^T + bias) V, whole or with its sequence split.

Under context parallelism (context.py) keys and values are gathered, and each block of queries meets
the prefix of keys that it may see, so that no [s, s] mask is made.

scale is 1/sqrt(d) (arXiv 1706.03762, section 3.2.1) unless given: T5 multiplies by nothing, scale
1.0, as its initial query weights are smaller by sqrt(d) (its reference code, mesh_tensorflow).

Without attention dropout the product is one fused kernel of the `KernelBackend`, which keeps no
scores. With it the product is computed step by step, since a fused kernel's mask would depend on
the layout; backward then keeps probabilities, mask and dropped probabilities: in 16 bit 2 + 1 + 2
bytes an element of [b, a/t, s, s], the 5as/h term of arXiv 2205.05198, equation 1. `recompute`
keeps none of them (selective recomputation, section 5 there).

Letters: b batch, s sequence, a heads, k key-value heads, d head size, q queries, t tp, c cp.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from mpctl.kernels.alibi import distance_bias, slopes
from mpctl.kernels.backend import TORCH_BACKEND, KernelBackend
from mpctl.kernels.config import AttentionConfig
from mpctl.kernels.context import NO_CP, context_blocks, gather_context
from mpctl.kernels.counter_rng import CounterRNG
from mpctl.kernels.masks import causal_mask
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


@dataclass(frozen=True)
class AttentionCore:
    """What a layer knows of its core before it sees a tensor.

    rng_site, heads: the name and the global numbers of the local heads, for the dropout mask.
    recompute: compute scores again in backward, where any would be kept. cp: the group over which
    the sequence is split. scale: of the scores, before the bias; None is 1/sqrt(d). backend:
    computes the product where there is no dropout. window: keys that a query sees, None for all.
    slopes: of the local heads with ALiBi, empty without.
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
    slopes: tuple[float, ...] = ()

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
            slopes=slopes(config.heads)[heads.start : heads.stop] if config.alibi else (),
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
        has_dropout = block.rng is not None and block.rng.active(self.dropout)
        attend = self._step_by_step if has_dropout else self._fused
        if self.recompute and (has_dropout or block.bias is not None or self._makes_masks):
            # one argument a tensor: those are what checkpointing saves, and checks
            result: Tensor = recomputed(lambda *fields: attend(_Block(*fields)), *block)
            return result
        return attend(block)

    def _fused(self, block: _Block) -> Tensor:
        query, key, value, rows, _, mask, bias = block
        if mask is None and bias is None and not self._makes_masks:
            # Whole squares from position 0, or the last rows of a longer prefix; one row sees all.
            first = self.causal and rows.start == 0
            is_tail = self.causal and not first and len(rows) > 1
            lower = _lower_right(len(rows), key.shape[-2]) if is_tail else None
            return self.backend.attention(
                query, key, value, lower, is_causal=first, scale=self.scale, enable_gqa=True
            )
        key, value = _repeated(query, key, value)
        seen, bias = self._seen(mask, rows, key), self._biased(bias, rows, query, key)
        if bias is not None:
            bias = bias.to(query.dtype)
            seen = bias if seen is None else bias.masked_fill(~seen, -torch.inf)
        return self.backend.attention(query, key, value, seen, scale=self.scale)

    def _step_by_step(self, block: _Block) -> Tensor:
        query, key, value, rows, rng, mask, bias = block
        if rng is None:
            raise ValueError("attention with dropout needs a CounterRNG")
        key, value = _repeated(query, key, value)
        # [b, a/t, q, d] x [b, a/t, d, s] -> [b, a/t, q, s]
        scale = 1 / math.sqrt(query.shape[-1]) if self.scale is None else self.scale
        scores = query.mul(scale) @ key.transpose(-1, -2)
        bias = self._biased(bias, rows, query, key)
        scores = scores if bias is None else scores.add_(bias)
        seen = self._seen(mask, rows, key)
        if seen is not None:
            # The lowest number, not -inf: a row that sees nothing must not become nan.
            scores = scores.masked_fill_(~seen, torch.finfo(scores.dtype).min)
        probabilities = scores.softmax(-1)
        if mask is not None and seen is not None:
            probabilities = probabilities.masked_fill(~seen, 0.0)
        dropped = rng.attention_dropout(
            probabilities, self.dropout, rng_site=self.rng_site, heads=self.heads, rows=rows
        )
        return dropped @ value

    def _seen(self, mask: Tensor | None, rows: range, key: Tensor) -> Tensor | None:
        if not self.causal:
            return mask
        keys = range(key.shape[-2])
        causal = causal_mask(rows, keys, window=self.window, device=key.device)
        return causal if mask is None else mask & causal

    @property
    def _makes_masks(self) -> bool:
        """Whether a window or slopes make a mask of their own for every block."""
        return self.window is not None or bool(self.slopes)

    def _biased(
        self, bias: Tensor | None, rows: range, query: Tensor, key: Tensor
    ) -> Tensor | None:
        """The bias with what ALiBi adds, [b or 1, a/t, q, s]."""
        if not self.slopes:
            return bias
        distance = distance_bias(self.slopes, rows, key.shape[-2], query)
        return distance if bias is None else bias + distance


def _lower_right(queries: int, keys: int) -> Tensor:
    """torch's causal bias for the last rows: it has no values, so that a dispatch mode (a memory
    tracker's, fake tensors') has nothing to count or convert, and is switched off here."""
    # Here, since it imports torch._dynamo: a second of processor time at the start of each rank.
    from torch.nn.attention.bias import causal_lower_right

    with _disable_current_modes():
        return causal_lower_right(queries, keys)


def _repeated(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """[b, k/t, s, d] -> [b, a/t, s, d]: a key-value head for each of its queries."""
    queries_per_kv_head = query.shape[1] // key.shape[1]
    if queries_per_kv_head == 1:
        return key, value
    return (
        key.repeat_interleave(queries_per_kv_head, dim=1),
        value.repeat_interleave(queries_per_kv_head, dim=1),
    )
