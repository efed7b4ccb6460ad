"""MLPs split over ranks against the unsharded formula; every refusal of a layer's configuration."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mpctl.train.kernels.rotary import Rotary
from mpctl.train.layers.attention import AttentionConfig
from mpctl.train.layers.config import LayerConfig
from mpctl.train.layers.mlp import MLPConfig, ParallelMLP
from mpctl.train.layers.parameters import partial_kind, shard_of
from mpctl.train.transport.group import Group
from tests.threads import run_ranks
from tests.train.layers.build import layer_config, make_mlp
from tests.train.layers.oracle import close, copies, fill, gradients, grouped, numbers, saved_bytes, whole

B, S, H, FFN = 2, 8, 8, 12


def _made(kind: str, group: Group, split: bool) -> ParallelMLP:
    made = make_mlp(H, FFN, tp=group, activation=kind, sequence_parallel=split, dtype=torch.float64)
    fill(made)
    return made


def _run(rank: int, size: int) -> dict:
    group, results = grouped(rank, size), {}
    for kind in KINDS:
        for split in (False, True):
            module, n = _made(kind, group, split), S // size if split else S
            own = slice(rank * n, (rank + 1) * n) if split else slice(S)
            x = numbers(B, S, H, seed=8)[:, own].clone().requires_grad_()
            y = module(x)
            y.backward(numbers(B, S, H, seed=9)[:, own])
            for parameter in module.parameters():
                if partial_kind(parameter):
                    group.all_reduce(parameter.grad)
            results[f"{kind} {split}"] = [y.detach(), x.grad, gradients(module)]
    return results


def _silu(x: Tensor) -> Tensor:
    return x / (1 + (-x).exp())


def _gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / 2**0.5)) / 2


def _gelu_tanh(x: Tensor) -> Tensor:
    """arXiv 1606.08415, section 2."""
    return x * (1 + torch.tanh((2 / math.pi) ** 0.5 * (x + 0.044715 * x**3))) / 2


KINDS = {"swiglu": _silu, "geglu": _gelu, "geglu_tanh": _gelu_tanh}


def _formula(w: dict[str, Tensor], x: Tensor, act: Callable[[Tensor], Tensor]) -> Tensor:
    gate = x @ w["up.weight"][:FFN].T + w["up.bias"][:FFN]
    up = x @ w["up.weight"][FFN:].T + w["up.bias"][FFN:]
    return (act(gate) * up) @ w["down.weight"].T + w["down.bias"]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_gated_mlps_against_their_formula(size: int) -> None:
    results = [_run(0, 1)] if size == 1 else run_ranks(_run, size)
    for kind, act in KINDS.items():
        w = copies(_made(kind, Group(), False))
        x = numbers(B, S, H, seed=8).requires_grad_()
        y = _formula(w, x, act)
        y.backward(numbers(B, S, H, seed=9))
        for split in (False, True):
            parts = [result[f"{kind} {split}"] for result in results]
            for place, expected in ((0, y.detach()), (1, x.grad)):
                if split:
                    close(torch.cat([part[place] for part in parts], 1), expected)
                else:
                    for part in parts:
                        close(part[place], expected)
            for name, leaf in w.items():
                close(whole([part[2][name] for part in parts]), leaf.grad)


def test_each_part_of_the_fused_weight_is_split_by_itself() -> None:
    mlp = make_mlp(H, 8, tp=Group(1, 2), activation="swiglu")
    assert shard_of(mlp.up.weight).shape == (16, H)
    assert shard_of(mlp.up.weight).blocks(0) == (range(4, 8), range(12, 16))
    assert mlp.down.weight.shape == (H, 4)


def test_the_gate_keeps_the_fused_product_alone() -> None:
    mlp = make_mlp(16, 256, tp=Group(), activation="swiglu", bias=False)
    torch.nn.init.normal_(mlp.up.weight)
    x = torch.ones(1, 32, 16, requires_grad=True)
    weights = 4 * sum(p.numel() for p in mlp.parameters())
    assert saved_bytes(lambda: mlp(x)) <= weights + x.numel() * 4 + 32 * 4 * (2 * 256 + 256)


def test_silu_gate_is_torchs() -> None:
    close(_silu(numbers(9)), F.silu(numbers(9)))
    close(_gelu(numbers(9)), F.gelu(numbers(9)))


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
    "attention of hidden size 16 and MLP of 8: .* equal": (lambda: LayerConfig(ATTENTION, MLPConfig(8, 64))),
    r"recompute selective: .*\(set recompute to full\)": (
        lambda: layer_config(16, 4, 64, recompute="selective", offload_activations=True)
    ),
}


def test_bad_values_are_refused() -> None:
    for message, make in REFUSED.items():
        with pytest.raises(ValueError, match=message):
            make()
