"""Collectives and region operators against what they must compute by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mpctl.train.layers.mappings import (
    gather_from_region,
    gather_sequence,
    reduce_from_region,
    scatter_sequence_sum,
    scatter_to_region,
)
from mpctl.train.transport.group import Group
from mpctl.train.transport.timing import Collective
from tests.threads import run_ranks
from tests.train.layers.oracle import NO_PEERS, close, grouped, logged, numbers


def test_one_rank_is_the_identity_and_records_nothing() -> None:
    log: list[Collective] = []
    group, x = grouped(0, 1, log), numbers(2, 3)
    for result in (
        group.all_reduce(x),
        group.all_gather(x, 0),
        group.reduce_scatter(x, 1),
        group.broadcast(x, 0),
        reduce_from_region(x, group),
        scatter_to_region(x, group),
        gather_from_region(x, group),
        gather_sequence(x, group),
        scatter_sequence_sum(x, group),
    ):
        assert result is x
    assert log == []


def _regions(rank: int, size: int) -> dict[str, list[Tensor]]:
    group, results = grouped(rank, size), {}
    operators = {"reduce": reduce_from_region, "scatter": scatter_to_region, "gather": gather_from_region}
    for name, operator in operators.items():
        x = (torch.arange(4.0) + 10 * rank).requires_grad_()
        y = operator(x, group)
        grad = torch.arange(float(y.numel())) + 1000 * (rank + 1)
        y.backward(grad)
        assert torch.equal(x.detach(), torch.arange(4.0) + 10 * rank)
        assert torch.equal(grad, torch.arange(float(y.numel())) + 1000 * (rank + 1))
        results[name] = [y.detach(), x.grad]
    return results


def test_regions_forward_and_backward() -> None:
    up = torch.arange(4.0)
    for rank, got in enumerate(run_ranks(_regions, 2)):
        own, cut = up + 1000 * (rank + 1), slice(2 * rank, 2 * rank + 2)
        wide = torch.arange(8.0) + 1000 * (rank + 1)
        expected = {
            "reduce": [2 * up + 10, own],
            "scatter": [(up + 10 * rank)[cut], torch.tensor([1000.0, 1001.0, 2000.0, 2001.0])],
            "gather": [torch.cat([up, up + 10]), wide[4 * rank : 4 * rank + 4]],
        }
        for name, pair in expected.items():
            for actual, wanted in zip(got[name], pair, strict=True):
                assert torch.equal(actual, wanted), name


SEQUENCE = {
    "gather": gather_sequence,
    "scatter sum": scatter_sequence_sum,
    "split": lambda x, group: scatter_to_region(x, group, dim=1),
    "gather, repeated reader": lambda x, group: gather_from_region(x, group, dim=1),
}


def _sequence(rank: int, size: int, b: int) -> list:
    log: list[Collective] = []
    group, results = grouped(rank, size, log), {}
    for name, operator in SEQUENCE.items():
        x = (numbers(b, 4, 3, seed=1) + (0 if name == "split" else rank)).requires_grad_()
        before = x.detach().clone()
        y = operator(x, group)
        grad = numbers(*y.shape, seed=2) + rank
        kept = grad.clone()
        y.backward(grad)
        assert torch.equal(x.detach(), before)
        assert torch.equal(grad, kept)
        assert y.is_contiguous()
        results[name] = [y.detach(), x.grad]
    return [results, logged(log)]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("b", [1, 3])
def test_sequence_regions_forward_and_backward(size: int, b: int) -> None:
    x, wide, n = numbers(b, 4, 3, seed=1), numbers(b, 4 * size, 3, seed=2), 4 // size
    thin, ranks = numbers(b, n, 3, seed=2), sum(range(size))
    for rank, (got, log) in enumerate(run_ranks(_sequence, size, b)):
        own, part = slice(4 * rank, 4 * rank + 4), slice(n * rank, n * rank + n)
        every = torch.cat([thin + r for r in range(size)], 1)
        together = torch.cat([x + r for r in range(size)], 1)
        expected = {
            "gather": [together, (size * wide + ranks)[:, own]],
            "scatter sum": [(size * x + ranks)[:, part], every],
            "split": [x[:, part], every],
            "gather, repeated reader": [together, (wide + rank)[:, own]],
        }
        for name, pair in expected.items():
            for actual, wanted in zip(got[name], pair, strict=True):
                close(actual, wanted, 1e-13)
        small, large = b * 4 * 3 * 8, b * 4 * size * 3 * 8
        assert [(kind, size_) for kind, _, size_, _ in log] == [
            ("all_gather", large),
            ("reduce_scatter", large),
            ("reduce_scatter", small),
            ("all_gather", small),
            ("all_gather", small),
            ("all_gather", large),
        ]


def test_a_micro_batch_of_one_is_gathered_and_scattered_without_a_copy() -> None:
    """The blocks of [1, s, h] along dim 1 lie side by side; those of [2, s, h] do not."""
    seen = []

    def instead(out: Tensor, whole: Tensor, **_: object) -> None:
        seen.append((out.data_ptr(), whole.data_ptr()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mpctl.train.transport.group._reduce_scatter", instead)
        patch.setattr("mpctl.train.transport.group._all_gather", instead)
        for b in (1, 2):
            x = torch.ones(b, 4, 3)
            result = Group(0, 2, NO_PEERS).reduce_scatter(x, 1)
            gathered = Group(0, 2, NO_PEERS).all_gather(x, 1)
            assert seen[-2][0] == result.data_ptr()
            assert (seen[-2][1] == x.data_ptr()) == (b == 1)
            assert (seen[-1][0] == gathered.data_ptr()) == (b == 1)


def _owned(rank: int, size: int) -> str:
    group = grouped(rank, size)
    x = torch.ones(3, requires_grad=True)
    saved = x.exp()  # autograd keeps the output of exp
    y = reduce_from_region(saved, group, owned=True)
    assert y.data_ptr() == saved.data_ptr()
    try:
        y.sum().backward()
    except RuntimeError as error:
        return str(error)
    return "silently wrong"


def test_owned_reduce_of_a_saved_tensor_raises_instead_of_lying() -> None:
    for message in run_ranks(_owned, 2):
        assert "inplace operation" in message
