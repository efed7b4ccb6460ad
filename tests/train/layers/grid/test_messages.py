"""What modules on a grid send is what model/operators/tensor_messages.py lists: group, kind, bytes,
dtype and count, forward and backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpctl.core.tensor_grid import TensorGrid
from mpctl.model.families.gpt.ops import operator_table
from mpctl.model.operators.blocks import head, lookup
from mpctl.model.operators.matmul import GradNeeds, MatMul
from mpctl.model.operators.tensor_messages import (
    ProductSize,
    TensorMessage,
    loss_messages,
    norm_messages,
    product_messages,
)
from mpctl.train.kernels.counter_rng import CounterRNG
from mpctl.train.layers.attention import AttentionConfig
from mpctl.train.layers.config import LayerConfig
from mpctl.train.layers.linear import WEIGHTS
from mpctl.train.layers.mlp import MLPConfig
from mpctl.train.layers.norm import Norm
from mpctl.train.layers.parameters import initialise
from mpctl.train.layers.shard_context import ShardContext
from mpctl.train.layers.transformer_layer import ParallelTransformerLayer
from mpctl.train.transport.timing import Collective
from tests.jobs import GPT, job_of, shape_of
from tests.threads import run_ranks
from tests.train.layers.grid.cases import FFN, LAYERS, ROWS, SAMPLES, V, _Words
from tests.train.layers.grid.grids import EACH, Where, activation, grid_context, grid_of

B, S, H = 12, 5, 24
HIDDEN = ("batch", "seq", "hidden")
QKV, OUTPUT, UP, DOWN = operator_table(shape_of(job_of(GPT)), tp=1).stacks[0].block_of(0).products
LOOKUP, HEAD = lookup(HIDDEN), head(HIDDEN, tied=False)
Sent = dict[str, list[tuple[str, str, int, str]]]  # by phase: axis, kind, bytes, dtype
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
NORMS: tuple[Norm, ...] = ("layernorm", "rmsnorm")
NEEDS = [GradNeeds(), GradNeeds(x=False), GradNeeds(w=False)]


def _sent(log: list[Collective], work: Callable[[], Tensor]) -> Sent:
    log.clear()
    result = work()
    forward = len(log)
    result.backward(torch.ones_like(result))
    told = [(c.axis, c.kind, c.bytes, c.dtype) for c in log]
    return {"forward": told[:forward], "backward": told[forward:]}


def _listed(messages: Iterable[TensorMessage], dtype: str) -> dict[str, Counter[Any]]:
    phases: dict[str, Counter[Any]] = {"forward": Counter(), "backward": Counter()}
    for m in messages:
        used = "float32" if m.is_float else dtype
        size = m.elements * DTYPES[used].itemsize
        phases[m.phase][m.axis, m.kind, size, used] += m.count
    return phases


def _assert_as_listed(ranks: list[Sent], messages: Iterable[TensorMessage], dtype: str) -> None:
    expected = _listed(messages, dtype)
    for sent in ranks:
        for phase, counted in expected.items():
            assert Counter(tuple(entry) for entry in sent[phase]) == counted, phase


def _linear(context: ShardContext, kind: str, needs: GradNeeds) -> tuple[nn.Module, Tensor]:
    layers, inputs = context.layers, FFN if kind == "row" else H
    if kind == "column":
        module = layers.column_linear(H, 2 * FFN, bias=True, init=WEIGHTS, parts=(FFN, FFN))
    elif kind == "row":
        module = layers.row_linear(FFN, H, bias=True, init=WEIGHTS)
    else:
        module = layers.output_head(V, H, padded_vocab=ROWS, init=WEIGHTS)
    initialise(module, 1)
    shape = activation(context, (B, S, inputs), inside=kind == "row").local_shape
    x = torch.ones(shape, dtype=context.dtype, requires_grad=needs.x)
    module.weight.requires_grad_(needs.w)
    return module, x


PRODUCTS = {
    "column": (UP, ProductSize(B * S, H, 2 * FFN)),
    "row": (DOWN, ProductSize(B * S, FFN, H)),
    "head": (HEAD, ProductSize(B * S, H, ROWS)),
}


def _products(rank: int, size: int, where: Where) -> dict[str, dict[str, list[Sent]]]:
    log: list[Collective] = []
    context = grid_context(where, rank, log)
    return {
        name: {**_of_linear_layers(replace(context, dtype=dtype), log), **_of_norms(replace(context, dtype=dtype), log)}
        for name, dtype in DTYPES.items()
    }


def _of_linear_layers(context: ShardContext, log: list[Collective]) -> dict[str, list[Sent]]:
    sent: dict[str, list[Sent]] = {kind: [] for kind in PRODUCTS}
    for kind, cases in sent.items():
        for needs in NEEDS:
            module, x = _linear(context, kind, needs)
            cases.append(_sent(log, lambda m=module, x=x: m(x)))
    return sent


def _of_norms(context: ShardContext, log: list[Collective]) -> dict[str, list[Sent]]:
    """Of an input that needs no gradient, and of one that does."""
    sent: dict[str, list[Sent]] = {}
    x = torch.ones(activation(context, (B, S, H)).local_shape, dtype=context.dtype)
    for kind in NORMS:
        norm = context.norm(kind, H, eps=1e-5)
        initialise(norm, 1)
        sent[kind] = [_sent(log, lambda m=norm, x=x: m(x)) for x in (x, x.clone().requires_grad_())]
    return sent


@pytest.mark.parametrize("where", EACH)
def test_products_and_norms(where: Where) -> None:
    ranks, grid = run_ranks(_products, where[1], where), grid_of(where)
    for dtype in DTYPES:
        for kind, (product, size) in PRODUCTS.items():
            for case, needs in enumerate(NEEDS):
                messages = product_messages(grid, product, size, needs)
                assert messages
                _assert_as_listed([rank[dtype][kind][case] for rank in ranks], messages, dtype)
        for kind in NORMS:
            for goes_back in (False, True):
                messages = norm_messages(grid, kind, B * S, goes_back=goes_back)
                _assert_as_listed([rank[dtype][kind][goes_back] for rank in ranks], messages, dtype)


RECOMPUTE = ("none", "selective", "full")


def _layers(rank: int, size: int, where: Where) -> list[Sent]:
    log: list[Collective] = []
    context, rng = grid_context(where, rank, log, torch.float32), CounterRNG(5, 6, SAMPLES)
    sent = []
    for config in LAYERS.values():
        for recompute in RECOMPUTE:
            for dropout in (0.0, 0.1):
                own = replace(config, recompute=recompute, dropout=dropout)
                layer = ParallelTransformerLayer(own, context, "layers.0")
                initialise(layer, 1)
                shape = activation(context, (B, S, H)).local_shape
                x = torch.ones(shape, requires_grad=True)
                sent.append(_sent(log, lambda m=layer, x=x: m(x, rng)))
    return sent


def _layer_messages(grid: TensorGrid, config: LayerConfig) -> list[TensorMessage]:
    attention = config.attention
    assert isinstance(attention, AttentionConfig)
    width = attention.heads * attention.head_size
    fused = width + 2 * attention.num_kv_heads * attention.head_size
    assert isinstance(config.mlp, MLPConfig)
    up = FFN * (2 if config.mlp.is_gated else 1)
    sizes: list[tuple[MatMul, int, int]] = [(QKV, H, fused), (OUTPUT, width, H), (UP, H, up), (DOWN, FFN, H)]
    messages = [
        message
        for product, inputs, outputs in sizes
        for message in product_messages(grid, product, ProductSize(B * S, inputs, outputs), GradNeeds())
    ]
    return messages + 2 * norm_messages(grid, config.norm, B * S, goes_back=True)


@pytest.mark.parametrize("where", EACH)
@pytest.mark.quick(1)
def test_a_layer_sends_its_forward_messages_again_where_it_is_recomputed(where: Where) -> None:
    ranks, grid = run_ranks(_layers, where[1], where), grid_of(where)
    cases = [(c, r, d) for c in LAYERS.values() for r in RECOMPUTE for d in (0.0, 0.1)]
    for number, (config, recompute, _) in enumerate(cases):
        messages = _layer_messages(grid, config)
        if recompute == "full":
            forward = [m for m in messages if m.phase == "forward"]
            messages += [message._replace(phase="backward") for message in forward]
        _assert_as_listed([rank[number] for rank in ranks], messages, "float32")


def _ends(rank: int, size: int, where: Where) -> list[Sent]:
    log: list[Collective] = []
    context, sent = grid_context(where, rank, log, torch.float32), []
    tokens = torch.arange(B * S).view(B, S) % V
    for is_frozen in (False, True):
        module = _Words(context, V, False)
        initialise(module, 1)
        module.words.weight.requires_grad_(not is_frozen)
        sent.append(_sent(log, lambda m=module: m(tokens, tokens).sum()))
    return sent


@pytest.mark.parametrize("where", EACH)
def test_words_head_and_loss(where: Where) -> None:
    ranks, grid = run_ranks(_ends, where[1], where), grid_of(where)
    for is_frozen in (False, True):
        messages = [
            *product_messages(grid, LOOKUP, ProductSize(B * S, ROWS, H), GradNeeds(x=False, w=not is_frozen)),
            *product_messages(grid, HEAD, ProductSize(B * S, H, ROWS), GradNeeds()),
            *loss_messages(grid, B * S),
        ]
        _assert_as_listed([rank[is_frozen] for rank in ranks], messages, "float32")


def test_what_a_product_sends_by_hand() -> None:
    """2d with q=2, 8 rows, 4 columns to 4: 2 blocks of 8 elements each way along col, and 2 of 4
    along row. 3d with l=2: a fourth of each matrix once."""
    square = product_messages(TensorGrid.of("2d", 4), UP, ProductSize(8, 4, 4), GradNeeds())
    assert [(m.phase, m.kind, m.axis, m.elements, m.count) for m in square] == [
        ("forward", "broadcast", "col", 8, 2),
        ("forward", "broadcast", "row", 4, 2),
        ("backward", "broadcast", "row", 4, 2),
        ("backward", "reduce", "col", 8, 2),
        ("backward", "broadcast", "col", 8, 2),
        ("backward", "reduce", "row", 4, 2),
    ]
    cube = product_messages(TensorGrid.of("3d", 8), DOWN, ProductSize(8, 4, 4), GradNeeds())
    assert [(m.phase, m.kind, m.axis, m.elements) for m in cube] == [
        ("forward", "all_gather", "output", 8),
        ("forward", "all_gather", "weight", 4),
        ("forward", "reduce_scatter", "input", 8),
        ("backward", "all_gather", "input", 8),
        ("backward", "all_gather", "weight", 4),
        ("backward", "reduce_scatter", "output", 8),
        ("backward", "all_gather", "output", 8),
        ("backward", "reduce_scatter", "weight", 4),
    ]
