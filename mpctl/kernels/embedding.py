"""Word table and output head split by ranges of the vocabulary.

Megatron-LM (arXiv 1909.08053, section 3): a rank looks up the tokens of its own range, others give
zero vectors, and g sums them: one all-reduce of b*s*h. The head is a column-parallel product whose
logits stay split; the loss reads them there (cross_entropy.py). Rows that only pad the table to a
divisible size never give a logit, so the loss does not depend on t.

With sequence parallelism (arXiv 2205.05198, section 4.2.2) the vectors are reduce-scattered to
[b, s/t, h] (backward 1 all-gather), and the head gathers the positions for its product: forward 1
all-gather, backward 1 all-gather and 1 reduce-scatter, each of b*s*h.

Vocabulary 5 padded to 8, t=4: ranks hold rows 0-1, 2-3, 4-5, 6-7, of which 2, 2, 1, 0 are words.

Letters: b batch, s sequence, h hidden, v vocabulary, t ranks of the group.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpctl.kernels.linear import WEIGHTS
from mpctl.kernels.parameters import Init, Shard, shard_parameter
from mpctl.kernels.product import column_product
from mpctl.kernels.regions import reduce_from_region, scatter_sequence_sum
from mpctl.sharding import local_range
from mpctl.transport.group import Group


class _VocabTable(nn.Module):
    """weight [padded/t, h]; vocab_range: the words among this rank's rows, by global id.

    sequence_parallel: the hidden side is this rank's [b, s/t, h].
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
            Shard((padded, hidden), 0, (own,)), init=init, dtype=dtype, device=device
        )

    def extra_repr(self) -> str:
        words = f"words {self.vocab_range.start}..{self.vocab_range.stop} of {self.vocab}"
        rows = f"{self.weight.shape[0]} of {self.padded_vocab} rows"
        return f"{words}, {rows}, {self.hidden}, t={self.group.size}"


class VocabParallelEmbedding(_VocabTable):
    """tokens [b, s] -> [b, s, h], equal on every rank, or this rank's [b, s/t, h] of it.

    Raises ValueError on a bad split.
    """

    def forward(self, tokens: Tensor) -> Tensor:
        if self.group.size == 1:
            return F.embedding(tokens, self.weight)
        local = tokens - self.vocab_range.start
        outside = (local < 0) | (local >= len(self.vocab_range))
        # [b, s] -> [b, s, h], partial -> summed
        vectors = F.embedding(local.masked_fill(outside, 0), self.weight)
        vectors = vectors.masked_fill_(outside[..., None], 0.0)
        if self.sequence_parallel:
            # [b, s, h] partial -> [b, s/t, h] summed
            return scatter_sequence_sum(vectors, self.group)
        return reduce_from_region(vectors, self.group, owned=True)


class OutputHead(_VocabTable):
    """An untied head: hidden [b, s, h] or [b, s/t, h] -> logits [b, s, v_local] of own words."""

    def forward(self, hidden: Tensor) -> Tensor:
        return _logits(hidden, self)


def tied_logits(hidden: Tensor, embedding: VocabParallelEmbedding) -> Tensor:
    """hidden as the table gives it -> logits [b, s, v_local] by its words; v_local may be 0."""
    return _logits(hidden, embedding)


def _logits(hidden: Tensor, table: _VocabTable) -> Tensor:
    words = len(table.vocab_range)
    weight = table.weight if words == len(table.weight) else table.weight[:words]
    # [b, s, h] or [b, s/t, h] -> [b, s, v_local]
    return column_product(
        hidden, weight, group=table.group, sequence_parallel=table.sequence_parallel
    )
