"""Head and loss chunk by chunk: losses and gradients are those of whole logits, whatever the cut."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mpctl.model.operators.loss import chunk_rows
from mpctl.train.layers.cross_entropy import IGNORED
from mpctl.train.layers.linear_cross_entropy import linear_cross_entropy
from mpctl.train.transport.group import Group
from tests.threads import run_ranks
from tests.train.layers.oracle import EXACT, close, grouped, numbers, saved_bytes

B, S, H, V, ROWS = 2, 6, 5, 13, 16  # the table has 3 rows of padding
CUTS = {"even": [0, 4, 8, 12, 16], "empty": [0, 9, 13, 13, 16]}
TARGETS = (torch.arange(B * S) * 5 % V).masked_fill(torch.arange(B * S) % 5 == 3, IGNORED).view(B, S)
WEIGHTS = torch.linspace(-1, 2, B * S, dtype=torch.float64).view(B, S)
CHUNKS = (1, 3, 5, 12, 40, None)


def _whole() -> tuple[Tensor, Tensor]:
    return numbers(B, S, H, seed=1) * 3, numbers(ROWS, H, seed=2)


def _expected() -> list[Tensor]:
    hidden, table = (one.requires_grad_() for one in _whole())
    losses = F.cross_entropy((hidden @ table[:V].T).flatten(0, 1), TARGETS.flatten(), reduction="none").view(B, S)
    (losses * WEIGHTS).sum().backward()
    assert hidden.grad is not None and table.grad is not None
    return [losses.detach(), hidden.grad, table.grad]


def _split(rank: int, size: int, sequence_parallel: bool) -> list[list[Tensor]]:
    results = []
    for cuts in CUTS.values():
        for chunks in CHUNKS:
            group, (hidden, table) = grouped(rank, size), _whole()
            first, last = cuts[rank], cuts[rank + 1]
            x = (hidden.chunk(size, 1)[rank] if sequence_parallel else hidden).clone().requires_grad_()
            own = table[first:last].clone().requires_grad_()
            losses = linear_cross_entropy(
                x,
                own,
                TARGETS,
                group=group,
                words=range(min(first, V), min(last, V)),
                chunks=chunks,
                sequence_parallel=sequence_parallel,
            )
            (losses * WEIGHTS).sum().backward()
            assert x.grad is not None and own.grad is not None
            results.append([losses.detach(), x.grad, own.grad])
    return results


@pytest.mark.parametrize(("size", "sequence_parallel"), [(4, False), (2, True)])
def test_chunks_of_a_split_vocabulary_are_the_whole(
    size: int, sequence_parallel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks with few words and with none, with padding, and more chunks than tokens."""
    if size == 2:
        monkeypatch.setitem(CUTS, "even", [0, 8, 16])
        monkeypatch.setitem(CUTS, "empty", [0, 13, 16])
    losses, dx, dw = _expected()
    ranks = run_ranks(_split, size, sequence_parallel)
    for case in zip(*ranks, strict=True):
        for own in case:
            close(own[0], losses, EXACT)
            if not sequence_parallel:
                close(own[1], dx, EXACT)
        if sequence_parallel:
            close(torch.cat([own[1] for own in case], 1), dx, EXACT)
        close(torch.cat([own[2] for own in case]), dw, EXACT)


def test_no_logits_are_saved() -> None:
    n, h, v = 64, 32, 4096
    hidden = torch.ones(1, n, h, dtype=torch.bfloat16, requires_grad=True)
    table = torch.ones(v, h, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(1, n, dtype=torch.long)
    kept = saved_bytes(lambda: linear_cross_entropy(hidden, table, targets, group=Group(), words=range(v)))
    assert kept <= (n + v) * h * 2 + n * (4 + 4 + 8 + 1)


def test_a_frozen_table_gets_no_gradient() -> None:
    hidden, table = _whole()
    hidden.requires_grad_()
    linear_cross_entropy(hidden, table, TARGETS, group=Group(), words=range(V), chunks=2).sum().backward()
    assert hidden.grad is not None and table.grad is None


def test_sizes_of_chunks() -> None:
    assert chunk_rows(10, words=100, hidden=10, chunks=20) == 1
    assert chunk_rows(131072, words=151936, hidden=4096) == 4096  # 38 chunks in Liger's law: 3450 rows, rounded up
    assert chunk_rows(100, words=1, hidden=8, most=4096) == 100
    assert chunk_rows(7, words=0, hidden=8) == 7
