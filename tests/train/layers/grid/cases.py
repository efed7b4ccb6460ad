"""Modules, forward and backward, on any context: of one rank, and of a rank of a grid."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mpctl.train.kernels.counter_rng import CounterRNG
from mpctl.train.kernels.rotary import Rotary
from mpctl.train.layers.attention import AttentionConfig, ParallelSelfAttention
from mpctl.train.layers.config import LayerConfig
from mpctl.train.layers.linear import WEIGHTS
from mpctl.train.layers.mlp import MLPConfig, ParallelMLP
from mpctl.train.layers.parameters import take
from mpctl.train.layers.shard_context import ShardContext
from mpctl.train.layers.transformer_layer import ParallelTransformerLayer
from tests.train.layers.grid.grids import activation, held, passed, summed_gradients
from tests.train.layers.oracle import Part, fill, numbers

# 3 and 4 parts divide all but the sequence; 31 or 10 words in 36 rows leave ranks with a few words
# and with none.
B, S, H, A, FFN, V, ROWS = 12, 5, 24, 12, 48, 31, 36
SHAPE = (B, S, H)
SAMPLES = torch.arange(B).mul(7).add(3)
DROPOUT = 0.2

GPT = AttentionConfig(H, A, dropout=DROPOUT)
LLAMA = AttentionConfig(H, A, kv_heads=6, rotary=Rotary(2), bias=False)
LAYERS = {
    "gpt": LayerConfig(GPT, MLPConfig(H, FFN, "gelu_tanh"), dropout=DROPOUT),
    "llama": LayerConfig(
        replace(LLAMA, dropout=DROPOUT), MLPConfig(H, FFN, "swiglu", bias=False), norm="rmsnorm", dropout=DROPOUT
    ),
}

Case = Callable[[ShardContext], dict[str, Part]]


def rng() -> CounterRNG:
    return CounterRNG(seed=5, step=6, samples=SAMPLES)


class _Pair(nn.Module):
    """A column- and a row-parallel layer with something elementwise between them."""

    def __init__(self, context: ShardContext, parts: tuple[int, ...], bias: bool) -> None:
        super().__init__()
        layers = context.layers
        self.up = layers.column_linear(H, sum(parts), bias=bias, init=WEIGHTS, parts=parts)
        self.down = layers.row_linear(FFN, H, bias=bias, init=WEIGHTS)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.up(x).chunk(2, -1)
        result: Tensor = self.down(torch.tanh(first) * second)
        return result


def pair(context: ShardContext, *, bias: bool) -> dict[str, Part]:
    module = _Pair(context, (FFN, FFN), bias)
    fill(module)
    return passed(context, module, SHAPE)


def column(context: ShardContext, *, parts: tuple[int, ...]) -> dict[str, Part]:
    """Of a column-parallel layer alone, whose result is inside: fused parts are cut one by one."""
    module = context.layers.column_linear(H, sum(parts), bias=True, init=WEIGHTS, parts=parts)
    fill(module)
    inside = activation(context, (B, S, sum(parts)), inside=True, parts=parts)
    x = held(context, *SHAPE, seed=8).requires_grad_()
    y = module(x)
    y.backward(take(inside, numbers(B, S, sum(parts), seed=9)))
    assert x.grad is not None
    return {"y": (y.detach(), inside), "dx": (x.grad, activation(context, SHAPE)), **summed_gradients(module, context)}


def norm(context: ShardContext, *, kind: Any, offset: float) -> dict[str, Part]:
    """offset: added to the rows, so that their mean is large beside their spread."""
    module = context.norm(kind, H, eps=1e-5)
    fill(module)
    with torch.no_grad():
        module.weight.add_(1.0)
    return passed(context, nn.Sequential(_Plus(offset), module), SHAPE)


class _Plus(nn.Module):
    def __init__(self, offset: float) -> None:
        super().__init__()
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        return x + self.offset


def attention(context: ShardContext, *, config: AttentionConfig) -> dict[str, Part]:
    module = ParallelSelfAttention(config, context, "layers.1")
    fill(module)
    return passed(context, module, SHAPE, rng())


def positions(context: ShardContext) -> dict[str, Part]:
    """Rotary positions of each sample's own, as packed documents have them."""
    module = ParallelSelfAttention(LLAMA, context, "layers.1")
    fill(module)
    rows = torch.arange(B * S).view(B, S) % 7
    return passed(context, _Placed(module, rows), SHAPE)


class _Placed(nn.Module):
    def __init__(self, attention: nn.Module, rows: Tensor) -> None:
        super().__init__()
        self.attention, self.rows = attention, rows

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.attention(x, positions=self.rows)
        return result


def mlp(context: ShardContext, *, activation: Any, bias: bool) -> dict[str, Part]:
    module = ParallelMLP(MLPConfig(H, FFN, activation, bias=bias), context)
    fill(module)
    return passed(context, module, SHAPE)


def layer(context: ShardContext, *, family: str, **changes: Any) -> dict[str, Part]:
    module = ParallelTransformerLayer(replace(LAYERS[family], **changes), context, "layers.1")
    fill(module)
    return passed(context, module, SHAPE, rng())


class _Words(nn.Module):
    """Word table, positions, head and loss without any layer between."""

    def __init__(self, context: ShardContext, vocab: int, tied: bool) -> None:
        super().__init__()
        layers, self.context, self.vocab = context.layers, context, vocab
        table = {"padded_vocab": ROWS, "init": WEIGHTS}
        self.words = layers.word_embedding(vocab, H, **table)
        self.places = context.replicated_table(S + 2, H, init=WEIGHTS)
        self.head = None if tied else layers.output_head(vocab, H, **table)

    def forward(self, tokens: Tensor, targets: Tensor, rows: Tensor | None = None) -> Tensor:
        context = self.context
        hidden = self.words(tokens)
        own = range(1, S + 1) if rows is None else context.own_rows(rows)
        hidden = torch.tanh(hidden + self.places(own))
        logits = self.words.logits(hidden) if self.head is None else self.head(hidden)
        own = context.own_words(self.vocab, padded_vocab=ROWS)
        return context.cross_entropy(logits, targets, words=own)


def words(context: ShardContext, *, vocab: int, tied: bool, placed: bool = False) -> dict[str, Part]:
    module = _Words(context, vocab, tied)
    fill(module)
    tokens, targets = (_tokens(seed, vocab) for seed in (1, 2))
    losses = module(tokens, targets, _tokens(3, S + 2) if placed else None)
    own = activation(context, (B, S), inside=True)
    losses.backward(take(own, numbers(B, S, seed=4)))
    return {"losses": (losses.detach(), own), **summed_gradients(module, context)}


def _tokens(seed: int, vocab: int) -> Tensor:
    return torch.randint(0, vocab, (B, S), generator=torch.Generator().manual_seed(seed))


def cross_entropy(context: ShardContext) -> dict[str, Part]:
    """Of logits that are given, large ones, with a target that no rank has a word for."""
    shard = activation(context, (B, S, ROWS), inside=True)
    logits = take(shard, numbers(B, S, ROWS, seed=6) * 40).requires_grad_()
    targets = _tokens(2, V)
    targets[0, 0] = targets[-1, 2] = -100
    words = context.own_words(V, padded_vocab=ROWS)
    losses = context.cross_entropy(logits, targets, words=words)
    own = activation(context, (B, S), inside=True)
    losses.backward(take(own, numbers(B, S, seed=4)))
    assert logits.grad is not None
    return {"losses": (losses.detach(), own), "dlogits": (logits.grad, shard)}


PRODUCTS: dict[str, Case] = {
    "pair": partial(pair, bias=True),
    "pair without bias": partial(pair, bias=False),
    "column": partial(column, parts=(36,)),
    "column of fused parts": partial(column, parts=(24, 12, 12)),
    "layernorm": partial(norm, kind="layernorm", offset=0.0),
    "layernorm far from zero": partial(norm, kind="layernorm", offset=30.0),
    "rmsnorm": partial(norm, kind="rmsnorm", offset=0.5),
    "mlp": partial(mlp, activation="gelu_tanh", bias=True),
    "gated mlp": partial(mlp, activation="swiglu", bias=False),
}
ATTENTION: dict[str, Case] = {
    "attention": partial(attention, config=replace(GPT, dropout=0.0)),
    "attention with dropout": partial(attention, config=GPT),
    "shared heads, rotary": partial(attention, config=LLAMA),
    "shared heads, rotary, dropout": partial(attention, config=replace(LLAMA, dropout=DROPOUT)),
    "wide heads": partial(attention, config=AttentionConfig(H, A, head_dim=4)),
    "positions of each sample": positions,
}
VOCABULARY: dict[str, Case] = {
    "tied": partial(words, vocab=V, tied=True),
    "untied": partial(words, vocab=V, tied=False),
    "untied, ranks without words": partial(words, vocab=10, tied=False),
    "tied, positions of each sample": partial(words, vocab=V, tied=True, placed=True),
    "cross entropy": cross_entropy,
}
BLOCKS: dict[str, Case] = {
    "gpt layer": partial(layer, family="gpt"),
    "llama layer": partial(layer, family="llama"),
    "gpt layer, full": partial(layer, family="gpt", recompute="full"),
    "llama layer, full, no dropout": partial(layer, family="llama", recompute="full", dropout=0.0),
    "gpt layer, full on the host": partial(layer, family="gpt", recompute="full", offload_activations=True),
    "llama layer, selective": partial(layer, family="llama", recompute="selective"),
    "gpt layer, post-norm": partial(layer, family="gpt", norm_order="post"),
    "gpt layer, post-norm, full": partial(layer, family="gpt", norm_order="post", recompute="full"),
}
GROUPS = {"products": PRODUCTS, "attention": ATTENTION, "words": VOCABULARY, "layers": BLOCKS}
