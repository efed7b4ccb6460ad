"""What makes the modules of 2d, 2.5d and 3d: `TensorParallel` for a grid of ranks.

All three modes share the modules; they differ in the product of a linear layer and of the word
table (`_products`). What each rank holds of parameters and activations is mpctl/tensor_grid.py's.

Letters: b batch, s sequence, h hidden, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

from mpctl.layers.cross_entropy import vocab_parallel_cross_entropy
from mpctl.layers.embedding import ReplicatedTable
from mpctl.layers.grid.layers import (
    GridEmbedding,
    GridHead,
    GridLinear,
    GridPlace,
    Product,
    SplitLayerNorm,
    SplitNorm,
    SplitRMSNorm,
)
from mpctl.layers.grid.products import CubeGroups, Square, cube_linear, summa_linear, summa_logits
from mpctl.layers.norm import Norm
from mpctl.layers.parameters import ZEROS, Init, mark_partial, shard_parameter
from mpctl.layers.shard_context import ShardContext, TensorParallel, TensorParallel1D
from mpctl.tensor_grid import TensorGrid

Role = Literal["column", "row", "table"]
UP, DOWN = ("ffn", "hidden"), ("hidden", "ffn")  # any features: heads are cut alike


class GridTensorParallel:
    """The modules of one rank of a grid; context: with its `grid` and `groups`."""

    def __init__(self, context: ShardContext) -> None:
        self.context = context
        self.place = GridPlace(context.grid, context.tp.rank, context.groups)
        self._tensors: dict[str, Any] = {"dtype": context.dtype, "device": context.device}

    @property
    def grid(self) -> TensorGrid:
        """The grid of the tensor-parallel ranks."""
        return self.place.grid

    @property
    def feature_parts(self) -> int:
        """Into how many parts heads, MLP columns and vocabulary are cut."""
        return self.grid.feature_parts

    def samples(self, count: int, *, inside: bool = False) -> range:
        """The samples of a micro batch that this rank holds, outside or inside."""
        return self.place.samples(count, inside=inside)

    def columns(self, width: int) -> range:
        """Global numbers of this rank's `width` hidden states, outside."""
        return self.place.block(width * self.grid.hidden_parts, self.grid.hidden_axes)

    def local_heads(self, heads: int) -> range:
        """A contiguous block of heads."""
        return self.place.block(heads, self.grid.feature_axes)

    def column_linear(
        self, inputs: int, outputs: int, *, bias: bool, init: Init,
        parts: Sequence[int] | None = None,
    ) -> GridLinear:  # fmt: skip
        """From the hidden states outside to features inside; parts: sizes of fused outputs."""
        return self._linear(UP, (outputs, inputs), "column", bias=bias, init=init, parts=parts)

    def row_linear(self, inputs: int, outputs: int, *, bias: bool, init: Init) -> GridLinear:
        """From features inside to the hidden states outside."""
        return self._linear(DOWN, (outputs, inputs), "row", bias=bias, init=init, parts=None)

    def norm(self, kind: Norm, hidden: int, *, eps: float) -> SplitNorm:
        """A norm over hidden states that are cut outside."""
        split = SplitLayerNorm if kind == "layernorm" else SplitRMSNorm
        return split(
            self.place.shard((hidden,), ("hidden",)),
            self.place.group(*self.grid.hidden_axes),
            partial=self.grid.partial_kind(("hidden",)),
            bias=kind == "layernorm",
            eps=eps,
            **self._tensors,
        )

    def replicated_table(self, rows: int, hidden: int, *, init: Init) -> ReplicatedTable:
        """Each rank's columns of a lookup table."""
        dims = ("positions", "hidden")
        shard = self.place.shard((rows, hidden), dims)
        table = ReplicatedTable(rows, hidden, init=init, shard=shard, **self._tensors)
        mark_partial(table, self.grid.partial_kind(dims))
        return table

    def word_embedding(
        self, vocab: int, hidden: int, *, padded_vocab: int, init: Init
    ) -> GridEmbedding:
        """The table of words, cut over the vocabulary and over hidden states."""
        return GridEmbedding(
            vocab, hidden, self.place, self._product("table"), padded_vocab=padded_vocab,
            init=init, **self._tensors,
        )  # fmt: skip

    def output_head(self, vocab: int, hidden: int, *, padded_vocab: int, init: Init) -> GridHead:
        """A head of its own, cut as the table of words is."""
        return GridHead(
            vocab, hidden, self.place, self._product("table"), padded_vocab=padded_vocab,
            init=init, **self._tensors,
        )  # fmt: skip

    def word_bias(self, padded_vocab: int) -> nn.Parameter:
        """The block of this rank's logits, zeros at first."""
        dims = ("vocab",)
        shard = self.place.shard((padded_vocab,), dims)
        bias = shard_parameter(shard, init=ZEROS, **self._tensors)
        mark_partial(bias, self.grid.partial_kind(dims))
        return bias

    def tied_logits(self, hidden: Tensor, embedding: GridEmbedding) -> Tensor:
        """hidden [b, s, h] -> logits [b, s, v_local] by the table of words."""
        return embedding.logits(hidden)

    def cross_entropy(self, logits: Tensor, targets: Tensor, *, padded_vocab: int) -> Tensor:
        """Losses [b, s] of this rank's samples inside; logits stay cut (cross_entropy.py)."""
        axes = self.grid.feature_axes
        first = self.place.block(padded_vocab, axes).start
        own = self.context.own_samples(targets, inside=True)
        return vocab_parallel_cross_entropy(
            logits, own, group=self.place.group(*axes), first=first, overwrite=True,
            backend=self.context.backend,
        )  # fmt: skip

    def _linear(
        self, dims: tuple[str, str], shape: tuple[int, int], role: Role, *, bias: bool,
        init: Init, parts: Sequence[int] | None,
    ) -> GridLinear:  # fmt: skip
        return GridLinear(
            self.place.shard(shape, dims, parts),
            self.place.shard(shape[:1], dims[:1], parts) if bias else None,
            self._product(role),
            init=init,
            partial=self.grid.partial_kind(dims[:1]),
            weight_partial=self.grid.partial_kind(dims),
            **self._tensors,
        )

    def _product(self, role: Role) -> Product:
        """The product of this mode, for a layer of this role."""
        place = self.place
        if self.grid.mode == "3d":
            source, target = ("output", "input") if role == "row" else ("input", "output")
            groups = CubeGroups(
                place.group(source), place.group("weight"), place.group(target),
                weight_dim=0 if role == "table" else 1,
            )  # fmt: skip
            return partial(cube_linear, groups=groups)
        square = Square(place.group("col"), place.group("row"))
        return partial(summa_logits if role == "table" else summa_linear, square=square)


_MODES: dict[str, Callable[[ShardContext], TensorParallel]] = {
    "1d": TensorParallel1D,
    "2d": GridTensorParallel,
    "2.5d": GridTensorParallel,
    "3d": GridTensorParallel,
}


def tensor_parallel_of(mode: str) -> Callable[[ShardContext], TensorParallel]:
    """What makes a mode's modules; mode: `parallel.tensor_mode`."""
    return _MODES[mode]
