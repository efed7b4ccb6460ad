"""Sequence exchanged for heads over cp against the whole: outputs, gradients, dropout, traffic."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mpctl.train.kernels.counter_rng import CounterRNG
from mpctl.train.kernels.masks import partly_bidirectional_mask
from mpctl.train.kernels.rotary import Rotary
from mpctl.train.layers.context_exchange import to_heads, to_positions
from mpctl.train.layers.latent_attention import LatentAttentionConfig
from mpctl.train.layers.shard_context import ShardContext
from mpctl.train.transport.group import Group
from mpctl.train.transport.timing import Collective
from tests.threads import run_ranks
from tests.train.layers.build import make_attention, make_cross_attention
from tests.train.layers.oracle import axes, close, context_split, fill, grouped, held, joined, logged, numbers

B, S, H, A, D = 2, 16, 16, 4, 4
SAMPLES, PREFIX = torch.tensor([12, 7]), torch.tensor([5, 11])
ROTARY = {"rotary": Rotary(D, 100.0)}
CASES: dict[str, dict[str, Any]] = {
    "causal": {},
    "grouped": {**ROTARY, "kv_heads": 2, "dropout": 0.3},
    "recomputed": {"dropout": 0.3, "recompute": True},
    "window": {**ROTARY, "window": 3, "dropout": 0.2},
    "slopes": {"alibi": True},
    "norms": {**ROTARY, "qk_norm": "rmsnorm", "kv_heads": 2},
    "both ways": {"causal": False, "dropout": 0.3},
    "glm": {"causal": False, "mask": True},
    "latent": {"dropout": 0.3},
    "latent, of hidden states": {"q_lora_rank": None, "window": 5},
}
LATENT = {"kv_lora_rank": 6, "qk_nope_head_dim": 3, "qk_rope_head_dim": 2, "v_head_dim": 5, "q_lora_rank": 7}


def made(name: str, context: ShardContext) -> Any:
    wanted = {key: value for key, value in CASES[name].items() if key != "mask"}
    if name.startswith("latent"):
        module = LatentAttentionConfig(H, A, **{**LATENT, "rotary": Rotary(2, 100.0), **wanted}).build(context, "x")
    else:
        shared = {"tp": context.tp, "cp": context.cp, "sequence_parallel": context.sequence_parallel}
        exchanges = context.exchanges_heads
        module = make_attention(
            H, A, "x", head_dim=D, dtype=torch.float64, exchanges_heads=exchanges, **shared, **wanted
        )
    fill(module)
    return module


def run(rank: int, _: int, tp: int, cp: int, splits: bool, *names: str) -> dict[str, list[Any]]:
    over_tp, over_cp = axes(rank, tp, cp)
    context = ShardContext(over_tp, over_cp, splits, torch.float64, exchanges_heads=cp > 1)
    results = {}
    for name in names:
        module = made(name, context)
        x = held(numbers(B, S, H, seed=8), over_tp, over_cp, splits).requires_grad_()
        mask = {}
        if "mask" in CASES[name]:
            mask = {"mask": partly_bidirectional_mask(PREFIX, S, queries=context.query_rows(S, x.device))}
        y = module(x, CounterRNG(5, 6, SAMPLES), **mask)
        y.backward(held(numbers(B, S, H, seed=9), over_tp, over_cp, splits))
        results[name] = [y.detach(), x.grad, [p.grad for p in module.parameters()]]
    return results


@pytest.mark.parametrize(("cp", "names"), [(2, list(CASES)), (4, ["causal", "recomputed", "window", "latent"])])
def test_heads_for_sequence_against_the_whole(cp: int, names: list[str]) -> None:
    whole, ranks = run(0, 1, 1, 1, False, *names), run_ranks(run, cp, 1, cp, False, *names)
    for name in names:
        for place in (0, 1):
            close(joined([rank[name][place] for rank in ranks], 1, cp), whole[name][place])
        for grads, expected in zip(zip(*(rank[name][2] for rank in ranks), strict=True), whole[name][2], strict=True):
            close(torch.stack(grads).sum(0), expected)


@pytest.mark.parametrize("splits", [False, True])
def test_tp_splits_the_heads_first(splits: bool) -> None:
    names = ["causal", "recomputed", "slopes", "both ways", "latent"]
    whole, ranks = run(0, 1, 1, 1, False, *names), run_ranks(run, 4, 2, 2, splits, *names)
    for name in names:
        for place in (0, 1):
            close(joined([rank[name][place] for rank in ranks], 2, 2, splits), whole[name][place])


def traffic(rank: int, size: int) -> list[Any]:
    log: list[Collective] = []
    cp = grouped(rank, size, log, "cp")
    module = made("grouped", ShardContext(cp=cp, exchanges_heads=True))
    y = module(context_split(numbers(B, S, H), cp).requires_grad_(), CounterRNG(5, 6, SAMPLES))
    forward = len(log)
    y.sum().backward()
    return [logged(log[:forward]), logged(log[forward:])]


def test_two_exchanges_forward_and_two_backward() -> None:
    """4 query and 2 + 2 kv heads of 4 columns, then the 4 heads of the result."""
    rows = B * S // 2 * D * 8
    inputs, result = [("all_to_all", "cp", n * rows, "float64") for n in (8, 4)]
    for forward, backward in run_ranks(traffic, 2):
        assert (forward, backward) == ([inputs, result], [result, inputs])


def there_and_back(rank: int, size: int) -> bool:
    cp = grouped(rank, size, name="cp")
    part = context_split(numbers(B, A, S, D), cp, dim=2)
    (heads,) = to_heads([part], cp)
    own = numbers(B, A, S, D)[:, rank * A // size : (rank + 1) * A // size]
    return torch.equal(heads, own) and torch.equal(to_positions(heads, cp), part)


def test_heads_in_order_of_positions_and_back() -> None:
    assert all(run_ranks(there_and_back, 4))


def test_what_cannot_be_exchanged() -> None:
    cp = Group(0, 3, name="cp")
    with pytest.raises(ValueError, match="use cp_comm all_gather"):
        make_cross_attention(H, A, "x", cp=cp, exchanges_heads=True)
    with pytest.raises(ValueError, match="4 heads over 3 ranks of cp"):
        to_heads([numbers(B, A, 6, D)], cp)
