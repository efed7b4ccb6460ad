"""The core of attention, softmax(scale Q K^T + bias) V, whole or with its sequence split.

Context parallelism over c ranks cuts the sequence into 2c blocks of n = s/2c; rank r holds blocks
r and 2c-1-r (Llama 3, arXiv 2407.21783, section 3.3.2). Causal work is then equal: its queries see
(r+1) + (2c-r) = 2c+1 blocks of keys. s=8, c=2: rank 0 holds 0 1 6 7, rank 1 holds 2 3 4 5.

Traffic a layer: forward all-gathers K and V in one message of 2*b*(k/t)*s*d elements, backward
reduce-scatters dK and dV in one of the same size; queries and output never move. Each block of
queries meets the prefix of keys that it may see, so no [s, s] mask is made. Keys of another
sequence, an encoder's, are split and gathered by their own length: q queries and s keys need only
be divisible by 2c each.

scale is 1/sqrt(d) (arXiv 1706.03762, section 3.2.1) unless given: T5 multiplies by nothing, scale
1.0, as its initial query weights are smaller by sqrt(d) (its reference code, mesh_tensorflow).

The product is torch's scaled_dot_product_attention, which keeps no scores. With attention dropout
it is spelled out, since that kernel's mask would depend on the layout; backward then keeps
probabilities, mask and dropped probabilities: in 16 bit 2 + 1 + 2 bytes per element of
[b, a/t, s, s], the 5as/h term of arXiv 2205.05198, equation 1. `recompute` keeps none of them.

Letters: b batch, s sequence, a heads, k key-value heads, d head size, q queries, t tp, c cp.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint

from mpctl.kernels.backend import TORCH_BACKEND, KernelBackend
from mpctl.kernels.counter_rng import CounterRNG
from mpctl.kernels.masks import causal_mask, numbers
from mpctl.sharding import local_size
from mpctl.transport.group import Group

WHOLE = Group(name="cp")


def context_blocks(seq: int, c: int, r: int) -> tuple[range, ...]:
    """Global positions that rank r of c holds; raises ValueError where 2c does not divide seq."""
    if c == 1:
        return (range(seq),)
    n = local_size(seq, parts=2 * c)
    return tuple(range(block * n, (block + 1) * n) for block in (r, 2 * c - 1 - r))


def context_positions(seq: int, c: int, r: int, *, device: torch.device | None = None) -> Tensor:
    """The same as one tensor [s/c], in the order in which the rank holds them: noise rows too."""
    return torch.cat([numbers(block, device) for block in context_blocks(seq, c, r)])


def context_split(whole: Tensor, cp: Group, *, dim: int = 1) -> Tensor:
    """This rank's part of a batch, tokens or targets [b, s] -> [b, s/c]."""
    if cp.size == 1:
        return whole
    positions = context_positions(whole.shape[dim], cp.size, cp.rank, device=whole.device)
    return whole.index_select(dim, positions)


def gather_context(key: Tensor, value: Tensor, cp: Group) -> tuple[Tensor, Tensor]:
    """2 of [b, k, s/c, d] -> 2 of [b, k, s, d] by position; backward sums, then keeps its own.

    Raises ValueError where 2c does not divide s.
    """
    if cp.size == 1:
        return key, value
    local_size(key.shape[-2] * cp.size, parts=2 * cp.size)
    return _GatherContext.apply(key, value, cp)


@dataclass(frozen=True)
class AttentionCore:
    """What a layer knows of its core before it sees a tensor.

    site, heads: the place and the global numbers of the local heads, for the dropout mask.
    recompute: compute scores again in backward, where any would be kept. scale: of the scores,
    before the bias; None is 1/sqrt(d). backend: what computes the product without dropout.
    """

    site: str
    heads: range
    dropout: float = 0.0
    causal: bool = True
    recompute: bool = False
    cp: Group = WHOLE
    scale: float | None = None
    backend: KernelBackend = TORCH_BACKEND

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, noise: CounterRNG | None = None, *,
        mask: Tensor | None = None, bias: Tensor | None = None, rows: range | None = None,
    ) -> Tensor:  # fmt: skip
        """query [b, a/t, q/c, d], key and value [b, k/t, s/c, d] -> [b, a/t, q/c, d].

        mask (True: may attend; it meets the causal one) and bias (added): [b or 1, a/t or 1,
        q/c or 1, s], rows as this rank holds them, keys of the whole sequence. A query that sees no
        key gives zeros. rows: positions of the queries where they are the last of the s keys' and
        the keys before them come from a cache (cache.py); needs c = 1.
        """
        assert rows is None or self.cp.size == 1, "a cache holds the whole sequence"
        key, value = gather_context(key, value, self.cp)
        shape = (*query.shape[-2:-1], key.shape[-2])
        mask, bias = (x if x is None else x.expand(*x.shape[:2], *shape) for x in (mask, bias))
        if rows is not None:
            return self._kept(query, key, value, rows, noise, mask, bias)
        blocks = context_blocks(shape[0] * self.cp.size, self.cp.size, self.cp.rank)
        if len(blocks) == 1:
            return self._kept(query, key, value, blocks[0], noise, mask, bias)
        parts, start = [], 0
        for block in blocks:
            own = slice(start, start := start + len(block))
            seen = slice(block.stop if self.causal else None)
            masks = (x if x is None else x[..., own, seen] for x in (mask, bias))
            held = (query[..., own, :], key[..., seen, :], value[..., seen, :])
            parts.append(self._kept(*held, block, noise, *masks))
        return torch.cat(parts, dim=-2)

    def _kept(
        self, query: Tensor, key: Tensor, value: Tensor, rows: range, noise: CounterRNG | None,
        mask: Tensor | None, bias: Tensor | None,
    ) -> Tensor:  # fmt: skip
        held = (query, key, value, rows, noise, mask, bias)
        spelled = noise is not None and noise.active(self.dropout)
        work = self._spelled if spelled else self._fused
        if self.recompute and (spelled or bias is not None):
            return checkpoint(work, *held, use_reentrant=False, preserve_rng_state=False)
        return work(*held)

    def _fused(
        self, query: Tensor, key: Tensor, value: Tensor, rows: range, noise: CounterRNG | None,
        mask: Tensor | None, bias: Tensor | None,
    ) -> Tensor:  # fmt: skip
        if mask is None and bias is None:
            # Whole squares from position 0, or the last rows of a longer prefix; one row sees all.
            first = self.causal and rows.start == 0
            is_tail = self.causal and not first and len(rows) > 1
            lower = _lower_right(len(rows), key.shape[-2]) if is_tail else None
            return self.backend.attention(
                query, key, value, lower, is_causal=first, scale=self.scale, enable_gqa=True
            )
        key, value = _repeated(query, key, value)
        seen = self._seen(mask, rows, key)
        if bias is not None:
            bias = bias.to(query.dtype)
            seen = bias if seen is None else bias.masked_fill(~seen, -torch.inf)
        return self.backend.attention(query, key, value, seen, scale=self.scale)

    def _spelled(
        self, query: Tensor, key: Tensor, value: Tensor, rows: range, noise: CounterRNG | None,
        mask: Tensor | None, bias: Tensor | None,
    ) -> Tensor:  # fmt: skip
        assert noise is not None
        key, value = _repeated(query, key, value)
        # [b, a/t, q, d] x [b, a/t, d, s] -> [b, a/t, q, s]
        scale = 1 / math.sqrt(query.shape[-1]) if self.scale is None else self.scale
        scores = query.mul(scale) @ key.transpose(-1, -2)
        scores = scores if bias is None else scores.add_(bias)
        seen = self._seen(mask, rows, key)
        if seen is not None:
            # The lowest number, not -inf: a row that sees nothing must not become nan.
            scores = scores.masked_fill_(~seen, torch.finfo(scores.dtype).min)
        shares = scores.softmax(-1)
        if mask is not None and seen is not None:
            shares = shares.masked_fill(~seen, 0.0)
        dropped = noise.attention_dropout(
            shares, self.dropout, site=self.site, heads=self.heads, rows=rows
        )
        return dropped @ value

    def _seen(self, mask: Tensor | None, rows: range, key: Tensor) -> Tensor | None:
        if not self.causal:
            return mask
        causal = causal_mask(rows, range(key.shape[-2]), device=key.device)
        return causal if mask is None else mask & causal


def _lower_right(queries: int, keys: int) -> Tensor:
    """A bias without values is no tensor of a mode's (a ledger's, a rehearsal's): it says where it
    stands, no more."""
    with _disable_current_modes():
        return causal_lower_right(queries, keys)


def _repeated(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """[b, k/t, s, d] -> [b, a/t, s, d]: a key-value head for each of its queries."""
    shared = query.shape[1] // key.shape[1]
    if shared == 1:
        return key, value
    return key.repeat_interleave(shared, dim=1), value.repeat_interleave(shared, dim=1)


class _GatherContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, key: Tensor, value: Tensor, cp: Group) -> tuple[Tensor, Tensor]:
        ctx.cp = cp
        # 2 of [b, k, s/c, d] -> [1, 2, b, k, s/c, d] -> [c, 2, b, k, s/c, d]
        held = cp.all_gather(torch.stack((key, value))[None], dim=0).chunk(2, dim=-2)
        # blocks 0..c of the ranks in order, then c..2c of the ranks from the last
        blocks = [*held[0], *reversed(held[1].unbind())]
        key, value = torch.cat(blocks, dim=-2)
        return key, value

    @staticmethod
    def backward(ctx: Any, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, None]:
        c = ctx.cp.size
        # 2 of [b, k, s, d] -> [c, 2, b, k, s/c, d] -> [1, 2, b, k, s/c, d]
        shape = (c, 2, *key.shape[:-2], key.shape[-2] // c, key.shape[-1])
        whole = key.new_empty(shape)
        for which, grad in enumerate((key, value)):
            blocks = grad.chunk(2 * c, dim=-2)
            for r, place in enumerate(whole[:, which]):
                torch.cat((blocks[r], blocks[2 * c - 1 - r]), dim=-2, out=place)
        own = ctx.cp.reduce_scatter(whole, dim=0)[0]
        return own[0], own[1], None
