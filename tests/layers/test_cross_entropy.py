"""Ignored targets, label smoothing and z-loss of split logits against torch's own, on any t."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mpctl.layers.cross_entropy import vocab_parallel_cross_entropy
from mpctl.layers.embedding import OutputHead
from mpctl.transport.group import Group
from mpctl.transport.timing import Collective
from tests.layers.oracle import close, fill, grouped, logged, numbers, saved_bytes, whole
from tests.layers.oracle import gradients as shards
from tests.threads import run_ranks

B, S, H, V, PADDED = 3, 5, 8, 13, 20  # words of the ranks: t=2 10, 3; t=4 5, 5, 3, 0
LAWS: dict[str, dict] = {
    "plain": {},
    "smooth": {"label_smoothing": 0.1},
    "all smooth": {"label_smoothing": 1.0},
    "z": {"z_loss": 1e-2},
    "both": {"label_smoothing": 0.3, "z_loss": 1e-2},
    "a word ignored": {"label_smoothing": 0.3, "z_loss": 1e-2, "ignore_index": 3},
}


def _targets() -> Tensor:
    targets = torch.arange(B * S).view(B, S) % V
    targets[0, 1] = targets[2, 4] = -100
    return targets


def _run(rank: int, size: int) -> dict:
    results = {}
    for name, law in LAWS.items():
        log: list[Collective] = []
        group = grouped(rank, size, log)
        head = OutputHead(V, H, group=group, padded_vocab=PADDED, dtype=torch.float64)
        fill(head)
        logits = head(numbers(B, S, H, seed=5) * 5)
        logits.retain_grad()
        ignored = law.get("ignore_index", -100)
        wanted = _targets().masked_fill(_targets() == -100, ignored)
        losses = vocab_parallel_cross_entropy(
            logits, wanted, group=group, first=head.vocab_range.start, vocab=V, **law
        )
        losses.backward(numbers(B, S, seed=6))
        results[name] = [losses.detach(), logits.grad, shards(head), logged(log)]
    return results


def _expected(law: dict) -> tuple[Tensor, Tensor, Tensor]:
    weight = (numbers(PADDED, H, seed=3) * 0.3).requires_grad_()
    logits = numbers(B, S, H, seed=5) * 5 @ weight[:V].T
    logits.retain_grad()
    ignored = law.get("ignore_index", -100)
    wanted = _targets().masked_fill(_targets() == -100, ignored)
    losses = F.cross_entropy(
        logits.flatten(0, 1), wanted.flatten(), reduction="none", ignore_index=ignored,
        label_smoothing=law.get("label_smoothing", 0.0),
    ).view(B, S)  # fmt: skip
    penalty = law.get("z_loss", 0.0) * logits.logsumexp(-1) ** 2
    losses = losses + penalty * (wanted != ignored)
    losses.backward(numbers(B, S, seed=6))
    return losses.detach(), logits.grad, weight.grad


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_law_on_a_padded_split_vocabulary(size: int) -> None:
    results = [_run(0, 1)] if size == 1 else run_ranks(_run, size)
    row = ("all_reduce", "tp", B * S * 8, "float64")
    for name, law in LAWS.items():
        losses, logits, weight = _expected(law)
        parts = [result[name] for result in results]
        for part in parts:
            close(part[0], losses)
            assert (part[0][_targets() == -100] == 0).all()
            # smoothing and z-loss cost nothing more
            assert part[3] == ([] if size == 1 else [row] * 3)
        joined = torch.cat([part[1] for part in parts], -1)
        close(joined, logits)
        assert (joined[_targets() == -100] == 0).all()
        close(whole([part[2]["weight"] for part in parts]), weight)


def test_by_hand_one_word_of_two() -> None:
    logits = torch.tensor([[[2.0, 0.0]]], dtype=torch.float64, requires_grad=True)
    loss = vocab_parallel_cross_entropy(
        logits, torch.tensor([[0]]), group=Group(), first=0, label_smoothing=0.5
    )
    # 0.75 (lse - 2) + 0.25 (lse - 0)
    close(loss.detach(), torch.tensor([[2, 0]]).double().logsumexp(1, keepdim=True) - 1.5)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 8e-3)])
def test_short_dtypes_follow(dtype: torch.dtype, bound: float) -> None:
    exact = numbers(B, S, 16).mul_(4).to(dtype).double().requires_grad_()
    short = exact.detach().to(dtype).requires_grad_()
    law = {"label_smoothing": 0.1, "z_loss": 1e-3, "group": Group(), "first": 0}
    for logits in (exact, short):
        loss = vocab_parallel_cross_entropy(logits, _targets(), **law)
        loss.sum().backward()
    assert loss.dtype == torch.float32
    assert short.grad.dtype == dtype
    close(short.grad.double(), exact.grad, bound)


def test_blocks_of_rows_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = []
    for size in (1 << 17, 50, 1):
        monkeypatch.setattr("mpctl.kernels.cross_entropy.block_elements", lambda _, n=size: n)
        leaf = numbers(B, S, 16).requires_grad_()
        loss = vocab_parallel_cross_entropy(
            leaf, _targets(), group=Group(), first=0, label_smoothing=0.1, z_loss=0.1
        )
        loss.sum().backward()
        outcomes.append((loss.detach(), leaf.grad))
    for loss, grad in outcomes[1:]:
        close(loss, outcomes[0][0], 1e-14)
        close(grad, outcomes[0][1], 1e-14)


def test_no_law_keeps_more_than_the_plain_loss() -> None:
    kept = []
    for law in LAWS.values():
        logits = torch.ones(1, 8, 4096, requires_grad=True)
        targets = torch.zeros(1, 8, dtype=torch.long)
        more = {"group": Group(), "first": 0, **law}
        kept.append(
            saved_bytes(lambda x=logits, y=targets, m=more: vocab_parallel_cross_entropy(x, y, **m))
        )
    assert max(kept) <= 8 * 4096 * 4 + 8 * (4 + 4 + 8 + 1)


def test_a_forbidden_word_does_not_poison_the_loss() -> None:
    logits = torch.tensor([[[-torch.inf, 1.0, 2.0]]], requires_grad=True)
    loss = vocab_parallel_cross_entropy(logits, torch.tensor([[-100]]), group=Group(), first=0)
    loss = loss + vocab_parallel_cross_entropy(logits, torch.tensor([[2]]), group=Group(), first=0)
    loss.sum().backward()
    assert loss.item() == pytest.approx(torch.tensor([1.0, 2.0]).logsumexp(0).item() - 2)
    assert torch.isfinite(logits.grad).all()


def test_bad_laws_are_refused() -> None:
    logits, targets = torch.ones(1, 1, 4), torch.zeros(1, 1, dtype=torch.long)
    with pytest.raises(ValueError, match=r"label_smoothing 1\.5 is not in 0 <= smoothing <= 1"):
        vocab_parallel_cross_entropy(logits, targets, group=Group(), first=0, label_smoothing=1.5)
    with pytest.raises(ValueError, match=r"label_smoothing 0\.1 on 2 ranks needs vocab"):
        vocab_parallel_cross_entropy(
            logits, targets, group=Group(0, 2), first=0, label_smoothing=0.1
        )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_gradient_written_over_the_logits_is_the_same_to_the_bit(dtype: torch.dtype) -> None:
    draw, targets = torch.Generator().manual_seed(4), torch.tensor([[1, 5, -100, 2]])
    leaf = torch.randn(1, 4, 9, generator=draw).to(dtype).requires_grad_()
    found = []
    for overwrite in (False, True):
        leaf.grad, logits = None, leaf * 1
        places: list[int] = []
        logits.register_hook(lambda grad, seen=places: seen.append(grad.data_ptr()))
        loss = vocab_parallel_cross_entropy(
            logits, targets, group=Group(), first=0, z_loss=0.01, overwrite=overwrite
        )
        loss.sum().backward()
        assert (places == [logits.data_ptr()]) == overwrite
        found.append(leaf.grad)
    assert torch.equal(*found)


def test_overwritten_logits_are_not_read_again_by_mistake() -> None:
    leaf = torch.randn(1, 2, 9, requires_grad=True)
    targets = torch.tensor([[1, 5]])
    logits = leaf * 1
    square = (logits * logits).sum()
    loss = vocab_parallel_cross_entropy(
        logits, targets, group=Group(), first=0, overwrite=True
    ).sum()
    loss.backward(retain_graph=True)
    for again in (loss, square):
        with pytest.raises(RuntimeError):
            again.backward(retain_graph=True)
