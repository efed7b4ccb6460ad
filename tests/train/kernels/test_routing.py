"""The choice of experts, its weights and losses, and the order of rows, by hand and by formula."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mpctl.train.kernels.backend import TORCH_BACKEND
from mpctl.train.kernels.routing import (
    arrival_order,
    balance_loss,
    choose_experts,
    combined_rows,
    dispatched_rows,
    expert_counts,
    expert_scores,
    expert_weights,
    rows_by_expert,
    wide_product,
    with_loss,
    z_loss,
)

LOGITS = torch.tensor([[math.log(6), math.log(3), 0.0]], dtype=torch.float64)


def test_weights_by_hand() -> None:
    scores = expert_scores(LOGITS, "softmax")
    experts = choose_experts(LOGITS, 2).experts
    assert experts.tolist() == [[0, 1]]
    for renormalize, expected in ((False, [0.6, 0.3]), (True, [2 / 3, 1 / 3])):
        weights = expert_weights(LOGITS, scores, experts, "softmax", renormalize=renormalize)
        torch.testing.assert_close(weights[0], torch.tensor(expected, dtype=torch.float64))
    with_bias = choose_experts(scores + torch.tensor([0.0, -1.0, 0.0]), 2)
    assert with_bias.experts.tolist() == [[0, 2]]


def test_sigmoids_are_renormalized_over_the_chosen_and_scaled() -> None:
    logits = torch.tensor([[0.0, math.log(3), -math.log(3)]], dtype=torch.float64)
    scores = expert_scores(logits, "sigmoid")  # .5, .75, .25
    experts = choose_experts(scores, 2).experts
    weights = expert_weights(logits, scores, experts, "sigmoid", renormalize=True, scale=2.5)
    torch.testing.assert_close(weights[0], torch.tensor([1.0, 1.5], dtype=torch.float64))


@pytest.mark.parametrize("k", [1, 3, 8])
def test_equal_scores_are_chosen_by_number(k: int) -> None:
    chosen = choose_experts(torch.zeros(2, 8), k)
    assert chosen.experts.tolist() == [list(range(k))] * 2
    assert chosen.near_ties.item() == (0 if k == 8 else 2)
    rising = choose_experts(torch.tensor([[1.0, 5, 5, 2, 5, 0, 5, 5]]), 3)
    assert rising.experts.tolist() == [[1, 2, 4]]


@pytest.mark.parametrize("k", [1, 2, 8])
def test_the_choice_is_that_of_a_stable_sort(k: int) -> None:
    scores = torch.randint(0, 6, (200, 16), generator=torch.Generator().manual_seed(1)).float()
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices
    assert torch.equal(choose_experts(scores, k).experts, order[:, :k].sort(-1).values)


def test_groups_limit_the_choice_even_under_negative_biases() -> None:
    scores = torch.tensor([[-0.1, -0.9, -0.3, -0.3, -0.8, -0.7]])  # groups of two
    one = choose_experts(scores, 2, groups=3, groups_per_token=1, best=1)
    assert one.experts.tolist() == [[0, 1]]  # the best is in the first group
    two = choose_experts(scores, 2, groups=3, groups_per_token=1, best=2)
    assert two.experts.tolist() == [[2, 3]]  # -.6 is the highest sum of two
    three = choose_experts(scores, 3, groups=3, groups_per_token=2, best=2)
    assert three.experts.tolist() == [[0, 2, 3]]


def test_near_ties_count_what_rounding_could_choose() -> None:
    scores = torch.tensor([[4.0, 2.0, 2.0 - 1e-3], [4.0, 2.0, 1.0]], dtype=torch.float64)
    assert choose_experts(scores, 2, rounding=1e-4).near_ties.item() == 0
    assert choose_experts(scores, 2, rounding=1e-3).near_ties.item() == 1
    assert choose_experts(scores, 1, rounding=1e-3).near_ties.item() == 0
    groups = choose_experts(scores[:, :2].repeat(1, 2), 1, groups=2, groups_per_token=1, rounding=1e-9)
    assert groups.near_ties.item() == 2


def test_balance_by_hand() -> None:
    """k = 1, E = 2: one sequence goes to expert 0 with p (.9, .1), the other is its mirror."""
    scores = torch.tensor([[0.9, 0.1], [0.1, 0.9]], dtype=torch.float64)[:, None].expand(2, 4, 2)
    experts = torch.tensor([0] * 4 + [1] * 4)[:, None]
    counts = expert_counts(experts, 2, 2)
    assert counts.tolist() == [[4, 0], [0, 4]]
    by_sequence = balance_loss(scores, counts / 4, "softmax", length=4)
    assert by_sequence.item() == pytest.approx(2 * 1.8)
    together = balance_loss(scores, counts.sum(0, keepdim=True) / 8, "softmax", length=4)
    assert together.item() == pytest.approx(2 * 1.0)


def test_sigmoids_are_divided_by_their_sum_in_the_balance() -> None:
    scores = torch.tensor([[[0.2, 0.6]]], dtype=torch.float64)
    loss = balance_loss(scores, torch.tensor([[0.0, 1.0]]), "sigmoid", length=1)
    assert loss.item() == pytest.approx(2 * 0.75)


def test_z_loss_by_hand() -> None:
    logits = torch.zeros(2, 3, 4, dtype=torch.float64)
    assert z_loss(logits, length=3).item() == pytest.approx(2 * math.log(4) ** 2)


def test_an_auxiliary_loss_enters_by_its_gradient_alone() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    weights = with_loss(x * 3, x.square().sum(), scale=0.5)
    assert weights.tolist() == [3.0, 6.0]
    weights.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3 + 0.5 * 2, 3 + 0.5 * 4]


def test_the_wide_product_rounds_once_and_keeps_its_input() -> None:
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(2)).bfloat16().requires_grad_()
    w = torch.randn(3, 8, generator=torch.Generator().manual_seed(3)).bfloat16().requires_grad_()
    y = wide_product(x, w)
    assert y.dtype == torch.float32
    wide, weight = (t.detach().float().requires_grad_() for t in (x, w))
    expected = wide @ weight.T
    assert torch.equal(y, expected)
    grad = torch.ones_like(y) / 3
    y.backward(grad)
    expected.backward(grad)
    assert x.grad is not None and w.grad is not None
    assert wide.grad is not None and weight.grad is not None
    assert torch.equal(x.grad, wide.grad.bfloat16())
    assert torch.equal(w.grad, weight.grad.bfloat16())


T, K, E, H = 7, 3, 8, 4


def _experts(seed: int) -> Tensor:
    scores = torch.rand(T, E, generator=torch.Generator().manual_seed(seed))
    return choose_experts(scores, K).experts


@pytest.mark.parametrize("copies", [1, 2, 3])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_rows_are_sorted_by_block_copy_expert_and_token(copies: int, parts: int) -> None:
    experts = _experts(parts)
    counts = expert_counts(experts, 1, E)[0]
    order = rows_by_expert(experts, counts, parts=parts, copies=copies)
    expected = [
        token
        for part in range(parts)
        for _ in range(copies)
        for expert in range(part * E // parts, (part + 1) * E // parts)
        for token in range(T)
        if expert in experts[token]
    ]
    assert order.sources.tolist() == expected
    assert order.places.shape == (copies, K, T)
    for place in order.places:
        assert torch.equal(order.sources[place], torch.arange(T).expand(K, T))
    assert torch.equal(order.places.flatten().sort().values, torch.arange(copies * K * T))


@pytest.mark.parametrize("copies", [1, 2])
def test_rows_go_and_come_back(copies: int) -> None:
    experts, made = _experts(9), torch.Generator().manual_seed(4)
    order = rows_by_expert(experts, expert_counts(experts, 1, E)[0], parts=2, copies=copies)
    x, weights = (torch.randn(T, n, generator=made, dtype=torch.float64).requires_grad_() for n in (H, K))
    factors = torch.arange(1.0, copies * K * T + 1, dtype=torch.float64)[:, None]
    y = combined_rows(dispatched_rows(x, order, TORCH_BACKEND) * factors, weights, order.places, TORCH_BACKEND)
    # [x, k, T] of factors: their sums over the copies
    totals = factors[:, 0][order.places].sum(0).T
    expected = x * (weights * totals).sum(-1, keepdim=True)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=0)
    grad = torch.randn(T, H, generator=made, dtype=torch.float64)
    ours = torch.autograd.grad(y, (x, weights), grad)
    for actual, right in zip(ours, torch.autograd.grad(expected, (x, weights), grad), strict=True):
        torch.testing.assert_close(actual, right, rtol=1e-12, atol=1e-12)


def test_rows_arrive_by_rank_and_are_put_by_expert() -> None:
    received = torch.tensor([[2, 1], [0, 2], [1, 0]])  # of three ranks, for two experts
    rows = ["a0", "a0'", "a1", "b1", "b1'", "c0"]
    order = arrival_order(received, 6)
    assert [rows[i] for i in order] == ["a0", "a0'", "c0", "a1", "b1", "b1'"]


def test_16_bit_rows_are_summed_in_float32() -> None:
    rows = torch.tensor([[256.0], [1.0], [1.0]]).bfloat16()  # 257 has no bfloat16, 258 has
    places = torch.tensor([[[0], [1], [2]]])
    y = combined_rows(rows, torch.ones(1, 3), places, TORCH_BACKEND)
    assert y.dtype == torch.bfloat16 and y.item() == 258
