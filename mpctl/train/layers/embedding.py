"""Word table and output head, split by ranges of the vocabulary, and tables that all ranks hold.

As in Megatron-LM (arXiv 1909.08053, section 3), a rank looks up the tokens of its range of the
vocabulary and takes zero vectors for all others; one all-reduce of b*s*h elements sums the vectors
(operator g of mappings.py). The output head is a column-parallel product whose logits stay split
over the vocabulary, as the loss expects them (cross_entropy.py). Rows that only pad the table to a
divisible size are multiplied like the others, since 16-bit products whose rows are no multiple of
16 bytes take kernels of half the rate (plan/estimate/kernels.py). The loss skips their columns, so that
it does not depend on t, and their gradient is 0.

With sequence parallelism (arXiv 2205.05198, section 4.2.2) the vectors are reduce-scattered to
[b, s/t, h] (in backward 1 all-gather). The head gathers the positions for its product: 1 all-gather
forward, 1 all-gather and 1 reduce-scatter backward, each of b*s*h elements.

Example: a vocabulary of 5 is padded to 8 on t=4 ranks. They hold rows 0-1, 2-3, 4-5 and 6-7, of
which 2, 2, 1 and 0 are words.

The backward of a lookup adds the vectors' gradients to the rows of the table's gradient, where that
has a `GradientSink` (parameters.py): no gradient of the full table is made, neither here nor by the
head.

Tables of positions and segments are too small to split. Under sequence parallelism each rank looks
up its own positions only, so that their gradients are partial sums (`parameters.partial_kind`).

Letters: b batch, s sequence, h hidden, v vocabulary, t ranks of the group.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mpctl.core.shard import Shard
from mpctl.core.sharding import local_range
from mpctl.train.kernels.masks import Positions
from mpctl.train.layers.linear import WEIGHTS, Adapters, adapted, column_product
from mpctl.train.layers.mappings import reduce_from_region, scatter_sequence_sum
from mpctl.train.layers.parameters import GradientSink, Init, shard_parameter, sink_of
from mpctl.train.transport.group import Group


class _VocabTable(nn.Module):
    """This rank's rows of a table with one row a word: `weight` [padded_vocab/t, h].

    vocab_range: global ids of the words among these rows, without padding; may be empty.
    sequence_parallel: hidden states are split over the sequence, [b, s/t, h].

    Raises ValueError if padded_vocab is below the vocabulary or not divisible by the ranks.
    """

    def __init__(
        self,
        vocab: int,
        hidden: int,
        *,
        group: Group,
        padded_vocab: int | None = None,
        sequence_parallel: bool = False,
        init: Init = WEIGHTS,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        padded = vocab if padded_vocab is None else padded_vocab
        if padded < vocab:
            raise ValueError(f"padded_vocab {padded} is below the vocabulary of {vocab}")
        own = local_range(padded, parts=group.size, index=group.rank)
        self.group, self.vocab, self.padded_vocab, self.hidden = group, vocab, padded, hidden
        self.sequence_parallel = sequence_parallel
        self.vocab_range = range(min(own.start, vocab), min(own.stop, vocab))
        self.weight = shard_parameter(
            Shard((padded, hidden), {0: (own,)}), init=init, is_table=True, dtype=dtype, device=device
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [b, s, padded_vocab/t] of all rows of this table as output head: its own, or tied
        to the embedding. The columns behind those of `vocab_range` are padding. hidden: [b, s, h],
        or [b, s/t, h] with sequence_parallel."""
        # [b, s, h] or [b, s/t, h] -> [b, s, padded_vocab/t]
        return column_product(hidden, self.weight, group=self.group, sequence_parallel=self.sequence_parallel)

    def extra_repr(self) -> str:
        words = f"words {self.vocab_range.start}..{self.vocab_range.stop} of {self.vocab}"
        rows = f"{self.weight.shape[0]} of {self.padded_vocab} rows"
        return f"{words}, {rows}, {self.hidden}, t={self.group.size}"


def look_up(rows: Tensor, table: nn.Parameter) -> Tensor:
    """The rows [..] of a table [n, h] -> [.., h]. Backward adds to the table's gradient where a
    sink takes its rows."""
    sink = sink_of(table)
    if sink is None:
        return F.embedding(rows, table)
    vectors: Tensor = _Lookup.apply(table, rows, sink)
    return vectors


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, rows: Tensor, sink: GradientSink) -> Tensor:
        ctx.sink = sink
        ctx.save_for_backward(rows)
        return F.embedding(rows, table)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        (rows,) = ctx.saved_tensors
        ctx.sink.add_rows(rows.flatten(), grad.flatten(0, -2))
        return None, None, None


class VocabParallelEmbedding(_VocabTable):
    """The word table: token ids [b, s] -> vectors [b, s, h], equal on every rank of `group`.

    sequence_parallel: return this rank's positions, [b, s/t, h]. padded_vocab: rows of the table
    over all ranks (default: vocab). Raises ValueError if padded_vocab is below the vocabulary or
    not divisible by the number of ranks.
    """

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [b, s], global ids -> [b, s, h], or [b, s/t, h] with sequence_parallel."""
        if self.group.size == 1:
            return look_up(tokens, self.weight)
        local = tokens - self.vocab_range.start
        outside = (local < 0) | (local >= len(self.vocab_range))
        # [b, s] -> [b, s, h], partial -> summed
        vectors = look_up(local.masked_fill(outside, 0), self.weight)
        vectors = vectors.masked_fill_(outside[..., None], 0.0)
        if self.sequence_parallel:
            # [b, s, h] partial -> [b, s/t, h] summed
            return scatter_sequence_sum(vectors, self.group)
        return reduce_from_region(vectors, self.group, owned=True)


class OutputHead(_VocabTable):
    """An output head with a table of its own, not tied to the embedding.

    Returns logits of this rank's rows only; `vocab_parallel_cross_entropy` takes them split, and
    the number of words among them.
    """

    lora: Adapters | None

    def __init__(self, vocab: int, hidden: int, **how: Any) -> None:
        super().__init__(vocab, hidden, **how)
        self.lora = None

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [b, s, h], or [b, s/t, h] with sequence_parallel -> logits [b, s,
        padded_vocab/t]."""
        return adapted(self.lora, lambda _: self.logits(hidden), hidden, self.weight)


class ReplicatedTable(nn.Module):
    """A lookup table of n rows, `weight` [n, h]: positions, segments."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, rows: Positions) -> Tensor:
        """The rows of a range, [s, h], or those that an integer tensor [..] names, [.., h]."""
        weight: Tensor = self.weight
        if isinstance(rows, range):
            return weight[rows.start : rows.stop]
        # accelerators add gradients of an index by atomics, which contend on a table of two rows
        return weight[rows] if weight.device.type == "cpu" else F.embedding(rows, weight)
