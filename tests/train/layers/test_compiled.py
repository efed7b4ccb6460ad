"""What is compiled computes the same; one graph serves every layer, step and site.

The graphs are run by torch itself (aot_eager), so that no C++ compiler is needed: what is followed,
cut and compiled anew is the same for every backend. tests/train/runtime/test_precision.py has the real
one.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from mpctl.train.kernels.backend import TORCH_BACKEND, KernelBackend
from mpctl.train.kernels.counter_rng import DropoutMask, StepKeys
from mpctl.train.layers.attention import AttentionConfig
from mpctl.train.layers.compiled import PIECES, compile_layers, compiled_pieces, with_compiled_pieces
from mpctl.train.layers.config import LayerConfig, Recompute
from mpctl.train.layers.mlp import MLPConfig
from mpctl.train.layers.parameters import initialise
from mpctl.train.layers.shard_context import ShardContext
from mpctl.train.layers.transformer_layer import ParallelTransformerLayer

COMPILE = partial(torch.compile, backend="aot_eager")
LAYERS, STEPS, H = 10, 3, 16  # more layers than torch._dynamo compiles a function anew: 8


@pytest.fixture(autouse=True)
def counters() -> Any:
    """Those of the compiler, which starts anew; imported where a test asks for it."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return torch._dynamo.utils.counters


def _layers(recompute: Recompute, dropout: float) -> list[ParallelTransformerLayer]:
    attention = AttentionConfig(hidden=H, heads=4, dropout=dropout)
    config = LayerConfig(attention, MLPConfig(hidden=H, ffn=32), dropout=dropout, recompute=recompute)
    context = ShardContext(dtype=torch.float64)
    layers = [ParallelTransformerLayer(config, context, f"layers.{i}") for i in range(LAYERS)]
    for number, layer in enumerate(layers):
        initialise(layer, number)
    return layers


def _steps(layers: list[ParallelTransformerLayer]) -> list[Tensor]:
    """Results and gradients of a few steps."""
    keys = StepKeys({x.rng_site: x.RNG_SITES for x in layers}, 7, torch.device("cpu"))
    found = []
    for step in range(STEPS):
        keys.fill(step)
        x = torch.linspace(-1, 1, 2 * 8 * H, dtype=torch.float64).view(2, 8, H).requires_grad_()
        hidden, rng = x, keys.rng(torch.tensor([step, step + 5]))
        for layer in layers:
            hidden = layer(hidden, rng)
        parameters = [p for layer in layers for p in layer.parameters()]
        found += [hidden.detach(), *torch.autograd.grad(hidden.square().sum(), [x, *parameters])]
    return found


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("recompute", "dropout"),
    [
        ("none", 0.1),
        pytest.param("full", 0.1, marks=SLOW),
        pytest.param("selective", 0.1, marks=SLOW),
        pytest.param("none", 0.0, marks=SLOW),
    ],
)
@pytest.mark.slow
def test_one_graph_serves_every_layer_and_step(counters: Any, recompute: Recompute, dropout: float) -> None:
    layers = _layers(recompute, dropout)
    plain = _steps(layers)
    compile_layers(layers, COMPILE)
    for ours, reference in zip(_steps(layers), plain, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-10, atol=1e-10)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


def test_pieces_draw_the_same_masks_and_are_compiled_once(counters: Any) -> None:
    kernels = with_compiled_pieces(TORCH_BACKEND, COMPILE)
    keys = StepKeys({"": ("a", "b")}, 3, torch.device("cpu"))
    for step in range(STEPS):
        keys.fill(step)
        for site in ("a", "b"):
            x, residual = torch.randn(2, 2, 6, H).unbind()
            mask = keys.rng(torch.tensor([4, 9])).mask(x.shape, 0.3, rng_site=site)
            ours = kernels.dropout_add(x, mask, residual)
            assert torch.equal(ours, TORCH_BACKEND.dropout_add(x, mask, residual))
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "relu", "relu2", "silu", "swiglu", "geglu"])
def test_activations_of_a_compiler_are_the_layers_own(name: str) -> None:
    up = torch.linspace(-3, 3, 48, dtype=torch.float64).view(2, 24).requires_grad_()
    pairs = [TORCH_BACKEND.activation(up, name), PIECES["activation"](up, name)]
    gradients = [torch.autograd.grad(result.square().sum(), up)[0] for result in pairs]
    torch.testing.assert_close(*pairs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


class _WithDropout(KernelBackend):
    """A device that has a kernel of its own for one of the pieces."""

    def dropout_add(self, x: Tensor, mask: DropoutMask, residual: Tensor) -> Tensor:
        return residual


def test_what_a_device_has_a_kernel_for_is_left_to_it() -> None:
    own = _WithDropout()
    assert compiled_pieces(TORCH_BACKEND) == list(PIECES)
    assert compiled_pieces(own) == [name for name in PIECES if name != "dropout_add"]
    compiled = with_compiled_pieces(own, COMPILE)
    assert compiled.dropout_add.__func__ is _WithDropout.dropout_add  # type: ignore[attr-defined]
    assert compiled.rotate is not own.rotate
