"""The conjugate operators at the border of a tensor-parallel region, each with its two laws.

Megatron-LM (arXiv 1909.08053, section 3, figure 3) names the first two f and g, Megatron's sequence
parallelism (arXiv 2205.05198, section 4.2.2) the next two g-bar and its conjugate: outside the
region activations are split over the sequence. Forward of one is backward of the other:

    copy_to_region          f   forward identity         backward all-reduce
    reduce_from_region      g   forward all-reduce       backward identity
    gather_sequence             forward all-gather       backward reduce-scatter  (dim 1)
    scatter_sequence_sum        forward reduce-scatter   backward all-gather      (dim 1)
    scatter_to_region           forward keep own split   backward all-gather      (last dim)
    gather_from_region          forward all-gather       backward keep own split  (last dim)
    split_sequence              forward keep own split   backward all-gather      (dim 1)

By hand, t=2 and y = g(x * r) on rank r in (1, 2): y = 3x on both ranks; dx = f's sum = 1 + 2 = 3.
By hand, sequence (a, b) on rank 0 and (c, d) on rank 1, both partial sums of a whole of two rows:
scatter_sequence_sum leaves a + c on rank 0 and b + d on rank 1; gather_sequence brings both back.
A group of one rank makes each of them the identity, outside autograd.

Letters: b batch, s sequence, h hidden, t ranks of the group.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mpctl.sharding import local_range
from mpctl.transport.group import Group

SEQUENCE = 1


def copy_to_region(tensor: Tensor, group: Group, *, owned: bool = False) -> Tensor:
    """f: forward identity, backward all-reduce. Shape kept.

    owned: the gradient that arrives is fresh (the one reader is a matmul), so it is summed in
    place; without it a gradient shared with another branch is copied first.
    """
    return tensor if group.size == 1 else _Copy.apply(tensor, group, owned)


def reduce_from_region(tensor: Tensor, group: Group, *, owned: bool = False) -> Tensor:
    """g: forward all-reduce, backward identity. Shape kept.

    owned: the caller made this tensor and will not read it again, so it is summed in place;
    should autograd have saved it all the same, its version check raises in backward.
    """
    return tensor if group.size == 1 else _Reduce.apply(tensor, group, owned)


def gather_sequence(tensor: Tensor, group: Group) -> Tensor:
    """g-bar: forward all-gather [b, s/t, h] -> [b, s, h]; backward reduce-scatter.

    The sum is right where the readers of the whole are split over the group, each with its own
    part of the gradient; for a reader that every rank repeats, use gather_from_region(dim=1).
    """
    return tensor if group.size == 1 else _GatherSequence.apply(tensor, group)


def scatter_sequence_sum(tensor: Tensor, group: Group) -> Tensor:
    """Forward reduce-scatter [b, s, h] partial -> [b, s/t, h] summed; backward all-gather."""
    return tensor if group.size == 1 else _ScatterSum.apply(tensor, group)


def split_sequence(tensor: Tensor, group: Group) -> Tensor:
    """Forward keep own split [b, s, h], equal on every rank -> [b, s/t, h]; backward all-gather."""
    return scatter_to_region(tensor, group, dim=SEQUENCE)


def scatter_to_region(tensor: Tensor, group: Group, *, dim: int = -1) -> Tensor:
    """Forward [.., n] -> [.., n/t], this rank's block; backward all-gather."""
    return tensor if group.size == 1 else _Scatter.apply(tensor, group, dim)


def gather_from_region(tensor: Tensor, group: Group, *, dim: int = -1) -> Tensor:
    """Forward [.., n/t] -> [.., n], blocks in rank order; backward keeps this rank's block."""
    return tensor if group.size == 1 else _Gather.apply(tensor, group, dim)


def _summed(tensor: Tensor, group: Group, owned: bool) -> Tensor:
    free = owned and tensor.is_contiguous()
    return group.all_reduce(tensor if free else tensor.clone(memory_format=torch.contiguous_format))


def _own_block(tensor: Tensor, group: Group, dim: int) -> Tensor:
    own = local_range(tensor.shape[dim], parts=group.size, index=group.rank)
    return tensor.narrow(dim, own.start, len(own)).clone(memory_format=torch.contiguous_format)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group, owned: bool) -> Tensor:
        ctx.group, ctx.owned = group, owned
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _summed(grad, ctx.group, ctx.owned), None, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group, owned: bool) -> Tensor:
        result = _summed(tensor, group, owned)
        if result is tensor:
            ctx.mark_dirty(tensor)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return group.all_gather(tensor, SEQUENCE)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.group.reduce_scatter(grad, SEQUENCE), None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return group.reduce_scatter(tensor, SEQUENCE)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.group.all_gather(grad, SEQUENCE), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _own_block(tensor, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.group.all_gather(grad, ctx.dim), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return group.all_gather(tensor, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _own_block(grad, ctx.group, ctx.dim), None, None
