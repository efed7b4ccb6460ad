"""The conjugate operators at the border of a tensor-parallel region, each with its two laws.

Megatron-LM (arXiv 1909.08053, section 3, figure 3) names the first two f and g. Forward of one is
backward of the other:

    copy_to_region      f   forward identity         backward all-reduce
    reduce_from_region  g   forward all-reduce       backward identity
    scatter_to_region       forward keep own split   backward all-gather   (last dim)
    gather_from_region      forward all-gather       backward keep own split

By hand, t=2 and y = g(x * r) on rank r in (1, 2): y = 3x on both ranks; dx = f's sum = 1 + 2 = 3.
A group of one rank makes each of them the identity, outside autograd.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mpctl.kernels.group import Group
from mpctl.sharding import local_range


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


def scatter_to_region(tensor: Tensor, group: Group) -> Tensor:
    """Forward [.., n] -> [.., n/t], this rank's block; backward all-gather."""
    return tensor if group.size == 1 else _Scatter.apply(tensor, group)


def gather_from_region(tensor: Tensor, group: Group) -> Tensor:
    """Forward [.., n/t] -> [.., n], blocks in rank order; backward keeps this rank's block."""
    return tensor if group.size == 1 else _Gather.apply(tensor, group)


def _summed(tensor: Tensor, group: Group, owned: bool) -> Tensor:
    free = owned and tensor.is_contiguous()
    return group.all_reduce(tensor if free else tensor.clone(memory_format=torch.contiguous_format))


def _own_block(tensor: Tensor, group: Group) -> Tensor:
    own = local_range(tensor.shape[-1], parts=group.size, index=group.rank)
    return tensor[..., own.start : own.stop].contiguous()


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


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _own_block(tensor, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.group.all_gather(grad, dim=-1), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return group.all_gather(tensor, dim=-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _own_block(grad, ctx.group), None
