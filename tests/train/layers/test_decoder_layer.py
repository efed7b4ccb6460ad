"""T5's decoder layer against plain torch over tp x cp x sequence parallelism x recomputation."""

from __future__ import annotations

import math
from collections import Counter
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mpctl.train.kernels.counter_rng import CounterRNG
from mpctl.train.layers.context_parallel import context_positions
from mpctl.train.layers.relative_bias import RelativeBias
from mpctl.train.layers.shard_context import ShardContext
from mpctl.train.transport.group import Group
from mpctl.train.transport.timing import Collective
from tests.train.layers.build import make_decoder_layer
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
    saved_bytes,
    sum_gradients,
)

B, Q, S, H, A, D, FFN = 2, 8, 16, 16, 4, 6, 24
SAMPLES = torch.tensor([12, 7])
T5 = {"norm": "rmsnorm", "eps": 1e-6, "bias": False, "activation": "geglu_tanh", "scale": 1.0}
STYLES: dict[str, dict] = {
    "t5": T5,
    "t5 dropout": {**T5, "dropout": 0.1, "attention_dropout": 0.2},
    "plain": {"scale": 0.7},
}
CASES = [(style, kind) for style in STYLES for kind in KINDS]


def _made(style: str, kind: tuple[bool, str, bool], tp: Group, cp: Group):
    """The layer, and the table of the relative bias that a T5 adds."""
    split, recompute, partition = kind
    layer = make_decoder_layer(
        H,
        A,
        FFN,
        tp=tp,
        cp=cp,
        rng_site="layers.1",
        head_dim=D,
        sequence_parallel=split,
        recompute=recompute,
        partition_activations=partition,
        offload_activations=partition,
        dtype=torch.float64,
        **STYLES[style],
    )
    layer.relative = RelativeBias(8, 12, A, ShardContext(tp=tp, dtype=torch.float64), bidirectional=False)
    fill(layer)
    return layer


def _masks(style: str) -> tuple[Tensor | None, Tensor | None]:
    """Of the self attention [b, 1, q, q] and of the cross attention [b, 1, q, s]."""
    if style == "t5":
        return None, None
    own = (numbers(B, 1, Q, Q, seed=21) > -0.5) | torch.eye(Q, dtype=torch.bool)
    other = numbers(B, 1, Q, S, seed=22) > -0.5
    return (None if style == "plain" else own), other


def _one(rank: int, layout: tuple[int, int], style: str, kind: tuple[bool, str, bool]) -> list:
    """Output, gradients of hidden and context, of the weights, messages forward and backward."""
    log: list[Collective] = []
    (tp, cp), split = axes(rank, *layout, log), kind[0]
    layer, rows = _made(style, kind, tp, cp), context_positions(Q, cp.size, cp.rank)
    x = held(numbers(B, Q, H, seed=8), tp, cp, split).requires_grad_()
    y = held(numbers(B, S, H, seed=7), tp, cp, split).requires_grad_()
    mask, seen = (m if m is None else m[:, :, rows] for m in _masks(style))
    bias = layer.relative.at(rows, range(Q)) if "t5" in style else None
    z = layer(x, y, CounterRNG(5, 6, SAMPLES), bias=bias, mask=mask, context_mask=seen)
    forward = len(log)
    z.backward(held(numbers(B, Q, H, seed=9), tp, cp, split))
    traffic = [logged(log[:forward]), logged(log[forward:])]
    if bias is None:
        layer.relative = None
    sum_gradients(layer, tp, cp)
    return [z.detach(), x.grad, y.grad, gradients(layer), *traffic]


def _all(rank: int, _: int, layout: list[int]) -> list:
    return [_one(rank, tuple(layout), *case) for case in CASES]


def _attend(q: Tensor, k: Tensor, v: Tensor, style: str, site: str, scores: Tensor) -> Tensor:
    """scores: what is added to those of q and k, with -inf where nothing is seen."""
    q, k, v = (heads_of(part, D) for part in (q, k, v))
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * STYLES[style]["scale"] + scores
    shares = scores.exp() / scores.exp().sum(-1, keepdim=True)
    p = STYLES[style].get("attention_dropout", 0.0)
    site, rng = f"layers.1.{site}.probabilities", CounterRNG(5, 6, SAMPLES)
    drawn = dropped(torch.ones_like(shares), rng, p, rng_site=site, heads=range(A))
    return torch.einsum("bhqk,bhkd->bqhd", shares * drawn, v).flatten(2)


def _linear(w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)


def _norm(w: dict[str, Tensor], x: Tensor) -> Tensor:
    if "bias" not in w:
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * w["weight"]
    return F.layer_norm(x, (H,), w["weight"], w["bias"])


def _mlp(w: dict[str, Tensor], x: Tensor, gated: bool) -> Tensor:
    up = _linear(w, "up", x)
    if not gated:
        return _linear(w, "down", up * (1 + torch.erf(up / 2**0.5)) / 2)
    gate, up = up.split(FFN, -1)
    gate = gate * (1 + torch.tanh((2 / math.pi) ** 0.5 * (gate + 0.044715 * gate**3))) / 2
    return _linear(w, "down", gate * up)


def _formula(w: dict[str, Tensor], x: Tensor, y: Tensor, style: str) -> Tensor:
    ones, rng = torch.ones_like(x).detach(), CounterRNG(5, 6, SAMPLES)
    drawn = {
        name: dropped(ones, rng, STYLES[style].get("dropout", 0.0), rng_site=f"layers.1.{name}")
        for name in ("attention", "cross", "mlp")
    }
    causal = torch.full((Q, Q), -torch.inf, dtype=x.dtype).triu(1)
    mask, seen = (
        torch.zeros(1) if m is None else torch.zeros(m.shape).masked_fill(~m, -torch.inf) for m in _masks(style)
    )
    if "t5" in style:  # buckets of 8 to 12: 0..3 exact, then a new one at 4, 5.3, 6.9
        buckets = torch.tensor([0, 1, 2, 3, 4, 4, 5, 6])
        back = (torch.arange(Q)[:, None] - torch.arange(Q)).clamp(min=0)
        causal = causal + w["relative.weight"][buckets[back]].permute(2, 0, 1)
    inner = _norm(below(w, "attention_norm"), x)
    q, k, v = _linear(below(w, "attention"), "qkv", inner).chunk(3, -1)
    found = _attend(q, k, v, style, "attention", causal + mask)
    x = x + _linear(below(w, "attention"), "output", found) * drawn["attention"]
    q = _linear(below(w, "cross"), "query", _norm(below(w, "cross_norm"), x))
    k, v = _linear(below(w, "cross"), "key_value", y).chunk(2, -1)
    found = _attend(q, k, v, style, "cross", seen)
    x = x + _linear(below(w, "cross"), "output", found) * drawn["cross"]
    inner = _norm(below(w, "mlp_norm"), x)
    return x + _mlp(below(w, "mlp"), inner, "t5" in style) * drawn["mlp"]


@cache
def _expected(style: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    w = copies(_made(style, KINDS[0], Group(), Group()))
    x, y = numbers(B, Q, H, seed=8).requires_grad_(), numbers(B, S, H, seed=7).requires_grad_()
    z = _formula(w, x, y, style)
    z.backward(numbers(B, Q, H, seed=9))
    weights = {name: leaf.grad for name, leaf in w.items() if leaf.grad is not None}
    return [z.detach(), x.grad, y.grad], weights


@pytest.fixture(scope="module", params=LAYOUTS, ids=str)
def outcomes(request: pytest.FixtureRequest) -> tuple:
    """The layout and, for every case, what each rank found."""
    return request.param, run_cases(_one, _all, CASES, request.param)


def test_outputs_and_all_gradients_are_the_plain_ones(outcomes: tuple) -> None:
    layout, found = outcomes
    for (style, kind), ranks in zip(CASES, found, strict=True):
        assert_as_formula(ranks, _expected(style), layout, kind)


def _law(layout: tuple[int, int], style: str, kind: tuple[bool, str, bool]) -> list[Counter]:
    """Messages forward and backward by (kind, axis, bytes), as transformer_layer.py states them."""
    (tp, cp), (split, recompute, partition) = layout, kind
    forward, backward = Counter(), Counter()
    row = B * H * 8 // cp  # a rank of cp sends a c-th of the rows over tp
    q, s = ("tp", Q * row), ("tp", S * row)
    if split:
        forward += {("all_gather", *q): 3, ("all_gather", *s): 1, ("reduce_scatter", *q): 3}
        backward += {("all_gather", *q): 6, ("all_gather", *s): 1}
        backward += {("reduce_scatter", *q): 3, ("reduce_scatter", *s): 1}
    else:
        forward += {("all_reduce", *q): 3}
        backward += {("all_reduce", *q): 3, ("all_reduce", *s): 1}
    for length in (Q, S):
        pair = ("cp", 2 * B * A // tp * length * D * 8)
        forward += {("all_gather", *pair): 1}
        backward += {("reduce_scatter", *pair): 1}
    if recompute == "full":
        backward += forward
        if "dropout" not in style:
            backward -= {("reduce_scatter" if split else "all_reduce", *q): 1}
    if partition:
        backward += {("all_gather", *q): 1}
    alone = [axis for axis, size in (("tp", tp), ("cp", cp)) if size == 1]
    return [Counter({sent: n for sent, n in law.items() if sent[1] not in alone}) for law in (forward, backward)]


def test_every_message_is_counted_by_the_law(outcomes: tuple) -> None:
    layout, found = outcomes
    for case, ranks in zip(CASES, found, strict=True):
        for rank in ranks:
            for log, law in zip(rank[4:6], _law(layout, *case), strict=True):
                assert Counter(entry[:3] for entry in log) == law, case


def test_full_recomputation_keeps_the_input_and_the_one_context() -> None:
    layer = _made("t5 dropout", (False, "full", False), Group(), Group())
    x, y = (numbers(B, n, H).requires_grad_() for n in (Q, S))
    rng = CounterRNG(5, 6, SAMPLES)
    assert saved_bytes(lambda: layer(x, y, rng)) == B * (Q + S) * H * 8
    assert saved_bytes(lambda: layer(layer(x, y, rng), y, rng)) == B * (2 * Q + S) * H * 8


def test_bad_settings_are_refused_and_repr_shows_the_parts() -> None:
    common = {"tp": Group(), "rng_site": "x"}
    with pytest.raises(ValueError, match=r"\(set recompute to full\)"):
        make_decoder_layer(H, A, FFN, offload_activations=True, **common)
    with pytest.raises(ValueError, match="'batch' is not one of layernorm, rmsnorm"):
        make_decoder_layer(H, A, FFN, norm="batch", **common)
    text = repr(make_decoder_layer(H, A, FFN, scale=1.0, recompute="full", **common))
    assert "rng_site=x, dropout=0.0, recompute=full\n" in text
    inner = "heads 0..4 of 4, d=4, causal=False, dropout=0.0, scale=1.0, t=1"
    assert f"(cross): ParallelCrossAttention(\n    {inner}\n" in text
