"""A layer's configs: what follows from what, and that every bad value is refused with a way out."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mpctl.kernels.rotary import Rotary
from mpctl.layers.config import AttentionConfig, LayerConfig
from mpctl.layers.mlp import MLPConfig
from tests.layers.build import layer_config

ATTENTION, MLP = AttentionConfig(16, 4), MLPConfig(16, 64)


def test_what_is_not_given_follows() -> None:
    assert (ATTENTION.num_kv_heads, ATTENTION.head_size, ATTENTION.queries_per_kv_head) == (4, 4, 1)
    grouped = AttentionConfig(16, 4, kv_heads=2, head_dim=6)
    assert (grouped.num_kv_heads, grouped.head_size, grouped.queries_per_kv_head) == (2, 6, 2)
    assert not MLP.is_gated and MLPConfig(16, 64, "swiglu").is_gated
    assert LayerConfig(ATTENTION, MLP).hidden == 16


REFUSED: dict[str, Callable[[], object]] = {
    r"16 is not divisible by 3 \(use one of 1, 2, 4": lambda: AttentionConfig(16, 3),
    r"4 is not divisible by 3 \(use one of 1, 2, 4\)": lambda: AttentionConfig(16, 4, kv_heads=3),
    "heads 0 is below 1": lambda: AttentionConfig(16, 0, head_dim=4),
    "head_dim 0 is below 1": lambda: AttentionConfig(16, 4, head_dim=0),
    "attention dropout 1.0 is not in 0 <= p < 1": lambda: AttentionConfig(16, 4, dropout=1.0),
    r"rotary positions of 8 features for heads of 4 \(make it with Rotary\(4\)\)": (
        lambda: AttentionConfig(16, 4, rotary=Rotary(8))
    ),
    "ffn 0 is below 1": lambda: MLPConfig(16, 0),
    "activation 'tanh' is not one of gelu": lambda: MLPConfig(16, 64, "tanh"),  # type: ignore
    "norm 'batch' is not one of layernorm, rmsnorm": lambda: layer_config(16, 4, 64, norm="batch"),
    "norm_order 'mid' is not one of pre, post": lambda: layer_config(16, 4, 64, norm_order="mid"),
    "recompute 'some' is not one of none, sel": lambda: layer_config(16, 4, 64, recompute="some"),
    "dropout -0.1 is not in 0 <= p < 1": lambda: layer_config(16, 4, 64, dropout=-0.1),
    "attention of hidden size 16 and MLP of 8: .* equal": (
        lambda: LayerConfig(ATTENTION, MLPConfig(8, 64))
    ),
    r"recompute selective: .*\(set recompute to full\)": (
        lambda: layer_config(16, 4, 64, recompute="selective", offload_activations=True)
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_bad_value_is_refused(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        REFUSED[message]()
