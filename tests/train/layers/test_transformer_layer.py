"""Attention, MLP and the layer against textbook formulas; dropout that cannot see the layout."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

from mpctl.train.kernels.counter_rng import CounterRNG
from mpctl.train.layers.shard_context import ShardContext
from mpctl.train.layers.transformer_layer import ParallelTransformerLayer
from mpctl.train.transport.group import Group
from mpctl.train.transport.timing import Collective
from tests.threads import run_ranks
from tests.train.layers import oracle
from tests.train.layers.build import layer_config, make_attention, make_layer, make_mlp
from tests.train.layers.oracle import below, close, copies, dropped, fill, gradients, grouped, logged, numbers

B, S, H, A, D = 2, 9, 16, 4, 4
NOISE = {"seed": 5, "step": 6}
SAMPLES = torch.tensor([12, 7])
DROPOUT = 0.1


def _made(kind: str, group: Group) -> nn.Module:
    common = {"tp": group, "dtype": torch.float64}
    heads = {**common, "rng_site": "layers.1"}
    made = {
        "mlp": lambda: make_mlp(H, 4 * H, **common),
        "mlp tanh": lambda: make_mlp(H, 4 * H, activation="gelu_tanh", **common),
        "attention": lambda: make_attention(H, A, **heads),
        "attention both ways": lambda: make_attention(H, A, causal=False, **heads),
        "attention wide heads": lambda: make_attention(H, A, head_dim=6, **heads),
        "attention shared": lambda: make_attention(H, 8, kv_heads=4, **heads),
        "attention dropout": lambda: make_attention(H, A, dropout=0.3, **heads),
        "layer": lambda: make_layer(H, A, 4 * H, **heads),
        "layer dropout": lambda: make_layer(H, A, 4 * H, dropout=DROPOUT, attention_dropout=DROPOUT, **heads),
    }[kind]()
    fill(made)
    return made


KINDS = (
    "mlp",
    "mlp tanh",
    "attention",
    "attention both ways",
    "attention wide heads",
    "attention shared",
    "attention dropout",
    "layer",
    "layer dropout",
)


def _run(rank: int, size: int) -> dict:
    group, results = grouped(rank, size), {}
    rng = CounterRNG(**NOISE, samples=SAMPLES)
    for kind in KINDS:
        module = _made(kind, group)
        x = numbers(B, S, H, seed=8).requires_grad_()
        y = module(x) if kind.startswith("mlp") else module(x, rng)
        y.backward(numbers(B, S, H, seed=9))
        results[kind] = [y.detach(), x.grad, gradients(module)]
    return results


def _mask(site: str, p: float, *shape: int) -> Tensor:
    """The mask that one process draws for the whole, as a factor."""
    ones, rng = torch.ones(*shape, dtype=torch.float64), CounterRNG(**NOISE, samples=SAMPLES)
    if len(shape) == 4:
        return dropped(ones, rng, p, rng_site=site, heads=range(shape[1]))
    return dropped(ones, rng, p, rng_site=site)


def _layer(w: dict[str, Tensor], x: Tensor, p: float) -> Tensor:
    one = torch.ones(1, dtype=torch.float64)
    masks = [one, one, None]
    if p:
        masks = [_mask(f"layers.1.{name}", p, B, S, H) for name in ("attention", "mlp")]
        masks.append(_mask("layers.1.attention.probabilities", p, B, A, S, S))
    inner = oracle.norm(w["attention_norm.weight"], w["attention_norm.bias"], x)
    x = x + oracle.attention(below(w, "attention"), inner, D, True, masks[2]) * masks[0]
    inner = oracle.norm(w["mlp_norm.weight"], w["mlp_norm.bias"], x)
    return x + oracle.mlp(below(w, "mlp"), inner) * masks[1]


def _expected(kind: str, w: dict[str, Tensor], x: Tensor) -> Tensor:
    return {
        "mlp": lambda: oracle.mlp(w, x),
        "mlp tanh": lambda: oracle.mlp(w, x, "tanh"),
        "attention": lambda: oracle.attention(w, x, D, True),
        "attention both ways": lambda: oracle.attention(w, x, D, False),
        "attention wide heads": lambda: oracle.attention(w, x, 6, True),
        "attention shared": lambda: oracle.attention(w, x, 2, True),
        "attention dropout": lambda: oracle.attention(w, x, D, True, _mask("layers.1", 0.3, B, A, S, S)),
        "layer": lambda: _layer(w, x, 0.0),
        "layer dropout": lambda: _layer(w, x, DROPOUT),
    }[kind]()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_block_against_its_unsharded_formula(size: int) -> None:
    results = [_run(0, 1)] if size == 1 else run_ranks(_run, size)
    for kind in KINDS:
        w = copies(_made(kind, Group()))
        x = numbers(B, S, H, seed=8).requires_grad_()
        y = _expected(kind, w, x)
        y.backward(numbers(B, S, H, seed=9))
        for result in results:
            close(result[kind][0], y.detach())
            close(result[kind][1], x.grad)
        for name, leaf in w.items():
            close(oracle.whole([result[kind][2][name] for result in results]), leaf.grad)


def test_dropout_does_change_the_output() -> None:
    got = _run(0, 1)
    assert (got["layer"][0] - got["layer dropout"][0]).abs().max() > 0.1
    assert (_mask("layers.1.mlp", DROPOUT, B, S, H) == 0).double().mean() == pytest.approx(0.1, abs=0.06)


def _recorded(rank: int, size: int) -> list:
    log: list[Collective] = []
    layer = make_layer(H, A, 4 * H, tp=grouped(rank, size, log), rng_site="layers.1", dropout=0.1)
    fill(layer)
    x = torch.ones(B, S, H, requires_grad=True)
    y = layer(x, CounterRNG(**NOISE, samples=SAMPLES))
    forward = len(log)
    y.sum().backward()
    return [forward, logged(log)]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_layer_costs_exactly_four_all_reduces(size: int) -> None:
    for forward, log in [_recorded(0, 1)] if size == 1 else run_ranks(_recorded, size):
        assert (forward, len(log)) == ((0, 0) if size == 1 else (2, 4))
        assert set(log) <= {("all_reduce", "tp", B * S * H * 4, "float32")}


def test_training_off_or_no_noise_is_the_fast_path() -> None:
    layer, x = _made("layer dropout", Group()), numbers(B, S, H)
    quiet = layer(x, CounterRNG(**NOISE, samples=SAMPLES, training=False))
    assert torch.equal(quiet, layer(x, None))
    close(layer(x, None), _made("layer", Group())(x))


def test_recomputation_draws_the_same_masks() -> None:
    layer, rng = _made("layer dropout", Group()), CounterRNG(**NOISE, samples=SAMPLES)
    outcomes = []
    for again in (False, True):
        x = numbers(B, S, H).requires_grad_()
        if again:
            y = torch.utils.checkpoint.checkpoint(layer, x, rng, use_reentrant=False, preserve_rng_state=False)
        else:
            y = layer(x, rng)
        y.sum().backward()
        outcomes.append(x.grad)
    assert torch.equal(*outcomes)


def test_a_sample_does_not_see_its_batch() -> None:
    layer, x = _made("layer dropout", Group()), numbers(B, S, H)
    whole = layer(x, CounterRNG(**NOISE, samples=SAMPLES))
    for row in range(B):
        alone = layer(x[row : row + 1], CounterRNG(**NOISE, samples=SAMPLES[row : row + 1]))
        close(alone, whole[row : row + 1])


@dataclass(frozen=True)
class Doubled:
    """A feed-forward of another kind than the MLP's."""

    hidden: int

    def build(self, shard_context: ShardContext, name: str = "") -> nn.Module:
        class Twice(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return 2 * x

        return Twice()


def test_the_feed_forward_may_be_of_another_kind() -> None:
    config = replace(layer_config(H, A, 4 * H), mlp=Doubled(H))
    layer = ParallelTransformerLayer(config, ShardContext(dtype=torch.float64), "layers.0")
    fill(layer)
    x = numbers(B, S, H)
    assert layer.attention_norm is not None and layer.mlp_norm is not None
    attended = x + layer.attention(layer.attention_norm(x))
    assert torch.equal(layer(x), attended + 2 * layer.mlp_norm(attended))


def test_bad_heads_are_refused() -> None:
    with pytest.raises(ValueError, match=r"6 is not divisible by 4 \(use one of 1, 2, 3, 6\)"):
        make_attention(24, 6, tp=Group(0, 4), rng_site="x")
    with pytest.raises(ValueError, match="2 is not divisible by 4"):
        make_attention(24, 8, tp=Group(0, 4), kv_heads=2, rng_site="x", head_dim=3)
    with pytest.raises(ValueError, match="16 is not divisible by 3"):
        make_attention(16, 3, tp=Group(), rng_site="x")
    with pytest.raises(ValueError, match="'tanh' is not one of gelu"):
        make_mlp(8, 8, tp=Group(), activation="tanh")


def test_repr_tells_local_and_full_sizes() -> None:
    text = repr(make_layer(H, A, 64, tp=Group(1, 2), rng_site="layers.1"))
    assert "heads 2..4 of 4, d=4, causal=True, dropout=0.0, t=2" in text
    assert "(up): ColumnParallelLinear(16 -> 32 of 64, bias=True, t=2)" in text
    assert "(attention_norm): LayerNorm(16 of 16, eps=1e-05)" in text
