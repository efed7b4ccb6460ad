"""A sequence split over the ranks of context parallelism, in balanced blocks.

Context parallelism over c ranks cuts the sequence into 2c blocks of n = s/2c; rank r holds blocks
r and 2c-1-r (Llama 3, arXiv 2407.21783, section 3.3.2). Causal work is then equal: its queries see
(r+1) + (2c-r) = 2c+1 blocks of keys. s=8, c=2: rank 0 holds 0 1 6 7, rank 1 holds 2 3 4 5.

Traffic a layer: forward all-gathers K and V in one message of 2*b*(k/t)*s*d elements, backward
reduce-scatters dK and dV in one of the same size; queries and output never move. Plain causal
attention needs no message for its two diagonals, 1/2c of the work, which are computed while K and V
arrive, in backward while dK and dV of the prefixes are on their way (`attend_context`). Keys of
another
sequence, an encoder's, are split and gathered by their own length: q queries and s keys need only
be divisible by 2c each. Latent attention gathers its latents instead (`gather_rows`).

Letters: b batch, s sequence, k key-value heads, d head size, q queries, t tp, c cp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mpctl.core.sharding import local_size
from mpctl.train.kernels.masks import numbers
from mpctl.train.kernels.partial_attention import Gradients, KeyPart, PartialKernel, merged
from mpctl.train.kernels.rotary import CosSin, Rotary
from mpctl.train.transport.group import Group

NO_CP = Group(name="cp")  # of a sequence that is not split


def context_blocks(seq: int, c: int, r: int) -> tuple[range, ...]:
    """The global positions that rank r of c holds, as one or two ranges.

    Raises ValueError where 2c does not divide seq.
    """
    if c == 1:
        return (range(seq),)
    n = local_size(seq, parts=2 * c)
    return tuple(range(block * n, (block + 1) * n) for block in (r, 2 * c - 1 - r))


def context_positions(seq: int, c: int, r: int, *, device: torch.device | None = None) -> Tensor:
    """`context_blocks` as one tensor [s/c], in the order of the rank's rows."""
    return torch.cat([numbers(block, device) for block in context_blocks(seq, c, r)])


def gather_context(key: Tensor, value: Tensor, cp: Group) -> tuple[Tensor, Tensor]:
    """Keys and values of all ranks: 2 of [b, k, s/c, d] -> 2 of [b, k, s, d], by position.

    Backward is a reduce-scatter: the gradients are summed and each rank keeps those of its part.
    Raises ValueError where 2c does not divide s.
    """
    if cp.size == 1:
        return key, value
    local_size(key.shape[-2] * cp.size, parts=2 * cp.size)
    return _GatherContext.apply(key, value, cp)


class _GatherContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, key: Tensor, value: Tensor, cp: Group) -> tuple[Tensor, Tensor]:
        ctx.cp = cp
        # 2 of [b, k, s/c, d] -> [1, 2, b, k, s/c, d] -> [c, 2, b, k, s/c, d]
        key, value = by_position(cp.all_gather(torch.stack((key, value))[None], dim=0))
        return key, value

    @staticmethod
    def backward(ctx: Any, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, None]:
        # 2 of [b, k, s, d] -> [c, 2, b, k, s/c, d] -> [1, 2, b, k, s/c, d]
        whole = _by_rank((key, value), ctx.cp.size, key.shape[-2] // (2 * ctx.cp.size))
        local = ctx.cp.reduce_scatter(whole, dim=0)[0]
        return local[0], local[1], None


def attend_context(query: Tensor, key: Tensor, value: Tensor, cp: Group, kernel: PartialKernel) -> Tensor:
    """Plain causal attention of this rank's rows to all keys: query [b, a, s/c, d], key and value
    [b, k, s/c, d], of this rank's blocks -> [b, a, s/c, d]. Of c > 1 ranks; gathers as
    `gather_context` and saves what it returns. Raises ValueError where 2c does not divide s."""
    local_size(key.shape[-2] * cp.size, parts=2 * cp.size)
    result: Tensor = _AttendContext.apply(query, key, value, cp, kernel)
    return result


class _AttendContext(torch.autograd.Function):
    """Each of a rank's two blocks is a diagonal, of its own keys, and a prefix, of the keys before,
    which the first block of rank 0 does not have."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, cp: Group, kernel: PartialKernel) -> Tensor:
        arriving = cp.start_all_gather(torch.stack((key, value))[None], dim=0)
        blocks = context_blocks(key.shape[-2] * cp.size, cp.size, cp.rank)
        halves = [x.chunk(2, dim=-2) for x in (query, key, value)]
        parts = [kernel.forward(*half, is_causal=True) for half in zip(*halves, strict=True)]
        keys, values = by_position(arriving.wait())
        for i, (block, rows) in enumerate(zip(blocks, halves[0], strict=True)):
            if block.start:
                before = keys[..., : block.start, :], values[..., : block.start, :]
                parts[i] = merged(parts[i], kernel.forward(rows, *before, is_causal=False))
        ctx.cp, ctx.kernel, ctx.blocks = cp, kernel, blocks
        out = torch.cat([part.out for part in parts], dim=-2)
        ctx.save_for_backward(query, keys, values, out, *(part.sums for part in parts), *parts[0].seeds)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, keys, values, out, *sums = ctx.saved_tensors
        sums, seeds = sums[:2], tuple(sums[2:])
        cp, kernel, blocks, n = ctx.cp, ctx.kernel, ctx.blocks, query.shape[-2] // 2
        queries, grads, outs = (x.chunk(2, dim=-2) for x in (query, grad, out))
        wholes = [KeyPart(o, of_rows, seeds) for o, of_rows in zip(outs, sums, strict=True)]

        def gradients(i: int, seen: slice, *, is_causal: bool) -> Gradients:
            of_keys = keys[..., seen, :], values[..., seen, :]
            return kernel.backward(grads[i], queries[i], *of_keys, wholes[i], is_causal=is_causal)

        last, *before = gradients(1, slice(blocks[1].start), is_causal=False)
        dqueries: list[Tensor] = [torch.zeros_like(last), last]
        if blocks[0].start:
            dqueries[0], *first = gradients(0, slice(blocks[0].start), is_causal=False)
            for whole, part in zip(before, first, strict=True):
                whole[..., : blocks[0].start, :] += part
        arriving = cp.start_reduce_scatter(_by_rank(before, cp.size, n), dim=0)
        own = []
        for i, block in enumerate(blocks):
            dquery, *of_block = gradients(i, slice(block.start, block.stop), is_causal=True)
            dqueries[i] += dquery
            own.append(of_block)
        dkey, dvalue = (torch.cat(pair, dim=-2) for pair in zip(*own, strict=True))
        sent = arriving.wait()[0]
        return torch.cat(dqueries, dim=-2), dkey.add_(sent[0]), dvalue.add_(sent[1]), None, None


def _by_rank(grads: Sequence[Tensor], c: int, n: int) -> Tensor:
    """2 of [b, k, up to s - n, d], by position, whose rows behind the last are 0
    -> [c, 2, b, k, s/c, d]."""
    like = grads[0]
    whole = like.new_empty((c, len(grads), *like.shape[:-2], 2 * n, like.shape[-1]))
    zeros = like.new_zeros((*like.shape[:-2], n, like.shape[-1]))
    for which, grad in enumerate(grads):
        blocks = grad.split(n, dim=-2)
        blocks += (zeros,) * (2 * c - len(blocks))
        for r, of_rank in enumerate(whole[:, which]):
            torch.cat((blocks[r], blocks[2 * c - 1 - r]), dim=-2, out=of_rank)
    return whole


def gather_rows(part: Tensor, cp: Group) -> Tensor:
    """The rows of all ranks by position: [.., s/c, n] -> [.., s, n].

    Backward is a reduce-scatter, as gather_context's. Raises ValueError where 2c does not divide s.
    """
    if cp.size == 1:
        return part
    local_size(part.shape[-2] * cp.size, parts=2 * cp.size)
    return _GatherRows.apply(part, cp)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, cp: Group) -> Tensor:
        ctx.cp = cp
        # [.., s/c, n] -> [1, .., s/c, n] -> [c, .., s/c, n]
        return by_position(cp.all_gather(part[None], dim=0))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        c = ctx.cp.size
        # [.., s, n] -> [c, .., s/c, n] -> [1, .., s/c, n]
        blocks = grad.chunk(2 * c, dim=-2)
        pairs = zip(blocks[:c], reversed(blocks[c:]), strict=True)
        by_rank = torch.stack([torch.cat(pair, dim=-2) for pair in pairs])
        return ctx.cp.reduce_scatter(by_rank, dim=0)[0], None


def by_position(by_rank: Tensor) -> Tensor:
    """[c, .., s/c, n] -> [.., s, n]: blocks 0..c of the ranks in order, then c..2c of the ranks
    from the last."""
    first, second = by_rank.chunk(2, dim=-2)
    return torch.cat([*first, *reversed(second.unbind())], dim=-2)


@dataclass(eq=False)
class RotaryTables:
    """Rotary tables that the layers of a rank share. The last table of each `Rotary` is kept, so
    that a training computes it once and not in each layer of each micro batch.
    """

    _held: list[tuple[Rotary, tuple[object, ...], CosSin]] = field(default_factory=list)

    def rows(self, rotary: Rotary, length: int, cp: Group, like: Tensor) -> CosSin:
        """The table of the `length` positions that this rank holds, on the device of `like` and for
        its dtype."""
        place = (length, cp.size, cp.rank, like.dtype == torch.float64, like.device)
        for law, at, turns in self._held:
            if law == rotary and at == place:
                return turns
        with torch.inference_mode(False):  # a validation may be the first call
            own = context_positions(length * cp.size, cp.size, cp.rank, device=like.device)
            turns = rotary.table(own, like)
        self._held = [entry for entry in self._held if entry[0] != rotary]
        self._held.append((rotary, place, turns))
        return turns
