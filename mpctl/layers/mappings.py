"""Differentiable collectives at the borders of a tensor-parallel region.

Inside the region every rank holds a part of the weights. Each function sends one thing forward and
its conjugate backward:

    copy_to_region          f   forward identity         backward all-reduce
    reduce_from_region      g   forward all-reduce       backward identity
    gather_sequence             forward all-gather       backward reduce-scatter  (dim 1)
    scatter_sequence_sum        forward reduce-scatter   backward all-gather      (dim 1)
    scatter_samples_sum         forward reduce-scatter   backward all-gather      (dim 0)
    scatter_to_region           forward select block     backward all-gather      (last dim)
    gather_from_region          forward all-gather       backward select block    (last dim)
    split_sequence              forward select block     backward all-gather      (dim 1)

f and g are the names of Megatron-LM (arXiv 1909.08053, section 3, figure 3). The next two are those
of its sequence parallelism (arXiv 2205.05198, section 4.2.2), where activations outside the region
are split over the sequence; on a grid of ranks the samples are. "Select block" takes this rank's
t-th of a dimension.

In a group of one rank each function returns its argument, without a node in the autograd graph.

Letters: b batch, s sequence, h hidden, t ranks of the group.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mpctl.sharding import local_range
from mpctl.transport.group import Group, Pending

SAMPLES, SEQUENCE = 0, 1


def copy_to_region(tensor: Tensor, group: Group, *, owned: bool = False) -> Tensor:
    """Operator f: forward identity, backward all-reduce; any shape.

    owned: the gradient that arrives has no other reader (the one consumer is a matrix product), so
    it is summed in place. Otherwise it is copied first, as another branch may share it.
    """
    return tensor if group.size == 1 else _Copy.apply(tensor, group, owned)


def reduce_from_region(tensor: Tensor, group: Group, *, owned: bool = False) -> Tensor:
    """Operator g: forward all-reduce, backward identity; any shape.

    owned: the caller made this tensor and will not read it again, so it is summed in place. If
    autograd saved it nevertheless, its version check raises RuntimeError in backward.
    """
    return tensor if group.size == 1 else _Reduce.apply(tensor, group, owned)


def gather_sequence(tensor: Tensor, group: Group) -> Tensor:
    """Forward all-gather [b, s/t, h] -> [b, s, h]; backward reduce-scatter.

    Summing gradients is right if what reads the result is split over the group, so that each rank
    has a summand of the gradient. If every rank computes the same with it, use
    gather_from_region(dim=1).
    """
    return tensor if group.size == 1 else _GatherSequence.apply(tensor, group)


def scatter_sequence_sum(tensor: Tensor, group: Group) -> Tensor:
    """Forward reduce-scatter, summands [b, s, h] -> sum [b, s/t, h]; backward all-gather."""
    return tensor if group.size == 1 else _ScatterSum.apply(tensor, group, SEQUENCE)


def scatter_samples_sum(tensor: Tensor, group: Group) -> Tensor:
    """Forward reduce-scatter, summands [b, s, h] -> sum [b/t, s, h]; backward all-gather."""
    return tensor if group.size == 1 else _ScatterSum.apply(tensor, group, SAMPLES)


def split_sequence(tensor: Tensor, group: Group) -> Tensor:
    """Forward this rank's positions, [b, s, h] -> [b, s/t, h]; backward all-gather.

    The argument must be equal on every rank.
    """
    return scatter_to_region(tensor, group, dim=SEQUENCE)


def scatter_to_region(tensor: Tensor, group: Group, *, dim: int = -1) -> Tensor:
    """Forward this rank's block of `dim`, [.., n] -> [.., n/t]; backward all-gather."""
    return tensor if group.size == 1 else _Scatter.apply(tensor, group, dim)


def gather_from_region(tensor: Tensor, group: Group, *, dim: int = -1) -> Tensor:
    """Forward all-gather along `dim`, [.., n/t] -> [.., n]; backward this rank's block.

    Blocks are in rank order.
    """
    return tensor if group.size == 1 else _Gather.apply(tensor, group, dim)


def start_sum(dx: Tensor, group: Group, *, split: bool) -> Pending:
    """Begin to sum dX [b, s, i], partial and read by nobody else, over the ranks; split: to this
    rank's [b, s/t, i], else whole."""
    if split:
        return group.start_reduce_scatter(dx, SEQUENCE)
    return group.start_all_reduce(dx)


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
    def forward(ctx: Any, tensor: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return group.reduce_scatter(tensor, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.group.all_gather(grad, ctx.dim), None, None


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
