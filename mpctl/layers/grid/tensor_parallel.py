"""The modules of 2d, 2.5d and 3d tensor parallelism, of which each rank of a grid holds one block.

All three modes share the modules; they differ in the product of a linear layer and of the word
table (`_product`, products.py), which takes this rank's part of X and of W and gives its part of Y.
Which part a rank holds of parameters and activations is mpctl/tensor_grid.py's law; where several
outputs are fused in one matrix (q, k and v), each is cut by itself, so that a rank holds whole
heads of all three.

The word table is looked up where its rows are: every rank is given the tokens of the whole micro
batch, looks up those of its own words, takes zeros for the others, and one reduce-scatter over the
ranks that hold the other words sums the vectors and leaves each rank its own samples. The same
table gives the logits, which stay cut over the vocabulary; rows that only pad the table make none.

Letters: b batch, s sequence, i in, o out, h hidden, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from mpctl.layers.grid.products import CubeGroups, Square, cube_linear, summa_linear, summa_logits
from mpctl.layers.mappings import scatter_samples_sum
from mpctl.layers.parameters import ZEROS, Init
from mpctl.layers.shard_context import ShardContext, TensorParallel, TensorParallel1D

Role = Literal["column", "row", "table"]
Product = Callable[[Tensor, Tensor], Tensor]
"""x [b, s, i], weight as the mode has it -> [b, s, o], each this rank's part."""


class GridLinear(nn.Module):
    """x [b, s, i] -> [b, s, o], each this rank's part, as are weight [o, i] and bias [o]. The bias
    is cut as the outputs are, so that its gradient is a sum over the rank's own samples only."""

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

    words: global ids of the words among all rows that this rank's logits are of, without padding.
    Raises ValueError where padded_vocab is below the vocabulary or the grid does not divide it.
    """

    def __init__(
        self, vocab: int, hidden: int, context: ShardContext, product: Product, *,
        padded_vocab: int, init: Init,
    ) -> None:  # fmt: skip
        super().__init__()
        if padded_vocab < vocab:
            raise ValueError(f"padded_vocab {padded_vocab} is below the vocabulary of {vocab}")
        dims = ("vocab", "hidden")
        self.context, self.product, self.vocab = context, product, vocab
        self.rows_axes = context.grid.weight_axes(dims)[0]
        self.rows = context.block(padded_vocab, self.rows_axes)
        own = context.block(padded_vocab, context.grid.feature_axes)
        self.words = range(min(own.start, vocab), min(own.stop, vocab))
        self.weight = context.parameter((padded_vocab, hidden), dims, init)

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
        context, sample_axes = self.context, self.context.grid.sample_axes()
        # in 2.5d the ranks of one depth share its samples
        shared = context.block(
            len(tokens), tuple(axis for axis in sample_axes if axis not in self.rows_axes)
        )
        local = tokens[shared.start : shared.stop] - self.rows.start
        outside = (local < 0) | (local >= len(self.rows))
        # [b, s] -> [b, s, h], partial -> summed, this rank's samples
        vectors = F.embedding(local.masked_fill(outside, 0), self.weight)
        vectors = vectors.masked_fill_(outside[..., None], 0.0)
        return scatter_samples_sum(vectors, context.group(*self.rows_axes))


class GridHead(GridTable):
    """An output head with a table of its own: hidden [b, s, h] -> logits [b, s, v_local]."""

    def forward(self, hidden: Tensor) -> Tensor:
        """See the class."""
        return self.logits(hidden)


class GridTensorParallel:
    """The modules of one rank of a grid; context: with its `grid` and `groups`."""

    def __init__(self, context: ShardContext) -> None:
        self.context = context

    def column_linear(
        self, inputs: int, outputs: int, *, bias: bool, init: Init,
        parts: Sequence[int] | None = None,
    ) -> GridLinear:  # fmt: skip
        """From the hidden states outside to features inside; parts: sizes of fused outputs."""
        weight = self.context.parameter((outputs, inputs), ("ffn", "hidden"), init, parts)
        own = self.context.parameter((outputs,), ("ffn",), ZEROS, parts) if bias else None
        return GridLinear(weight, own, self._product("column"))

    def row_linear(self, inputs: int, outputs: int, *, bias: bool, init: Init) -> GridLinear:
        """From features inside to the hidden states outside."""
        weight = self.context.parameter((outputs, inputs), ("hidden", "ffn"), init)
        own = self.context.parameter((outputs,), ("hidden",), ZEROS) if bias else None
        return GridLinear(weight, own, self._product("row"))

    def word_embedding(
        self, vocab: int, hidden: int, *, padded_vocab: int, init: Init
    ) -> GridEmbedding:
        """The table of words, cut over the vocabulary and over hidden states."""
        return GridEmbedding(
            vocab, hidden, self.context, self._product("table"), padded_vocab=padded_vocab,
            init=init,
        )  # fmt: skip

    def output_head(self, vocab: int, hidden: int, *, padded_vocab: int, init: Init) -> GridHead:
        """A head of its own, cut as the table of words is."""
        return GridHead(
            vocab, hidden, self.context, self._product("table"), padded_vocab=padded_vocab,
            init=init,
        )  # fmt: skip

    def _product(self, role: Role) -> Product:
        """The product of this mode, for a layer of this role."""
        group = self.context.group
        if self.context.grid.mode == "3d":
            source, target = ("output", "input") if role == "row" else ("input", "output")
            groups = CubeGroups(
                group(source), group("weight"), group(target),
                weight_dim=0 if role == "table" else 1,
            )  # fmt: skip
            return partial(cube_linear, groups=groups)
        square = Square(group("col"), group("row"))
        return partial(summa_logits if role == "table" else summa_linear, square=square)


def tensor_parallel_of(mode: str) -> Callable[[ShardContext], TensorParallel]:
    """What makes a mode's modules; mode: `parallel.tensor_mode`."""
    return TensorParallel1D if mode == "1d" else GridTensorParallel
