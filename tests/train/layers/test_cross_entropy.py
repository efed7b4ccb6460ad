"""The loss of logits that are split over the vocabulary, by its definition in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mpctl.train.layers.cross_entropy import IGNORED, vocab_parallel_cross_entropy
from mpctl.train.transport.group import Group
from mpctl.train.transport.timing import Collective
from tests.threads import run_ranks
from tests.train.layers.oracle import close, grouped, logged, numbers, saved_bytes

V, ROWS = 16, 21
TARGETS = (torch.arange(ROWS) % V).masked_fill(torch.arange(ROWS) % 10 == 7, IGNORED).view(3, 7)
WEIGHTS = torch.linspace(-1, 2, ROWS, dtype=torch.float64).view(3, 7)
CUTS = {"even": [0, 4, 8, 12, 16], "empty": [0, 9, 16, 16, 16], "front": [0, 0, 3, 3, 16]}
# what logits are multiplied by, and how far gradients may lie from the definition's
DTYPES: list[tuple[torch.dtype, float, float]] = [
    (torch.float64, 1.0, 1e-12),
    (torch.float32, 1.0, 2e-6),
    (torch.float32, 1e4, 2e-3),
    (torch.float64, 1e300, 1e-10),
    (torch.bfloat16, 4.0, 8e-3),
    (torch.float16, 1e4, 2e-3),
]


def _logits(dtype: torch.dtype, scale: float) -> Tensor:
    return (numbers(3, 7, V, seed=6) * scale).to(dtype)


def _split(rank: int, size: int) -> list:
    results = []
    for cuts in CUTS.values():
        for dtype, scale, _ in DTYPES:
            log: list[Collective] = []
            whole = _logits(dtype, scale)
            own = whole[..., cuts[rank] : cuts[rank + 1]].clone().requires_grad_()
            group, before = grouped(rank, size, log), own.detach().clone()
            loss = vocab_parallel_cross_entropy(own, TARGETS, group=group, first=cuts[rank])
            loss.backward(WEIGHTS.to(loss.dtype))
            assert torch.equal(own.detach(), before)
            results.append([loss.detach(), own.grad, logged(log)])
    return results


def _definition(logits: Tensor) -> tuple[Tensor, Tensor]:
    shifted = logits.double() - logits.double().amax(-1, keepdim=True)
    log_p = shifted - shifted.exp().sum(-1, keepdim=True).log()
    counts = TARGETS != IGNORED
    targets = TARGETS.masked_fill(~counts, 0)
    loss = -log_p.gather(-1, targets[..., None])[..., 0] * counts
    return loss, (log_p.exp() - F.one_hot(targets, V)) * (WEIGHTS * counts)[..., None]


def test_split_logits_have_the_loss_and_gradient_of_the_definition() -> None:
    """Ranks with a few words and with none, huge logits, 16 bits; three messages of a row each."""
    ranks, case = run_ranks(_split, 4), 0
    for _ in CUTS:
        for dtype, scale, bound in DTYPES:
            loss, grad = _definition(_logits(dtype, scale))
            maths = torch.float64 if dtype == torch.float64 else torch.float32
            message = ("all_reduce", "tp", ROWS * maths.itemsize, str(maths).removeprefix("torch."))
            for own, _, log in (rank[case] for rank in ranks):
                assert own.dtype == maths and log == [message] * 3
                assert ((own.double() - loss).abs() <= bound * 1e-1 + loss.abs() * 1e-6).all()
                assert (own[TARGETS == IGNORED] == 0).all()
            together = torch.cat([rank[case][1] for rank in ranks], -1)
            assert together.dtype == dtype and (together[TARGETS == IGNORED] == 0).all()
            close(together.double(), grad, bound)
            case += 1


def _alone(leaf: Tensor, targets: Tensor, **more: Any) -> Tensor:
    return vocab_parallel_cross_entropy(leaf, targets, group=Group(), first=0, **more)


def test_bf16_gradient_of_a_confident_row_does_not_round_to_zero() -> None:
    logits = torch.tensor([[[9.0, 0.0, 0.0, 0.0]]], dtype=torch.bfloat16, requires_grad=True)
    _alone(logits, torch.tensor([[0]])).sum().backward()
    assert logits.grad is not None
    assert abs(logits.grad[0, 0, 0].item() / (-3 / (torch.e**9 + 3)) - 1) < 0.01


def test_a_forbidden_word_does_not_poison_the_loss() -> None:
    logits = torch.tensor([[[-torch.inf, 1.0, 2.0]]], requires_grad=True)
    loss = _alone(logits, torch.tensor([[IGNORED]])) + _alone(logits, torch.tensor([[2]]))
    loss.sum().backward()
    assert loss.item() == pytest.approx(torch.tensor([1.0, 2.0]).logsumexp(0).item() - 2)
    assert logits.grad is not None and torch.isfinite(logits.grad).all()


def test_blocks_of_rows_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = []
    for size in (1 << 17, 50, 1):
        monkeypatch.setattr("mpctl.train.kernels.backend.block_elements", lambda _, n=size: n)
        leaf = _logits(torch.float64, 1.0).requires_grad_()
        loss = _alone(leaf, TARGETS)
        loss.sum().backward()
        outcomes.append((loss.detach(), leaf.grad))
    for outcome in outcomes[1:]:
        for ours, expected in zip(outcome, outcomes[0], strict=True):
            close(ours, expected, 1e-14)


def test_the_loss_keeps_the_logits_and_little_else() -> None:
    n, v = 8, 4096
    logits = torch.ones(1, n, v, dtype=torch.bfloat16, requires_grad=True)
    kept = saved_bytes(lambda: _alone(logits, torch.zeros(1, n, dtype=torch.long)))
    # two floats, a column number and a flag a row
    assert kept <= n * v * 2 + n * (4 + 4 + 8 + 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("words", [V, 0])
def test_columns_of_padding_do_not_show(dtype: torch.dtype, overwrite: bool, words: int) -> None:
    """Whatever they hold: losses and gradients are those of the words alone, to the bit."""
    found = []
    for padding in (0, 5):
        leaf = _logits(dtype, 4.0)[..., :words]
        filled = torch.cat([leaf, torch.full((3, 7, padding), torch.nan, dtype=dtype)], -1)
        leaf = filled.requires_grad_()
        loss = _alone(leaf * 1, TARGETS, words=words, overwrite=overwrite)
        loss.backward(WEIGHTS.to(loss.dtype))
        assert leaf.grad is not None
        found.append((loss.detach(), leaf.grad))
    (loss, gradient), (padded_loss, padded) = found
    assert torch.equal(loss.isnan(), padded_loss.isnan()) and (words == 0 or not loss.isnan().any())
    assert words == 0 or torch.equal(loss, padded_loss)
    assert torch.equal(gradient, padded[..., :words]) and not padded[..., words:].any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_gradient_written_over_the_logits_is_the_same_to_the_bit(dtype: torch.dtype) -> None:
    draw, targets = torch.Generator().manual_seed(4), torch.tensor([[1, 5, IGNORED, 2]])
    leaf = torch.randn(1, 4, 9, generator=draw).to(dtype).requires_grad_()
    found = []
    for overwrite in (False, True):
        leaf.grad, logits = None, leaf * 1
        places: list[int] = []
        logits.register_hook(lambda grad, seen=places: seen.append(grad.data_ptr()))
        _alone(logits, targets, overwrite=overwrite).sum().backward()
        assert (places == [logits.data_ptr()]) == overwrite
        found.append(leaf.grad)
    assert torch.equal(*found)


def test_overwritten_logits_are_not_read_again_by_mistake() -> None:
    leaf = torch.randn(1, 2, 9, requires_grad=True)
    logits = leaf * 1
    square = (logits * logits).sum()
    loss = _alone(logits, torch.tensor([[1, 5]]), overwrite=True).sum()
    loss.backward(retain_graph=True)
    for again in (loss, square):
        with pytest.raises(RuntimeError):
            again.backward(retain_graph=True)
