"""What a rank of a grid holds: 1/P of parameters (2.5d 1/q^2) and of what backward needs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mpctl.train.kernels.counter_rng import CounterRNG
from mpctl.train.kernels.rotary import Rotary
from mpctl.train.layers.attention import AttentionConfig
from mpctl.train.layers.config import LayerConfig
from mpctl.train.layers.linear import WEIGHTS
from mpctl.train.layers.mlp import MLPConfig
from mpctl.train.layers.parameters import initialise
from mpctl.train.layers.shard_context import ShardContext
from mpctl.train.layers.transformer_layer import ParallelTransformerLayer
from mpctl.train.runtime.memory import MemoryTracker
from tests.threads import run_ranks
from tests.train.layers.grid.cases import ROWS, Case, V, _Words, layer, norm, words
from tests.train.layers.grid.echo import echo_context
from tests.train.layers.grid.grids import EACH, GRIDS, ONE, Where, activation, grid_context, grid_of
from tests.train.layers.oracle import Part, saved_bytes, whole

B, S, H, A = 12, 8, 288, 12
LAYERS = {
    "gpt": LayerConfig(AttentionConfig(H, A, dropout=0.1), MLPConfig(H, 4 * H), dropout=0.1),
    "llama": LayerConfig(
        AttentionConfig(H, A, kv_heads=6, rotary=Rotary(24), bias=False),
        MLPConfig(H, 3 * H, "swiglu", bias=False),
        norm="rmsnorm",
    ),
}
WITHIN = 0.02
UNSHARDED = ShardContext()


def _numel(config: LayerConfig, context: ShardContext) -> int:
    layer = ParallelTransformerLayer(config, replace(context, device="meta"), "layers.0")
    return sum(parameter.numel() for parameter in layer.parameters())


def _saved(config: LayerConfig, context: ShardContext) -> int:
    layer = ParallelTransformerLayer(config, context, "layers.0")
    initialise(layer, 1)
    shape = activation(context, (B, S, H)).local_shape
    x = torch.ones(shape, dtype=context.dtype, requires_grad=True)
    rng = CounterRNG(5, 6, torch.arange(B))
    return saved_bytes(lambda: layer(x, rng), but=layer.parameters())


@pytest.mark.parametrize("family", LAYERS)
def test_parameters_of_a_rank(family: str) -> None:
    """Vectors are cut over one axis alone, which is why it is a little more."""
    config = LAYERS[family]
    whole = _numel(config, UNSHARDED)
    for where in GRIDS.values():
        grid = grid_of(where)
        held = grid.size // grid.axes.get("depth", 1)
        for rank in range(grid.size):
            ours = _numel(config, echo_context(where, rank)[0])
            assert whole / held < ours == pytest.approx(whole / held, rel=WITHIN)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("family", LAYERS)
def test_activations_of_a_rank(family: str, recompute: Any) -> None:
    config = replace(LAYERS[family], recompute=recompute)
    whole = _saved(config, UNSHARDED)
    for where in GRIDS.values():
        grid = grid_of(where)
        kept = _saved(config, echo_context(where, grid.size - 1)[0])
        assert kept == pytest.approx(whole / grid.size, rel=WITHIN), where


def _ends(context: ShardContext) -> int:
    module = _Words(context, V, False)
    initialise(module, 1)
    tokens = torch.arange(B * S).view(B, S) % V

    def losses() -> Tensor:
        result: Tensor = module(tokens[:, :5], tokens[:, :5])
        return result

    return saved_bytes(losses, but=module.parameters())


@pytest.mark.parametrize("name", GRIDS)
def test_embedding_head_and_loss_of_a_rank(name: str) -> None:
    """Beside 1/P of vectors and logits: numbers a row of the loss, which no axis of features cuts,
    and of the lookup the tokens of the whole micro batch with which of them are its own."""
    grid, rows = grid_of(GRIDS[name]), B * 5
    context, _ = echo_context(GRIDS[name], 0)
    activations = rows * (2 * 24 + ROWS) * 4 / grid.size
    of_rows = rows * (8 + 1 + 4 + 4) / grid.sample_parts
    tokens = rows * (8 + 1) + 7 * 24 * 4 / grid.hidden_parts
    assert _ends(context) <= activations + of_rows + tokens


def _cube_peaks(rank: int, size: int, kind: str) -> list[int]:
    """The most bytes at once in forward and backward of a product, beside X, W, and Y with dY."""
    context = grid_context(("3d", size, None), rank, dtype=torch.float32)
    if kind == "column":
        layer = context.layers.column_linear(16, 24, bias=False, init=WEIGHTS)
    else:
        layer = context.layers.output_head(24, 16, padded_vocab=24, init=WEIGHTS)
    initialise(layer, 1)
    x = torch.ones(2, 5, 8, requires_grad=True)
    tracker = MemoryTracker(torch.device("cpu"), own_only=True)
    with tracker:
        tracker.add("parameters", [layer.weight, x])
        y = layer(x)
        forward = tracker.peak - layer.weight.nbytes - x.nbytes
        grad = torch.ones_like(y)
        tracker.restart()
        y.backward(grad)
        held = layer.weight.nbytes + x.nbytes + 2 * y.nbytes
    return [forward, tracker.peak - held, x.nbytes, layer.weight.nbytes, y.nbytes]


@pytest.mark.parametrize("kind", ["column", "head"])
def test_what_a_cube_gathers_for_a_moment(kind: str) -> None:
    """Forward: gathered X and W, partial Y and its sum; backward: gathered dY and X, partial dX and
    dW and their sums. Columns that were gathered, or are to be scattered, are copied once."""
    copied = kind == "column"
    for forward, backward, x, w, y in run_ranks(_cube_peaks, 8, kind):
        assert forward == 2 * (x + w + y) + max(y, copied * 2 * w)
        assert backward == 2 * (y + 2 * x + (1 + copied) * w) + x + w


CASES: dict[str, Case] = {
    "gpt": lambda context: layer(context, family="gpt"),
    "llama": lambda context: layer(context, family="llama", recompute="full"),
    "layernorm": lambda context: norm(context, kind="layernorm", offset=0.0),
    "rmsnorm": lambda context: norm(context, kind="rmsnorm", offset=0.0),
    "untied": lambda context: words(context, vocab=31, tied=False),
}


def _run(rank: int, size: int, where: Where) -> dict[str, dict[str, Part]]:
    context = replace(grid_context(where, rank), dtype=torch.bfloat16)
    return {name: case(context) for name, case in CASES.items()}


def _errors(ranks: list[dict[str, Part]], exact: dict[str, Part]) -> dict[str, float]:
    """Of each result, root mean square relative to its size."""
    errors = {}
    for name, (expected, _) in exact.items():
        together = whole([rank[name] for rank in ranks]).double()
        errors[name] = ((together - expected).norm() / expected.norm()).item()
    return errors


@pytest.mark.parametrize("where", EACH)
def test_sums_of_16_bit_are_as_good_as_those_of_one_rank(where: Where) -> None:
    ranks = run_ranks(_run, where[1], where)
    for name, case in CASES.items():
        exact, alone = case(ONE), case(ShardContext(dtype=torch.bfloat16))
        assert all(part.dtype == alone[key][0].dtype for key, (part, _) in ranks[0][name].items())
        one, grid = _errors([alone], exact), _errors([rank[name] for rank in ranks], exact)
        for key, error in grid.items():
            assert error < 2 * one[key] + 1e-3, f"{name} {key}: {error:.2e}, {one[key]:.2e} of one"
            assert error < 0.02
