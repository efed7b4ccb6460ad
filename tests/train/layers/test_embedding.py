"""Embedding, head and loss together: split, padded, with ranks that have no words."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpctl.train.layers.cross_entropy import vocab_parallel_cross_entropy
from mpctl.train.layers.embedding import OutputHead, VocabParallelEmbedding
from mpctl.train.transport.group import Group
from mpctl.train.transport.timing import Collective
from tests.threads import run_ranks
from tests.train.layers.oracle import close, fill, gradients, grouped, logged, numbers, whole

B, S, H, V = 2, 8, 8, 13
# t=4 on 32 rows: ranks of 8 rows hold 8, 5, 0, 0 words
PADDED = 32


def _tokens(seed: int) -> Tensor:
    return torch.randint(0, V, (B, S), generator=torch.Generator().manual_seed(seed))


class _Model(nn.Module):
    def __init__(self, group: Group, tied: bool, padded: int, split: bool = False) -> None:
        super().__init__()
        sizes = {"group": group, "padded_vocab": padded, "dtype": torch.float64}
        sizes["sequence_parallel"] = split
        self.words = VocabParallelEmbedding(V, H, **sizes)
        self.head = None if tied else OutputHead(V, H, **sizes)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden, table = self.words(tokens), self.words
        logits = table.logits(hidden) if self.head is None else self.head(hidden)
        return vocab_parallel_cross_entropy(
            logits, targets, group=table.group, first=table.vocab_range.start, words=len(table.vocab_range)
        )


def _models(rank: int, size: int) -> dict:
    """Losses, gradients and messages, by whether the sequence is split and the head tied."""
    results = {}
    for split in (False, True):
        for tied in (True, False):
            log: list[Collective] = []
            model = _Model(grouped(rank, size, log), tied, PADDED, split)
            fill(model)
            losses = model(_tokens(1), _tokens(2))
            losses.backward(numbers(B, S, seed=4))
            results[split, tied] = [losses.detach(), gradients(model), logged(log)]
    return results


@pytest.mark.parametrize("size", [1, 2, 4])
def test_loss_gradients_and_messages_of_the_padded_split_vocabulary(size: int) -> None:
    """Under sequence parallelism vectors are reduce-scattered; the head gathers them, and once more
    for dW in backward."""
    ranks, row, vectors = run_ranks(_models, size), B * S * 8, B * S * H * 8
    for split, tied in ranks[0]:
        # fill() numbers parameters by sorted name: head.weight, words.weight
        words = (numbers(PADDED, H, seed=3 if tied else 4) * 0.3).requires_grad_()
        head = words if tied else (numbers(PADDED, H, seed=3) * 0.3).requires_grad_()
        logits = words[_tokens(1)] @ head[:V].T
        losses = F.cross_entropy(logits.flatten(0, 1), _tokens(2).flatten(), reduction="none")
        losses.backward(numbers(B, S, seed=4).flatten())
        parts = [rank[split, tied] for rank in ranks]
        for loss, _, log in parts:
            close(loss, losses.detach().view(B, S))
            if size > 1:
                large = [entry[0] for entry in log if entry[2] == vectors]
                assert large == (
                    ["reduce_scatter", *["all_gather"] * 2, "reduce_scatter", "all_gather"]
                    if split
                    else ["all_reduce"] * 2
                )
                assert [entry[0] for entry in log if entry[2] == row] == ["all_reduce"] * 3
                assert len(log) == len(large) + 3
        table = whole([part[1]["words.weight"] for part in parts])
        close(table, words.grad)
        if not tied:
            table = whole([part[1]["head.weight"] for part in parts])
            close(table, head.grad)
        assert not table[V:].any()


def test_padding_does_not_move_the_loss() -> None:
    losses = []
    for padded in (V, 16, 128):
        model = _Model(Group(), True, padded)
        with torch.no_grad():
            model.words.weight.fill_(50.0)
            model.words.weight[:V] = numbers(V, H)
        losses.append(model(_tokens(1), _tokens(2)))
    assert torch.equal(losses[0], losses[1])
    assert torch.equal(losses[0], losses[2])


def test_vocab_ranges_by_hand_and_bad_vocabularies() -> None:
    tables = [VocabParallelEmbedding(V, H, group=Group(r, 4), padded_vocab=PADDED) for r in range(4)]
    assert [t.vocab_range for t in tables] == [range(0, 8), range(8, 13), range(13, 13), range(13, 13)]
    assert repr(tables[1]) == "VocabParallelEmbedding(words 8..13 of 13, 8 of 32 rows, 8, t=4)"
    with pytest.raises(ValueError, match="13 is not divisible by 4"):
        VocabParallelEmbedding(V, H, group=Group(0, 4))
    with pytest.raises(ValueError, match="padded_vocab 12 is below the vocabulary of 13"):
        OutputHead(V, H, group=Group(), padded_vocab=12)
