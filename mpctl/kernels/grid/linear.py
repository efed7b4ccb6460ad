"""Linear layers, word table and output head over a grid, by the product of their mode.

The product is SUMMA's (summa.py) or the cube's (cube.py); both take this rank's part of X and of W
and give its part of Y. A bias [o] is cut as the outputs are, and its gradient is a sum over the
rank's own samples only (parameters.mark_partial).

The word table is looked up where its rows are: every rank is given the tokens of the whole micro
batch, looks up those of its own words, takes zeros for the others, and one reduce-scatter over the
ranks that hold the other words sums the vectors and leaves each rank its own samples. The same
table gives the logits, which stay cut over the vocabulary; rows that only pad the table make none.

By hand, 2d on 4 ranks, 8 words, 4 samples: rank (0, 1) looks up words 0..4 in the right half of
their vectors for all 4 samples and keeps the sums of samples 0 and 1.

Letters: b batch, s sequence, i in, o out, h hidden, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpctl.kernels.grid.place import GridPlace
from mpctl.kernels.parameters import ZEROS, Init, mark_partial, shard_parameter
from mpctl.kernels.regions import scatter_samples_sum
from mpctl.shard import Shard

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
        """Shape of this rank's part, for `print(module)`."""
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
        """Shape of this rank's part, for `print(module)`."""
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
