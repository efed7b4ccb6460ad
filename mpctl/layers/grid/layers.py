"""The layers of 2d, 2.5d and 3d tensor parallelism, of which each rank of a grid holds one block.

The grid says which axes cut what (mpctl/tensor_grid.py); with the coordinates of a rank that is a
block of each dimension (`GridPlace`). Where several outputs are fused in one matrix (q, k and v),
each is cut by itself, so that a rank holds whole heads of all three.

A linear layer's product is SUMMA's or the cube's (products.py); both take this rank's part of X and
of W and give its part of Y. A bias [o] is cut as the outputs are, and its gradient is a sum over
the rank's own samples only (`parameters.mark_partial`).

The word table is looked up where its rows are: every rank is given the tokens of the whole micro
batch, looks up those of its own words, takes zeros for the others, and one reduce-scatter over the
ranks that hold the other words sums the vectors and leaves each rank its own samples. The same
table gives the logits, which stay cut over the vocabulary; rows that only pad the table make none.

LayerNorm (arXiv 1607.06450) needs the mean and the variance of a whole row. Each of the q ranks
computes the mean m_j and the sum of squares M_j about it of its n = h/q numbers; one all-gather of
these two a row gives, without a difference of large numbers (Chan, Golub and LeVeque, 1983),

    mean = sum_j m_j / q        h var = sum_j M_j + n sum_j (m_j - mean)^2

RMSNorm (arXiv 1910.07467) needs the sum of squares alone: one all-reduce of a number a row.
Backward of y = x^ w + b with x^ = (x - mean) r, r = 1/sqrt(var + eps), g = dy w, is

    dx = r (g - sum(g)/h - x^ sum(g x^)/h)

where the two sums (RMSNorm: the second alone) are one all-reduce. Statistics are computed in
float32 at least. A rank holds h/q of weight and bias; their gradients are sums over its own samples
only (parameters.mark_partial). Kept for backward: x and one or two numbers a row.

Letters: b batch, s sequence, i in, o out, h hidden, v vocabulary, q ranks of a norm's group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mpctl.layers.mappings import scatter_samples_sum
from mpctl.layers.parameters import ONES, ZEROS, Init, mark_partial, shard_parameter
from mpctl.shard import Shard
from mpctl.tensor_grid import Axes, TensorGrid
from mpctl.transport.group import Group

Product = Callable[[Tensor, Tensor], Tensor]
"""x [b, s, i], weight as the mode has it -> [b, s, o], each this rank's part."""


class GridLinear(nn.Module):
    """x [b, s, i] -> [b, s, o], each this rank's part.

    weight, bias: its shards of [out, in] and of [out] or None. partial: the group over which the
    bias has a partial gradient; weight_partial: likewise of the weight; empty for none.
    """

    def __init__(
        self,
        weight: Shard,
        bias: Shard | None,
        product: Product,
        *,
        init: Init,
        partial: str,
        weight_partial: str,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.product = product
        self.weight = shard_parameter(weight, init=init, dtype=dtype, device=device)
        self.bias: nn.Parameter | None = None
        mark_partial(self.weight, weight_partial)
        if bias is not None:
            self.bias = shard_parameter(bias, init=ZEROS, dtype=dtype, device=device)
            mark_partial(self.bias, partial)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        output = self.product(x, self.weight)
        return output if self.bias is None else output.add_(self.bias)

    def extra_repr(self) -> str:
        outputs, inputs = self.weight.shape
        return f"{inputs} -> {outputs} (part), bias={self.bias is not None}"


class GridTable(nn.Module):
    """A table with one row a word, `weight` this rank's part of [padded_vocab, h].

    words: global ids of the words among all rows that this rank's logits are of, without padding.
    Raises ValueError where padded_vocab is below the vocabulary or the grid does not divide it.
    """

    def __init__(
        self,
        vocab: int,
        hidden: int,
        place: GridPlace,
        product: Product,
        *,
        padded_vocab: int,
        init: Init,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if padded_vocab < vocab:
            raise ValueError(f"padded_vocab {padded_vocab} is below the vocabulary of {vocab}")
        dims = ("vocab", "hidden")
        self.place, self.product, self.vocab = place, product, vocab
        self.rows_axes = place.grid.weight_axes(dims)[0]
        self.rows = place.block(padded_vocab, self.rows_axes)
        own = place.block(padded_vocab, place.grid.feature_axes)
        self.words = range(min(own.start, vocab), min(own.stop, vocab))
        shard = place.shard((padded_vocab, hidden), dims)
        self.weight = shard_parameter(shard, init=init, dtype=dtype, device=device)
        mark_partial(self.weight, place.grid.partial_kind(dims))

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [b, s, h], this rank's part -> logits [b, s, v_local] of `words`."""
        logits = self.product(hidden, self.weight)
        words = len(self.words)
        return logits if logits.shape[-1] == words else logits[..., :words]

    def extra_repr(self) -> str:
        rows, hidden = self.weight.shape
        return f"{rows} rows (part) of {self.vocab} words, {hidden} (part)"


class GridEmbedding(GridTable):
    """The word table as embedding: tokens [b, s] of the whole micro batch -> this rank's part of
    the vectors [b, s, h]."""

    def forward(self, tokens: Tensor) -> Tensor:
        """See the class."""
        place, sample_axes = self.place, self.place.grid.sample_axes()
        # in 2.5d the ranks of one depth share its samples
        shared = place.block(len(tokens), tuple(a for a in sample_axes if a not in self.rows_axes))
        local = tokens[shared.start : shared.stop] - self.rows.start
        outside = (local < 0) | (local >= len(self.rows))
        # [b, s] -> [b, s, h], partial -> summed, this rank's samples
        vectors = F.embedding(local.masked_fill(outside, 0), self.weight)
        vectors = vectors.masked_fill_(outside[..., None], 0.0)
        return scatter_samples_sum(vectors, place.group(*self.rows_axes))


class GridHead(GridTable):
    """An output head with a table of its own: hidden [b, s, h] -> logits [b, s, v_local]."""

    def forward(self, hidden: Tensor) -> Tensor:
        """See the class."""
        return self.logits(hidden)


class SplitNorm(nn.Module):
    """Base of the norms over split hidden states, [b, s, h/q] -> [b, s, h/q].

    shard: this rank's part of a vector [h]. group: the ranks that hold the other parts. partial:
    the group over which the gradients of its parameters are partial sums, empty for none.
    """

    def __init__(
        self,
        shard: Shard,
        group: Group,
        *,
        partial: str,
        bias: bool,
        eps: float,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        (self.hidden,), self.group, self.eps = shard.shape, group, eps
        self.weight = shard_parameter(shard, init=ONES, dtype=dtype, device=device)
        if bias:
            self.bias = shard_parameter(shard, init=ZEROS, dtype=dtype, device=device)
        mark_partial(self, partial)

    def extra_repr(self) -> str:
        return f"{len(self.weight)} of {self.hidden}, eps={self.eps}"


class SplitLayerNorm(SplitNorm):
    """LayerNorm with `weight` and `bias`, both [h/q]."""

    def forward(self, x: Tensor) -> Tensor:
        """x [b, s, h/q] normalised over all of h; same shape and dtype."""
        result: Tensor = _LayerNorm.apply(x, self.weight, self.bias, self.eps, self.group)
        return result


class SplitRMSNorm(SplitNorm):
    """RMSNorm with `weight` [h/q]: no mean is subtracted, and there is no bias."""

    def forward(self, x: Tensor) -> Tensor:
        """x [b, s, h/q] divided by its root mean square over all of h; same shape and dtype."""
        result: Tensor = _RMSNorm.apply(x, self.weight, self.eps, self.group)
        return result


def _wide(x: Tensor) -> Tensor:
    """[b, s, h/q] -> [b*s, h/q] in float32 at least."""
    return x.flatten(0, -2).to(torch.promote_types(x.dtype, torch.float32))


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, group: Group
    ) -> Tensor:
        rows = _wide(x)
        n = rows.shape[1]
        # 2 of [b*s] -> [q, 2, b*s]
        squares, own = torch.var_mean(rows, dim=1, correction=0)
        parts = group.all_gather(torch.stack((own, squares.mul_(n)))[None], 0)
        mean = parts[:, 0].mean(0)
        spread = parts[:, 1].sum(0) + n * (parts[:, 0] - mean).square().sum(0)
        scale = spread.div_(n * group.size).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.group = group
        normed = rows.sub(mean[:, None]).mul_(scale[:, None])
        return torch.addcmul(bias, normed, weight).to(x.dtype).view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, scale = ctx.saved_tensors
        normed = _wide(x).sub(mean[:, None]).mul_(scale[:, None])
        rows = _wide(grad)
        dw, db = torch.linalg.vecdot(rows, normed, dim=0), rows.sum(0)
        dw, db = dw.to(weight.dtype), db.to(weight.dtype)
        if not ctx.needs_input_grad[0]:
            return None, dw, db, None, None
        inner = rows * weight
        sums = torch.stack((inner.sum(1), torch.linalg.vecdot(inner, normed, dim=1)))
        first, second = ctx.group.all_reduce(sums).div_(x.shape[-1] * ctx.group.size)
        inner.sub_(first[:, None]).sub_(normed.mul_(second[:, None])).mul_(scale[:, None])
        return inner.to(x.dtype).view(x.shape), dw, db, None, None


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, group: Group) -> Tensor:
        rows = _wide(x)
        squares = group.all_reduce(torch.linalg.vecdot(rows, rows, dim=1))
        scale = squares.div_(rows.shape[1] * group.size).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        ctx.group = group
        return (rows * scale[:, None]).mul_(weight).to(x.dtype).view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        normed = _wide(x) * scale[:, None]
        rows = _wide(grad)
        dw = torch.linalg.vecdot(rows, normed, dim=0).to(weight.dtype)
        if not ctx.needs_input_grad[0]:
            return None, dw, None, None
        inner = rows * weight
        sums = ctx.group.all_reduce(torch.linalg.vecdot(inner, normed, dim=1))
        mean = sums.div_(x.shape[-1] * ctx.group.size)
        inner.sub_(normed.mul_(mean[:, None])).mul_(scale[:, None])
        return inner.to(x.dtype).view(x.shape), dw, None, None


@dataclass(frozen=True)
class GridPlace:
    """One rank of a grid. rank: its number among the tensor-parallel ranks; groups: those that it
    is in, by their names in `TensorGrid.groups`."""

    grid: TensorGrid
    rank: int
    groups: Mapping[str, Group]

    @cached_property
    def coords(self) -> dict[str, int]:
        """This rank's coordinate on each axis of the grid."""
        return self.grid.coords(self.rank)

    def group(self, *axes: str) -> Group:
        """The group over these axes; of one rank where their sizes are 1."""
        kind = self.grid.kind_of(axes)
        return self.groups[kind] if kind else Group()

    def block(self, size: int, axes: Axes) -> range:
        """The block of `range(size)` that this rank keeps of a dimension that the axes cut. Raises
        ValueError where they do not divide it."""
        return self.grid.block(size, axes, self.coords)

    def samples(self, count: int, *, inside: bool = False) -> range:
        """Which samples of a micro batch of so many this rank holds, between the layers or inside.
        Raises ValueError where the grid does not divide them."""
        return self.block(count, self.grid.sample_axes(inside=inside))

    def shard(
        self, shape: tuple[int, ...], dims: tuple[str, ...], parts: Sequence[int] | None = None
    ) -> Shard:
        """This rank's part of a parameter with these named dimensions. parts: sizes of the fused
        parts along the first dimension, each of which is cut by itself. Raises ValueError where the
        grid does not divide a dimension."""
        cuts: dict[int, tuple[range, ...]] = {}
        for dim, axes in enumerate(self.grid.weight_axes(dims)):
            if self.grid.parts(axes) > 1:
                sizes = parts if parts is not None and dim == 0 else (shape[dim],)
                cuts[dim] = tuple(self._blocks(sizes, axes))
        return Shard(shape, cuts)

    def _blocks(self, sizes: Sequence[int], axes: Axes) -> list[range]:
        blocks, offset = [], 0
        for size in sizes:
            own = self.block(size, axes)
            blocks.append(range(own.start + offset, own.stop + offset))
            offset += size
        return blocks
