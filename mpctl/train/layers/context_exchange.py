"""Attention under cp by an exchange of sequence for heads (DeepSpeed Ulysses, arXiv 2309.14509).

Before attention a rank has all its heads for s/c positions, in the two blocks of context_parallel.py;
behind one all-to-all of queries, keys and values it has n/c heads for all s positions, in order. Its
attention is then that of a rank without cp, dropout masks by global head and position included; a
second all-to-all brings the result back. Backward sends as much as forward.

By hand, c 2, 4 query and 2 kv heads, s 8: rank 1 computes query heads 2 and 3 with kv head 1, and
holds positions 2 to 5 of all 4 heads before and behind.

Letters: b batch, s sequence, n heads, d head size, c cp.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mpctl.train.layers.context_parallel import by_position
from mpctl.train.transport.group import Group


def to_heads(parts: Sequence[Tensor], cp: Group) -> tuple[Tensor, ...]:
    """[b, n, s/c, d] of this rank's positions -> [b, n/c, s, d] of its heads, of each part its own n and d.

    One message; backward is `to_positions` of the gradients. Raises ValueError where c does not divide n.
    """
    for part in parts:
        if part.shape[1] % cp.size:
            raise ValueError(f"{part.shape[1]} heads over {cp.size} ranks of cp (use a cp that divides them)")
    result: tuple[Tensor, ...] = _ToHeads.apply(cp, *parts)
    return result


def to_positions(heads: Tensor, cp: Group) -> Tensor:
    """[b, n/c, s, d] of this rank's heads -> [b, n, s/c, d] of its positions; backward is `to_heads`."""
    result: Tensor = _ToPositions.apply(cp, heads)
    return result


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, cp: Group, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.cp = cp
        return _dealt(parts, cp)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_collected(grads, ctx.cp)


class _ToPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, cp: Group, heads: Tensor) -> Tensor:
        ctx.cp = cp
        return _collected((heads,), cp)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, _dealt((grad,), ctx.cp)[0]


def _dealt(parts: Sequence[Tensor], cp: Group) -> tuple[Tensor, ...]:
    # [b, n, s/c, d] -> [c, b, n/c, s/c, d]: what each rank gets
    by_rank = [part.unflatten(1, (cp.size, -1)).movedim(1, 0) for part in parts]
    received = cp.all_to_all(torch.cat([part.flatten(1) for part in by_rank], dim=1), dim=0)
    pieces = received.split([prod(part.shape[1:]) for part in by_rank], dim=1)
    # [c, b, n/c, s/c, d], by the rank of the positions -> [b, n/c, s, d]
    return tuple(by_position(x.unflatten(1, part.shape[1:])) for x, part in zip(pieces, by_rank, strict=True))


def _collected(wholes: Sequence[Tensor], cp: Group) -> tuple[Tensor, ...]:
    c, sizes = cp.size, [x.numel() // cp.size for x in wholes]
    packed = wholes[0].new_empty((c, sum(sizes)))
    for whole, piece in zip(wholes, packed.split(sizes, dim=1), strict=True):
        blocks = whole.chunk(2 * c, dim=-2)
        shape = (*whole.shape[:-2], whole.shape[-2] // c, whole.shape[-1])
        for r, of_rank in enumerate(piece):  # [b, n/c, s, d] -> [b, n/c, s/c, d] of rank r
            torch.cat((blocks[r], blocks[2 * c - 1 - r]), dim=-2, out=of_rank.view(shape))
    received = cp.all_to_all(packed, dim=0).split(sizes, dim=1)
    results = []
    for whole, piece in zip(wholes, received, strict=True):
        # [c, b, n/c, s/c, d], by the rank of the heads -> [b, c, n/c, s/c, d] -> [b, n, s/c, d]
        by_rank = piece.unflatten(1, (*whole.shape[:-2], whole.shape[-2] // c, whole.shape[-1]))
        results.append(by_rank.movedim(0, 1).flatten(1, 2))
    return tuple(results)
