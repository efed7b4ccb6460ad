"""Gated MLPs against their formula, whole and split, and with the sequence split too."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mpctl.layers.mlp import ParallelMLP
from mpctl.layers.parameters import is_partial, shard_of
from mpctl.transport.group import Group
from tests.layers.build import make_mlp
from tests.layers.oracle import (
    close,
    copies,
    fill,
    gradients,
    grouped,
    numbers,
    saved_bytes,
    whole,
)
from tests.ranks import run_ranks

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
                if is_partial(parameter):
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
