"""The post-norm layer, BERT's, against plain torch over tp x cp x sequence parallelism."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
import torch
from torch import Tensor

from mpctl.train.kernels.counter_rng import CounterRNG
from mpctl.train.transport.group import Group
from mpctl.train.transport.timing import Collective
from tests.train.layers import oracle
from tests.train.layers.build import make_layer
from tests.train.layers.layer_cases import KINDS, LAYOUTS, assert_as_formula, run_cases
from tests.train.layers.oracle import (
    axes,
    below,
    copies,
    dropped,
    fill,
    gradients,
    heads_of,
    held,
    logged,
    numbers,
    sum_gradients,
)

B, S, H, A, D = 2, 8, 16, 4, 4
SAMPLES = torch.tensor([12, 7])
REAL = torch.ones(B, S, dtype=torch.bool)
REAL[0, 5:] = False
DROPOUTS = (0.0, 0.1)
CASES = [(p, kind) for p in DROPOUTS for kind in KINDS]


def _made(p: float, kind: tuple[bool, str, bool], tp: Group, cp: Group, order: str = "post"):
    split, recompute, partition = kind
    layer = make_layer(
        H,
        A,
        4 * H,
        tp=tp,
        cp=cp,
        rng_site="layers.1",
        norm_order=order,
        causal=False,
        eps=1e-12,
        dropout=p,
        attention_dropout=p,
        sequence_parallel=split,
        recompute=recompute,
        partition_activations=partition,
        offload_activations=partition,
        dtype=torch.float64,
    )
    fill(layer)
    return layer


def _one(rank: int, layout: tuple[int, int], p: float, kind: tuple[bool, str, bool]) -> list:
    """Output, gradients of the input and of the weights, messages forward and backward."""
    log: list[Collective] = []
    (tp, cp), split = axes(rank, *layout, log), kind[0]
    layer = _made(p, kind, tp, cp)
    x = held(numbers(B, S, H, seed=8), tp, cp, split).requires_grad_()
    y = layer(x, CounterRNG(5, 6, SAMPLES), mask=REAL[:, None, None])
    forward = len(log)
    y.backward(held(numbers(B, S, H, seed=9), tp, cp, split))
    traffic = [logged(log[:forward]), logged(log[forward:])]
    sum_gradients(layer, tp, cp)
    return [y.detach(), x.grad, gradients(layer), *traffic]


def _all(rank: int, _: int, layout: list[int]) -> list:
    return [_one(rank, tuple(layout), *case) for case in CASES]


def _attention(w: dict[str, Tensor], x: Tensor, factor: Tensor) -> Tensor:
    q, k, v = (heads_of(part, D) for part in (x @ w["qkv.weight"].T + w["qkv.bias"]).chunk(3, -1))
    shares = (torch.einsum("bhqd,bhkd->bhqk", q, k) / D**0.5).exp() * REAL[:, None, None]
    shares = shares / shares.sum(-1, keepdim=True) * factor
    found = torch.einsum("bhqk,bhkd->bqhd", shares, v).flatten(2)
    return found @ w["output.weight"].T + w["output.bias"]


def _norm(w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return oracle.norm(w[f"{name}.weight"], w[f"{name}.bias"], x, 1e-12)


@cache
def _expected(p: float) -> tuple[list[Tensor], dict[str, Tensor]]:
    w, rng = copies(_made(p, KINDS[0], Group(), Group())), CounterRNG(5, 6, SAMPLES)
    ones = torch.ones(B, S, H, dtype=torch.float64)
    drawn = [dropped(ones, rng, p, rng_site=f"layers.1.{name}") for name in ("attention", "mlp")]
    ones = torch.ones(B, A, S, S, dtype=torch.float64)
    site = "layers.1.attention.probabilities"
    factor = dropped(ones, rng, p, rng_site=site, heads=range(A))
    x = numbers(B, S, H, seed=8).requires_grad_()
    y = _norm(w, "attention_norm", x + _attention(below(w, "attention"), x, factor) * drawn[0])
    y = _norm(w, "mlp_norm", y + oracle.mlp(below(w, "mlp"), y) * drawn[1])
    y.backward(numbers(B, S, H, seed=9))
    return [y.detach(), x.grad], {name: leaf.grad for name, leaf in w.items()}


@pytest.fixture(scope="module", params=LAYOUTS, ids=str)
def outcomes(request: pytest.FixtureRequest) -> tuple:
    """The layout and, for every case, what each rank found."""
    return request.param, run_cases(_one, _all, CASES, request.param)


def test_outputs_and_all_gradients_are_the_plain_ones(outcomes: tuple) -> None:
    layout, found = outcomes
    for (p, kind), ranks in zip(CASES, found, strict=True):
        assert_as_formula(ranks, _expected(p), layout, kind)


def test_a_second_forward_repeats_every_message(outcomes: tuple) -> None:
    """The last norm needs its input: without dropout too, the last reduction runs again."""
    (tp, cp), found = outcomes
    for (p, (split, recompute, partition)), ranks in zip(CASES, found, strict=True):
        if split:
            forward = Counter(all_gather=2, reduce_scatter=2)
            backward = Counter(all_gather=4, reduce_scatter=2)
        else:
            forward, backward = Counter(all_reduce=2), Counter(all_reduce=2)
        if recompute == "full":
            backward += forward
        backward += Counter(all_gather=int(partition))
        for rank in ranks:
            for log, law in zip(rank[3:5], (forward, backward), strict=True):
                sent = [entry for entry in log if entry[1] == "tp"]
                assert Counter(entry[0] for entry in sent) == (law if tp > 1 else {}), (p, split)
                assert {entry[2] for entry in sent} <= {B * S // cp * H * 8}


def test_names_are_those_of_the_pre_norm_layer_and_the_order_matters() -> None:
    post, pre = (_made(0.0, KINDS[0], Group(), Group(), order) for order in ("post", "pre"))
    assert list(post.state_dict()) == list(pre.state_dict())
    x = numbers(B, S, H)
    assert (post(x) - pre(x)).abs().max() > 0.1
    assert "order=post" in repr(post) and "order" not in repr(pre)
    with pytest.raises(ValueError, match="'both' is not one of pre, post"):
        _made(0.0, KINDS[0], Group(), Group(), "both")
