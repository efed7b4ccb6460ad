"""Embedding, head and loss together and apart: split, padded, empty ranks, huge logits, bf16."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpctl.layers.cross_entropy import vocab_parallel_cross_entropy
from mpctl.layers.embedding import OutputHead, VocabParallelEmbedding
from mpctl.transport.group import Group
from mpctl.transport.timing import Collective
from tests.layers.oracle import (
    close,
    fill,
    gradients,
    grouped,
    logged,
    numbers,
    saved_bytes,
    whole,
)
from tests.threads import run_ranks

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
        hidden = self.words(tokens)
        logits = self.words.logits(hidden) if self.head is None else self.head(hidden)
        table = self.words
        return vocab_parallel_cross_entropy(
            logits, targets, group=table.group, first=table.vocab_range.start
        )


def _model(rank: int, size: int, split: bool = False) -> list:
    results = []
    for tied in (True, False):
        log: list[Collective] = []
        model = _Model(grouped(rank, size, log), tied, PADDED, split)
        fill(model)
        losses = model(_tokens(1), _tokens(2))
        losses.backward(numbers(B, S, seed=4))
        results.append([losses.detach(), gradients(model), logged(log)])
    return results


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_loss_and_gradients_of_the_padded_split_vocabulary(size: int, split: bool) -> None:
    results = [_model(0, 1, split)] if size == 1 else run_ranks(_model, size, split)
    for case, tied in enumerate((True, False)):
        # fill() numbers parameters by sorted name: head.weight, words.weight
        words = (numbers(PADDED, H, seed=3 if tied else 4) * 0.3).requires_grad_()
        head = words if tied else (numbers(PADDED, H, seed=3) * 0.3).requires_grad_()
        logits = words[_tokens(1)] @ head[:V].T
        losses = F.cross_entropy(logits.flatten(0, 1), _tokens(2).flatten(), reduction="none")
        losses.backward(numbers(B, S, seed=4).flatten())
        parts = [result[case] for result in results]
        for part in parts:
            close(part[0], losses.detach().view(B, S))
        close(whole([part[1]["words.weight"] for part in parts]), words.grad)
        if not tied:
            close(whole([part[1]["head.weight"] for part in parts]), head.grad)
            assert head.grad[V:].abs().max() == 0


def test_the_collectives_of_embedding_head_and_loss() -> None:
    row, vectors = B * S * 8, B * S * H * 8
    for result in run_ranks(_model, 2):
        for _, _, log in result:
            assert [entry[2] for entry in log] == [vectors, row, row, row, vectors]
            assert {entry[0] for entry in log} == {"all_reduce"}


def test_the_collectives_under_sequence_parallelism() -> None:
    """Vectors are reduce-scattered; the head gathers them, and once more for dW in backward."""
    for result in run_ranks(_model, 2, True):
        for _, _, log in result:
            large = [entry[0] for entry in log if entry[2] == B * S * H * 8]
            assert large == ["reduce_scatter", *["all_gather"] * 2, "reduce_scatter", "all_gather"]
            assert [entry[0] for entry in log if entry[2] == B * S * 8] == ["all_reduce"] * 3
            assert len(log) == 8


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


def _split_loss(rank: int, size: int, name: str, logits: Tensor, targets: Tensor) -> list:
    log: list[Collective] = []
    cuts = {"even": [0, 4, 8, 12, 16], "empty": [0, 9, 16, 16, 16], "front": [0, 0, 3, 3, 16]}[name]
    own = logits[..., cuts[rank] : cuts[rank + 1]].clone().requires_grad_()
    before = own.detach().clone()
    loss = vocab_parallel_cross_entropy(
        own, targets, group=grouped(rank, size, log), first=cuts[rank]
    )
    loss.backward(torch.linspace(-1, 2, loss.numel()).view_as(loss).to(loss.dtype))
    assert torch.equal(own.detach(), before)
    return [loss.detach(), own.grad, logged(log)]


def _oracle(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """In float64 by the definition."""
    z = logits.double()
    shifted = z - z.amax(-1, keepdim=True)
    log_p = shifted - shifted.exp().sum(-1, keepdim=True).log()
    loss = -log_p.gather(-1, targets[..., None])[..., 0]
    weight = torch.linspace(-1, 2, loss.numel()).view_as(loss).double()
    return loss, (log_p.exp() - F.one_hot(targets, z.shape[-1])) * weight[..., None]


@pytest.mark.parametrize("name", ["even", "empty", "front"])
@pytest.mark.parametrize(
    ("dtype", "scale", "bound"),
    [
        (torch.float64, 1.0, 1e-12),
        (torch.float32, 1.0, 2e-6),
        (torch.float32, 1e4, 2e-3),
        (torch.float64, 1e300, 1e-10),
        (torch.bfloat16, 4.0, 8e-3),
        (torch.float16, 1e4, 2e-3),
    ],
)
def test_cross_entropy_of_split_logits(
    name: str, dtype: torch.dtype, scale: float, bound: float
) -> None:
    logits = (numbers(3, 7, 16, seed=6) * scale).to(dtype)
    targets = torch.arange(21).view(3, 7) % 16
    loss, grad = _oracle(logits, targets)
    results = run_ranks(_split_loss, 4, name, logits, targets)
    maths = torch.float64 if dtype == torch.float64 else torch.float32
    for own, _, log in results:
        assert own.dtype == maths
        assert ((own.double() - loss).abs() <= bound * 1e-1 + loss.abs() * 1e-6).all()
        expected = ("all_reduce", "tp", 21 * maths.itemsize, str(maths).removeprefix("torch."))
        assert log == [expected] * 3
    joined = torch.cat([result[1] for result in results], -1)
    assert joined.dtype == dtype
    close(joined.double(), grad, bound)


def test_bf16_gradient_of_a_confident_row_does_not_round_to_zero() -> None:
    logits = torch.tensor([[[9.0, 0.0, 0.0, 0.0]]], dtype=torch.bfloat16, requires_grad=True)
    targets = torch.tensor([[0]])
    vocab_parallel_cross_entropy(logits, targets, group=Group(), first=0).sum().backward()
    expected = -3 / (torch.e**9 + 3)
    assert abs(logits.grad[0, 0, 0].item() / expected - 1) < 0.01


def test_blocks_of_rows_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, targets = numbers(3, 7, 16), torch.arange(21).view(3, 7) % 16
    outcomes = []
    for size in (1 << 17, 50, 1):
        monkeypatch.setattr("mpctl.kernels.cross_entropy.block_elements", lambda _, n=size: n)
        leaf = logits.clone().requires_grad_()
        loss = vocab_parallel_cross_entropy(leaf, targets, group=Group(), first=0)
        loss.sum().backward()
        outcomes.append((loss.detach(), leaf.grad))
    for loss, grad in outcomes[1:]:
        close(loss, outcomes[0][0], 1e-14)
        close(grad, outcomes[0][1], 1e-14)


def test_the_loss_keeps_the_logits_and_little_else() -> None:
    n, v = 8, 4096
    logits = torch.ones(1, n, v, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(1, n, dtype=torch.long)
    kept = saved_bytes(
        lambda: vocab_parallel_cross_entropy(logits, targets, group=Group(), first=0)
    )
    # two floats, a column number and a flag a row
    assert kept <= n * v * 2 + n * (4 + 4 + 8 + 1)


def test_vocab_ranges_by_hand() -> None:
    tables = [
        VocabParallelEmbedding(V, H, group=Group(r, 4), padded_vocab=PADDED) for r in range(4)
    ]
    assert [t.vocab_range for t in tables] == [
        range(0, 8), range(8, 13), range(13, 13), range(13, 13),
    ]  # fmt: skip
    assert repr(tables[1]) == "VocabParallelEmbedding(words 8..13 of 13, 8 of 32 rows, 8, t=4)"


def test_bad_vocabularies_are_refused() -> None:
    with pytest.raises(ValueError, match="13 is not divisible by 4"):
        VocabParallelEmbedding(V, H, group=Group(0, 4))
    with pytest.raises(ValueError, match="padded_vocab 12 is below the vocabulary of 13"):
        OutputHead(V, H, group=Group(), padded_vocab=12)
