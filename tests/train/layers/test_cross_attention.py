"""Cross attention against its formula: other lengths and widths, both split, masks, traffic."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mpctl.train.kernels.counter_rng import CounterRNG
from mpctl.train.layers.attention import ParallelCrossAttention
from mpctl.train.layers.context_parallel import NO_CP
from mpctl.train.layers.parameters import partial_kind, shard_of
from mpctl.train.transport.group import Group
from mpctl.train.transport.timing import Collective
from tests.threads import run_ranks
from tests.train.layers.build import make_cross_attention
from tests.train.layers.oracle import (
    axes,
    close,
    copies,
    dropped,
    fill,
    gradients,
    grouped,
    held,
    joined,
    logged,
    numbers,
    sum_gradients,
    whole,
)

B, Q, S, H, A, D = 2, 4, 12, 16, 4, 4
SAMPLES = torch.tensor([3, 9])
REAL = torch.ones(B, S, dtype=torch.bool)
REAL[0, 7:] = False
CASES = {"plain": (0.0, False), "mask": (0.0, True), "mask dropout": (0.3, True)}
SCALE = 0.7


def _made(case: str, group: Group, split: bool = False, cp: Group = NO_CP) -> ParallelCrossAttention:
    made = make_cross_attention(
        H,
        A,
        tp=group,
        rng_site="x",
        dropout=CASES[case][0],
        scale=SCALE,
        recompute=True,
        sequence_parallel=split,
        cp=cp,
        dtype=torch.float64,
    )
    fill(made)
    return made


def _run(rank: int, size: int, split: bool) -> dict:
    results = {}
    for case, (_, masked) in CASES.items():
        log: list[Collective] = []
        group = grouped(rank, size, log)
        module = _made(case, group, split)

        def own(x: Tensor) -> Tensor:
            return x.chunk(size, 1)[rank].clone() if split else x

        x = own(numbers(B, Q, H, seed=8)).requires_grad_()
        context = own(numbers(B, S, H, seed=7)).requires_grad_()
        mask = REAL[:, None, None] if masked else None
        y = module(x, context, CounterRNG(5, 6, SAMPLES), mask=mask)
        forward = len(log)
        y.backward(own(numbers(B, Q, H, seed=9)))
        traffic = [logged(log[:forward]), logged(log[forward:])]
        for parameter in module.parameters():
            if partial_kind(parameter):
                group.all_reduce(parameter.grad)
        results[case] = [y.detach(), x.grad, context.grad, gradients(module), traffic]
    return results


def _formula(case: str, w: dict[str, Tensor], x: Tensor, context: Tensor) -> Tensor:
    p, masked = CASES[case]
    q = (x @ w["query.weight"].T + w["query.bias"]).unflatten(-1, (A, D))
    kv = (context @ w["key_value.weight"].T + w["key_value.bias"]).unflatten(-1, (2, A, D))
    scores = torch.einsum("bqad,bkad->baqk", q, kv[:, :, 0]) * SCALE
    shares = scores.exp() * (REAL[:, None, None] if masked else 1)
    shares = shares / shares.sum(-1, keepdim=True)
    ones = torch.ones(B, A, Q, S, dtype=torch.float64)
    shares = shares * dropped(ones, CounterRNG(5, 6, SAMPLES), p, rng_site="x", heads=range(A))
    out = torch.einsum("baqk,bkad->bqad", shares, kv[:, :, 1]).flatten(2)
    return out @ w["output.weight"].T + w["output.bias"]


@pytest.mark.parametrize(("size", "split"), [(1, False), (2, False), (4, False), (4, True)])
def test_cross_attention_against_its_formula(size: int, split: bool) -> None:
    results = [_run(0, 1, split)] if size == 1 else run_ranks(_run, size, split)
    for case in CASES:
        w = copies(_made(case, Group()))
        x, context = numbers(B, Q, H, seed=8), numbers(B, S, H, seed=7)
        y = _formula(case, w, x.requires_grad_(), context.requires_grad_())
        y.backward(numbers(B, Q, H, seed=9))
        parts = [result[case] for result in results]
        for place, expected in enumerate((y.detach(), x.grad, context.grad)):
            if split:
                close(torch.cat([part[place] for part in parts], 1), expected)
            else:
                for part in parts:
                    close(part[place], expected)
        for name, leaf in w.items():
            close(whole([part[3][name] for part in parts]), leaf.grad)


def _run_context(rank: int, size: int) -> dict:
    """cp alone: this rank's rows of decoder and encoder, whose lengths differ."""
    results = {}
    for case, (_, masked) in CASES.items():
        log: list[Collective] = []
        tp, cp = axes(rank, 1, size, log)
        module = _made(case, tp, cp=cp)
        x = held(numbers(B, Q, H, seed=8), tp, cp).requires_grad_()
        context = held(numbers(B, S, H, seed=7), tp, cp).requires_grad_()
        mask = REAL[:, None, None] if masked else None
        y = module(x, context, CounterRNG(5, 6, SAMPLES), mask=mask)
        y.backward(held(numbers(B, Q, H, seed=9), tp, cp))
        traffic = logged(log)
        sum_gradients(module, tp, cp)
        results[case] = [y.detach(), x.grad, context.grad, gradients(module), traffic]
    return results


def test_both_sequences_split_over_context_parallel_ranks() -> None:
    results, message = run_ranks(_run_context, 2), 2 * B * A * S * D * 8
    for case in CASES:
        w = copies(_made(case, Group()))
        x, context = numbers(B, Q, H, seed=8), numbers(B, S, H, seed=7)
        y = _formula(case, w, x.requires_grad_(), context.requires_grad_())
        y.backward(numbers(B, Q, H, seed=9))
        parts = [result[case] for result in results]
        for place, expected in enumerate((y.detach(), x.grad, context.grad)):
            close(joined([part[place] for part in parts], 1, 2), expected)
        for name, leaf in w.items():
            close(whole([part[3][name] for part in parts]), leaf.grad)
        for part in parts:
            assert part[4] == [(kind, "cp", message, "float64") for kind in ("all_gather", "reduce_scatter")]


def test_one_all_reduce_forward_and_two_backward() -> None:
    query, context = B * Q * H * 8, B * S * H * 8
    for result in run_ranks(_run, 2, False):
        for forward, backward in (result[case][4] for case in CASES):
            assert forward == [("all_reduce", "tp", query, "float64")]
            kinds = [("all_reduce", "tp", size, "float64") for size in (query, context)]
            assert sorted(backward) == sorted(kinds)


def test_a_masked_token_of_the_context_does_not_matter() -> None:
    module, x, context = _made("mask", Group()), numbers(B, Q, H), numbers(B, S, H)
    mask = REAL[:, None, None]
    other = context.clone()
    other[~REAL] = 99.0
    close(module(x, context, mask=mask), module(x, other, mask=mask))
    assert (module(x, context) - module(x, other)).abs().max() > 1e-3


def test_weights_are_two_parts_and_bad_heads_are_refused() -> None:
    module = make_cross_attention(32, 4, tp=Group(1, 2), rng_site="x")
    assert shard_of(module.key_value.weight).blocks(0) == (range(16, 32), range(48, 64))
    assert "heads 2..4 of 4, d=8, causal=False, dropout=0.0" in repr(module)
    with pytest.raises(ValueError, match="3 is not divisible by 2"):
        make_cross_attention(24, 3, tp=Group(0, 2), rng_site="x")
