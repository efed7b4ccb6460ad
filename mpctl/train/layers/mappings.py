"""Differentiable collectives at the borders of a tensor-parallel region.

Inside the region every rank holds a part of the weights. Each function is one collective in forward
and its conjugate in backward:

    copy_to_region          f   forward identity         backward all-reduce
    reduce_from_region      g   forward all-reduce       backward identity
    gather_sequence             forward all-gather       backward reduce-scatter  (dim 1)
    scatter_sequence_sum        forward reduce-scatter   backward all-gather      (dim 1)
    scatter_samples_sum         forward reduce-scatter   backward all-gather      (dim 0)
    scatter_to_region           forward select block     backward all-gather      (last dim)
    gather_from_region          forward all-gather       backward select block    (last dim)

f and g are Megatron-LM's names (arXiv 1909.08053, section 3, figure 3); the column-parallel product
(linear.py) has an f of its own, which hides the sum behind dW. The next two are those
of its sequence parallelism (arXiv 2205.05198, section 4.2.2), where activations outside the region
are split over the sequence; on a grid of ranks the samples are. "Select block" takes this rank's
t-th of a dimension.

In a group of one rank each function returns its argument, without a node in the autograd graph.

Letters: b batch, s sequence, h hidden, t ranks of the group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mpctl.core.sharding import local_range
from mpctl.train.transport.group import Group

SAMPLES, SEQUENCE = 0, 1


def copy_to_region(tensor: Tensor, group: Group) -> Tensor:
    """Operator f: forward identity, backward all-reduce; any shape. The argument must be equal on
    every rank."""
    if group.size == 1:
        return tensor
    return _Region.apply(tensor, lambda whole: whole.view_as(whole), group.all_reduce)


def reduce_from_region(tensor: Tensor, group: Group, *, owned: bool = False) -> Tensor:
    """Operator g: forward all-reduce, backward identity; any shape.

    owned: the caller made this tensor and will not read it again, so it is summed in place. If
    autograd saved it nevertheless, its version check raises RuntimeError in backward.
    """

    def summed(partial: Tensor) -> Tensor:
        free = owned and partial.is_contiguous()
        return group.all_reduce(partial if free else partial.clone(memory_format=torch.contiguous_format))

    return tensor if group.size == 1 else _Region.apply(tensor, summed, lambda grad: grad)


def gather_sequence(tensor: Tensor, group: Group) -> Tensor:
    """Forward all-gather [b, s/t, h] -> [b, s, h]; backward reduce-scatter.

    Summing gradients is right if the result is used by a module split over the group, so that each
    rank has a summand of the gradient. If every rank computes the same with it, use
    gather_from_region(dim=1).
    """
    if group.size == 1:
        return tensor
    return _Region.apply(
        tensor, lambda part: group.all_gather(part, SEQUENCE), lambda grad: group.reduce_scatter(grad, SEQUENCE)
    )


def scatter_sequence_sum(tensor: Tensor, group: Group) -> Tensor:
    """Forward reduce-scatter, summands [b, s, h] -> sum [b, s/t, h]; backward all-gather."""
    return _scatter_sum(tensor, group, SEQUENCE)


def scatter_samples_sum(tensor: Tensor, group: Group) -> Tensor:
    """Forward reduce-scatter, summands [b, s, h] -> sum [b/t, s, h]; backward all-gather."""
    return _scatter_sum(tensor, group, SAMPLES)


def _scatter_sum(tensor: Tensor, group: Group, dim: int) -> Tensor:
    if group.size == 1:
        return tensor
    return _Region.apply(
        tensor, lambda partial: group.reduce_scatter(partial, dim), lambda grad: group.all_gather(grad, dim)
    )


def scatter_to_region(tensor: Tensor, group: Group, *, dim: int = -1) -> Tensor:
    """Forward this rank's block of `dim`, [.., n] -> [.., n/t]; backward all-gather. The argument
    must be equal on every rank."""
    if group.size == 1:
        return tensor
    return _Region.apply(tensor, lambda whole: _block(whole, group, dim), lambda grad: group.all_gather(grad, dim))


def gather_from_region(tensor: Tensor, group: Group, *, dim: int = -1) -> Tensor:
    """Forward all-gather along `dim`, [.., n/t] -> [.., n]; backward this rank's block.

    Blocks are in rank order.
    """
    if group.size == 1:
        return tensor
    return _Region.apply(tensor, lambda part: group.all_gather(part, dim), lambda grad: _block(grad, group, dim))


def _block(tensor: Tensor, group: Group, dim: int) -> Tensor:
    own = local_range(tensor.shape[dim], parts=group.size, index=group.rank)
    return tensor.narrow(dim, own.start, len(own)).clone(memory_format=torch.contiguous_format)


class _Region(torch.autograd.Function):
    """`send` in forward and its conjugate in backward; if `send` returns its argument, it has
    overwritten it."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, send: Callable[[Tensor], Tensor], send_back: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.send_back = send_back
        result = send(tensor)
        if result is tensor:
            ctx.mark_dirty(tensor)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.send_back(grad), None, None
