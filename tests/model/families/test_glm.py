"""GLM against a reference written from the paper (Du et al., arXiv 2103.10360), in float64.

The example is its figure 2: x1 .. x6 with the blanks x3 and x5 x6, the second filled first.
    tokens      x1 x2 M x4 M | S x5 x6 S x3
    targets                  | x5 x6 E x3 E
    position 1  1  2  3 4  5 | 5  5  5 3  3
    position 2  0  0  0 0  0 | 1  2  3 1  2
The reference knows nothing of groups, kernels or masks of ours: loops over heads and pairs.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mpctl.spec.model import ModelSpec
from mpctl.spec.training import TrainingSpec
from mpctl.train.families.implementation import Batch, build_module
from mpctl.train.layers.parameters import initialise, shard_of
from mpctl.train.layers.shard_context import ShardContext
from mpctl.train.transport.group import Group
from tests.threads import run_ranks
from tests.train.layers.oracle import gradients, grouped, whole

SHAPE: dict[str, Any] = {
    "family": "glm",
    "layers": 2,
    "hidden": 32,
    "heads": 4,
    "vocab": 50,
    "seq_length": 10,
    "activation": "gelu_tanh",
}
MASK, START, END = 47, 48, 49
TOKENS = [11, 12, MASK, 14, MASK, START, 15, 16, START, 13]
TARGETS = [15, 16, END, 13, END]
PLACES = [1, 2, 3, 4, 5, 5, 5, 5, 3, 3]
BLOCKS = [0, 0, 0, 0, 0, 1, 2, 3, 1, 2]
CONTEXT = 5
Weights = dict[str, Tensor]


def reference(w: Weights) -> Tensor:
    """Logits [10, 50] of the figure's sample."""
    h = torch.stack(
        [
            w["embedding.word.weight"][token]
            + w["embedding.position.weight"][place]
            + w["embedding.block.weight"][block]
            for token, place, block in zip(TOKENS, PLACES, BLOCKS, strict=True)
        ]
    )
    for layer in range(SHAPE["layers"]):
        named = {k.removeprefix(f"layers.{layer}."): v for k, v in w.items()}
        h = h + attention(normed(h, named, "attention_norm"), named)
        inner = F.linear(normed(h, named, "mlp_norm"), named["mlp.up.weight"], named["mlp.up.bias"])
        inner = 0.5 * inner * (1 + torch.tanh(math.sqrt(2 / math.pi) * (inner + 0.044715 * inner**3)))
        h = h + F.linear(inner, named["mlp.down.weight"], named["mlp.down.bias"])
    return normed(h, w, "final_norm") @ w["embedding.word.weight"][: SHAPE["vocab"]].T


def normed(h: Tensor, w: Weights, name: str) -> Tensor:
    mean, variance = h.mean(-1, keepdim=True), h.var(-1, correction=0, keepdim=True)
    return (h - mean) / (variance + 1e-5).sqrt() * w[f"{name}.weight"] + w[f"{name}.bias"]


def attention(h: Tensor, w: Weights) -> Tensor:
    """Part A is seen by all; of part B a token sees itself and what stands before it."""
    fused = F.linear(h, w["attention.qkv.weight"], w["attention.qkv.bias"])
    d = SHAPE["hidden"] // SHAPE["heads"]
    q, k, v = (part.unflatten(-1, (SHAPE["heads"], d)) for part in fused.chunk(3, -1))
    rows = []
    for i in range(len(h)):
        seen = [j for j in range(len(h)) if j < CONTEXT or j <= i]
        heads = []
        for head in range(SHAPE["heads"]):
            scores = torch.stack([(q[i, head] * k[j, head]).sum() / math.sqrt(d) for j in seen])
            shares = scores.exp() / scores.exp().sum()
            heads.append((shares[:, None] * v[seen, head]).sum(0))
        rows.append(torch.cat(heads))
    return F.linear(torch.stack(rows), w["attention.output.weight"], w["attention.output.bias"])


def _rank(rank: int, size: int) -> dict[str, Any]:
    group = grouped(rank, size)
    model = build_module(ModelSpec(**SHAPE), TrainingSpec(init_std=0.2), ShardContext(group, dtype=torch.float64))
    initialise(model, 7)
    with torch.no_grad():  # zeros and ones would hide a forgotten bias
        for p in model.parameters():
            p.add_(0.1) if p.dim() == 1 else None
    logits = model(batch_of(TOKENS))
    # [1, 10, v/t] -> the log-likelihood needs all words: a weighted sum of logits does as well
    first = model.get_submodule("embedding.word").vocab_range.start
    (logits[0] * wanted()[:, first : first + logits.shape[-1]]).sum().backward()
    values = {name: (p.data, shard_of(p)) for name, p in model.named_parameters()}
    return {"logits": logits.detach(), "values": values, "gradients": gradients(model)}


def batch_of(*tokens: list[int]) -> Batch:
    rows = {
        "tokens": list(tokens),
        "positions": [PLACES] * len(tokens),
        "blocks": [BLOCKS] * len(tokens),
        "context": [CONTEXT] * len(tokens),
    }
    fields = {name: torch.tensor(row) for name, row in rows.items()}
    return Batch(torch.arange(len(tokens)), fields)


def wanted() -> Tensor:
    return torch.randn(10, SHAPE["vocab"], generator=torch.Generator().manual_seed(3)).double()


@pytest.mark.parametrize("tp", [1, 2])
def test_logits_and_gradients_are_the_papers(tp: int) -> None:
    ranks = run_ranks(_rank, tp)
    values = ranks[0]["values"]
    weights = {n: whole([rank["values"][n] for rank in ranks]).requires_grad_() for n in values}
    logits = torch.cat([rank["logits"] for rank in ranks], -1)[0]
    expected = reference(weights)
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)
    (expected * wanted()).sum().backward()
    for name, weight in weights.items():
        assert weight.grad is not None
        found = whole([rank["gradients"][name] for rank in ranks])
        scale = weight.grad.abs().max()
        assert (found - weight.grad).abs().max() <= 1e-10 * scale, name


def test_a_word_of_a_blank_is_not_told_by_later_ones() -> None:
    """What figure 2's mask is for: changing x3, read last, changes no earlier prediction."""
    model = build_module(ModelSpec(**SHAPE), TrainingSpec(init_std=0.2), ShardContext(Group(), dtype=torch.float64))
    initialise(model, 7)
    other = [*TOKENS[:-1], 20]
    with torch.no_grad():
        logits = model(batch_of(TOKENS, other))
    assert torch.equal(logits[0, :-1], logits[1, :-1])
    assert not torch.equal(logits[0, -1], logits[1, -1])
