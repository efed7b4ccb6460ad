"""The modules of 2d, 2.5d and 3d tensor parallelism, of which each rank of a grid holds one block.

All three modes share the modules; they differ in the product of a linear layer and of the word
table (`_product`, products.py), which takes this rank's part of X and of W and gives its part of Y.
mpctl/core/tensor_grid.py defines which part of parameters and activations a rank holds; if several
outputs are fused in one matrix (q, k and v), each is split separately, so that a rank holds
complete heads of all three.

Lookups happen on the ranks that hold the rows: every rank receives the tokens of the full micro
batch, looks up those among its words and takes zeros for the others. One reduce-scatter over the
ranks that hold the other words sums the vectors and leaves each rank its samples. The same table
gives the logits, which stay split over the vocabulary; the loss skips those of padding rows.

Letters: b batch, s sequence, i in, o out, h hidden, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

from torch import Tensor, nn

from mpctl.train.layers.embedding import look_up
from mpctl.train.layers.grid.products import CubeGroups, Square, cube_linear, summa_linear, summa_logits
from mpctl.train.layers.mappings import scatter_samples_sum
from mpctl.train.layers.parameters import ZEROS, Init
from mpctl.train.layers.shard_context import ShardContext, TensorParallel, TensorParallel1D

Role = Literal["column", "row", "table"]
Product = Callable[[Tensor, Tensor], Tensor]
"""x [b, s, i], weight in the mode's layout -> [b, s, o], each this rank's part."""


class GridLinear(nn.Module):
    """x [b, s, i] -> [b, s, o], each this rank's part, as are weight [o, i] and bias [o]. The bias
    is split like the outputs, so that its gradient is a sum over only this rank's samples."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, product: Product) -> None:
        super().__init__()
        self.weight, self.bias, self.product = weight, bias, product

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        output = self.product(x, self.weight)
        return output if self.bias is None else output.add_(self.bias)

    def extra_repr(self) -> str:
        outputs, inputs = self.weight.shape
        return f"{inputs} -> {outputs} (part), bias={self.bias is not None}"


class GridTable(nn.Module):
    """A table with one row a word, `weight` this rank's part of [padded_vocab, h].

    words: global ids of the words that this rank's logits cover, without padding. Raises ValueError
    if padded_vocab is below the vocabulary or not divisible over the grid.
    """

    def __init__(
        self, vocab: int, hidden: int, context: ShardContext, product: Product, *, padded_vocab: int, init: Init
    ) -> None:
        super().__init__()
        if padded_vocab < vocab:
            raise ValueError(f"padded_vocab {padded_vocab} is below the vocabulary of {vocab}")
        dims = ("vocab", "hidden")
        self.context, self.product, self.vocab = context, product, vocab
        self.rows_axes = context.grid.weight_axes(dims)[0]
        self.rows = context.block(padded_vocab, self.rows_axes)
        self.words = context.own_words(vocab, padded_vocab=padded_vocab)
        self.weight = context.parameter((padded_vocab, hidden), dims, init)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [b, s, h], this rank's part -> logits [b, s, v_local] of `words`, then of
        padding."""
        return self.product(hidden, self.weight)

    def extra_repr(self) -> str:
        rows, hidden = self.weight.shape
        return f"{rows} rows (part) of {self.vocab} words, {hidden} (part)"


class GridEmbedding(GridTable):
    """The word table as embedding: tokens [b, s] of the full micro batch -> this rank's part of the
    vectors [b, s, h]."""

    def forward(self, tokens: Tensor) -> Tensor:
        """See the class."""
        context, sample_axes = self.context, self.context.grid.sample_axes()
        # in 2.5d the ranks of one depth share its samples
        shared = context.block(len(tokens), tuple(axis for axis in sample_axes if axis not in self.rows_axes))
        local = tokens[shared.start : shared.stop] - self.rows.start
        outside = (local < 0) | (local >= len(self.rows))
        # [b, s] -> [b, s, h], partial -> summed, this rank's samples
        vectors = look_up(local.masked_fill(outside, 0), self.weight)
        vectors = vectors.masked_fill_(outside[..., None], 0.0)
        return scatter_samples_sum(vectors, context.group(*self.rows_axes))


class GridHead(GridTable):
    """An untied output head: hidden [b, s, h] -> logits [b, s, v_local]."""

    def forward(self, hidden: Tensor) -> Tensor:
        """See the class."""
        return self.logits(hidden)


class GridTensorParallel:
    """Makes the modules of one rank of a grid; context: has its `grid` and `groups`."""

    def __init__(self, context: ShardContext) -> None:
        self.context = context

    def column_linear(
        self, inputs: int, outputs: int, *, bias: bool, init: Init, parts: Sequence[int] | None = None
    ) -> GridLinear:
        """From the hidden states outside to features inside; parts: sizes of fused outputs."""
        weight = self.context.parameter((outputs, inputs), ("ffn", "hidden"), init, parts)
        own = self.context.parameter((outputs,), ("ffn",), ZEROS, parts) if bias else None
        return GridLinear(weight, own, self._product("column"))

    def row_linear(self, inputs: int, outputs: int, *, bias: bool, init: Init) -> GridLinear:
        """From features inside to the hidden states outside."""
        weight = self.context.parameter((outputs, inputs), ("hidden", "ffn"), init)
        own = self.context.parameter((outputs,), ("hidden",), ZEROS) if bias else None
        return GridLinear(weight, own, self._product("row"))

    def word_embedding(self, vocab: int, hidden: int, *, padded_vocab: int, init: Init) -> GridEmbedding:
        """The word table, split over the vocabulary and the hidden dimension."""
        return GridEmbedding(vocab, hidden, self.context, self._product("table"), padded_vocab=padded_vocab, init=init)

    def output_head(self, vocab: int, hidden: int, *, padded_vocab: int, init: Init) -> GridHead:
        """An untied head, split like the word table."""
        return GridHead(vocab, hidden, self.context, self._product("table"), padded_vocab=padded_vocab, init=init)

    def _product(self, role: Role) -> Product:
        group = self.context.group
        if self.context.grid.mode == "3d":
            source, target = ("output", "input") if role == "row" else ("input", "output")
            groups = CubeGroups(group(source), group("weight"), group(target), weight_dim=0 if role == "table" else 1)
            return partial(cube_linear, groups=groups)
        square = Square(group("col"), group("row"))
        return partial(summa_logits if role == "table" else summa_linear, square=square)


def tensor_parallel_of(mode: str) -> Callable[[ShardContext], TensorParallel]:
    """The factory of a mode's modules; mode: `parallel.tensor_mode`."""
    return TensorParallel1D if mode == "1d" else GridTensorParallel
