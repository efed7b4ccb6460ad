"""Split linear layers against x @ W.T + b: outputs and every gradient, t = 1, 2, 4."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpctl.train.layers.linear import ColumnParallelLinear, RowParallelLinear
from mpctl.train.layers.parameters import global_index, partial_kind, shard_of
from mpctl.train.transport.group import Group
from mpctl.train.transport.timing import Collective
from tests.threads import run_ranks
from tests.train.layers.oracle import (
    EXACT,
    NO_PEERS,
    close,
    fill,
    gradients,
    grouped,
    logged,
    numbers,
    saved_bytes,
    whole,
)

B, S, I, O = 2, 8, 12, 24  # noqa: E741
COLUMNS: dict[str, dict] = {
    "plain": {},
    "gather": {"gather_output": True},
    "stride": {"stride": 3},
    "stride and gather": {"stride": 3, "gather_output": True},
    "parts and gather": {"parts": [16, 4, 4], "gather_output": True},
    "no bias": {"bias": False, "gather_output": True},
    "skip bias": {"skip_bias_add": True},
}
ROWS: dict[str, dict] = {
    "plain": {},
    "whole input": {"input_is_parallel": False},
    "no bias": {"bias": False},
    "skip bias": {"skip_bias_add": True},
}


def _run(module: torch.nn.Module, x: Tensor, grad: Tensor) -> list:
    fill(module)
    x.requires_grad_()
    y = module(x)
    if isinstance(y, tuple):
        y, bias = y
        assert bias is module.bias
        y = y + bias
    y.backward(grad)
    return [y.detach(), x.grad, gradients(module)]


def _columns(rank: int, size: int) -> dict:
    group, results = grouped(rank, size), {}
    for name, options in COLUMNS.items():
        layer = ColumnParallelLinear(I, O, group=group, dtype=torch.float64, **options)
        grad = numbers(B, S, O, seed=9)
        if not options.get("gather_output"):
            shard = shard_of(layer.weight)
            grad = grad.index_select(-1, global_index(shard, 0))
        results[name] = _run(layer, numbers(B, S, I, seed=8), grad)
    return results


def _rows(rank: int, size: int) -> dict:
    group, results = grouped(rank, size), {}
    for name, options in ROWS.items():
        layer = RowParallelLinear(I, O, group=group, dtype=torch.float64, **options)
        x = numbers(B, S, I, seed=8)
        if options.get("input_is_parallel", True):
            x = x.index_select(-1, global_index(shard_of(layer.weight), 1))
        results[name] = _run(layer, x, numbers(B, S, O, seed=9))
    return results


def _expected(bias: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y, dx, dw, db of the whole layer by its textbook formulas, without autograd."""
    x, grad = numbers(B, S, I, seed=8), numbers(B, S, O, seed=9)
    names = ["bias", "weight"] if bias else ["weight"]  # fill() goes by sorted names
    w = numbers(O, I, seed=3 + names.index("weight")) * 0.3
    b = numbers(O, seed=3) * 0.3 if bias else torch.zeros(O, dtype=torch.float64)
    flat = grad.reshape(-1, O)
    return x @ w.T + b, grad @ w, flat.T @ x.reshape(-1, I), flat.sum(0)


def _sized(work, size: int) -> list:
    return [work(0, 1)] if size == 1 else run_ranks(work, size)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_column_parallel(size: int) -> None:
    results = _sized(_columns, size)
    for name, options in COLUMNS.items():
        y, dx, dw, db = _expected(options.get("bias", True))
        for rank, result in enumerate(results):
            group = Group(rank, size)
            layer = ColumnParallelLinear(I, O, group=group, **options)
            kept = global_index(shard_of(layer.weight), 0)
            gathered = options.get("gather_output")
            close(result[name][0], y if gathered else y.index_select(-1, kept))
            close(result[name][1], dx)
        close(whole([result[name][2]["weight"] for result in results]), dw)
        if options.get("bias", True):
            close(whole([result[name][2]["bias"] for result in results]), db)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_row_parallel(size: int) -> None:
    results = _sized(_rows, size)
    for name, options in ROWS.items():
        y, dx, dw, db = _expected(options.get("bias", True))
        split = options.get("input_is_parallel", True)
        inputs = [result[name][1] for result in results]
        close(torch.cat(inputs, -1) if split else inputs[-1], dx)
        for result in results:
            close(result[name][0], y)
        close(whole([result[name][2]["weight"] for result in results]), dw)
        if options.get("bias", True):
            close(whole([result[name][2]["bias"] for result in results]), db)


def _recorded(rank: int, size: int) -> list:
    log: list[Collective] = []
    group = grouped(rank, size, log)
    column = ColumnParallelLinear(I, O, group=group)
    row = RowParallelLinear(O, I, group=group)
    fill(column)
    fill(row)
    x = torch.ones(B, S, I, requires_grad=True)
    y = row(column(x))
    forward = len(log)
    y.sum().backward()
    return [forward, logged(log)]


def test_column_then_row_costs_one_all_reduce_each_way() -> None:
    for forward, log in run_ranks(_recorded, 2):
        assert forward == 1
        assert log == [("all_reduce", "tp", B * S * I * 4, "float32")] * 2


def _split(rank: int, size: int) -> list:
    """Column then row on sequence shards, with the log of each; one more time with b=1."""
    results = []
    for b in (B, 1):
        log: list[Collective] = []
        group = grouped(rank, size, log)
        common = {"group": group, "sequence_parallel": True, "dtype": torch.float64}
        pair = nn.Sequential(ColumnParallelLinear(I, O, **common), RowParallelLinear(O, I, **common))
        fill(pair)
        own = slice(S // size * rank, S // size * (rank + 1))
        x = numbers(b, S, I, seed=8)[:, own].clone().requires_grad_()
        y = pair(x)
        forward = len(log)
        y.backward(numbers(b, S, I, seed=9)[:, own])
        entries = logged(log)
        last = "tp" if size > 1 else ""
        assert [partial_kind(p) for p in pair.parameters()] == ["", "", "", last]
        bias = pair[1].bias
        bias.grad = group.all_reduce(bias.grad)
        results.append([y.detach(), x.grad, gradients(pair), entries[:forward], entries[forward:]])
    return results


@pytest.mark.parametrize("size", [1, 2, 4])
def test_sequence_parallel_pair(size: int) -> None:
    results = _sized(_split, size)
    for case, b in enumerate((B, 1)):
        # fill() goes by sorted names: 0.bias, 0.weight, 1.bias, 1.weight
        c, v, d, w = (
            (numbers(*shape, seed=3 + i) * 0.3).requires_grad_() for i, shape in enumerate([(O,), (O, I), (I,), (I, O)])
        )
        x = numbers(b, S, I, seed=8).requires_grad_()
        y = (x @ v.T + c) @ w.T + d
        y.backward(numbers(b, S, I, seed=9))
        parts = [result[case] for result in results]
        close(torch.cat([part[0] for part in parts], 1), y.detach())
        close(torch.cat([part[1] for part in parts], 1), x.grad)
        for name, leaf in {"0.bias": c, "0.weight": v, "1.bias": d, "1.weight": w}.items():
            close(whole([part[2][name] for part in parts]), leaf.grad)
        message = ("tp", b * S * I * 8, "float64")
        for part in parts if size > 1 else []:
            assert part[3] == [("all_gather", *message), ("reduce_scatter", *message)]
            kinds = ["all_gather", "all_gather", "reduce_scatter"]
            assert part[4] == [(kind, *message) for kind in kinds]


def _unusual(rank: int, size: int) -> dict:
    """Frozen, tied, gradient views that exist already, no gradient at all, 16 bit."""
    group, results = grouped(rank, size), {}
    make = {"group": group, "dtype": torch.float64}
    grad = numbers(B, S, O, seed=9)
    for name in ("plain", "frozen", "leaf input", "tied", "view"):
        layer = ColumnParallelLinear(I, O, bias=name != "frozen", **make)
        fill(layer)
        x = numbers(B, S, I, seed=8).requires_grad_(name != "leaf input")
        layer.weight.requires_grad_(name != "frozen")
        flat = torch.ones(layer.weight.numel(), dtype=torch.float64)
        if name == "view":
            layer.weight.grad = flat.view_as(layer.weight)
        y = layer(x) + (layer(x) if name == "tied" else 0)
        y.backward(grad.index_select(-1, global_index(shard_of(layer.weight), 0)))
        weight = layer.weight.grad
        results[name] = [x.grad, weight, flat if name == "view" else None]
    with torch.no_grad():
        assert not layer(x).requires_grad
    half = ColumnParallelLinear(I, O, group=group, dtype=torch.bfloat16)
    fill(half)
    x = numbers(B, S, I, seed=8).bfloat16().requires_grad_()
    y = half(x)
    y.sum().backward()  # an expanded gradient, without memory of its own
    found = {t.dtype for t in (y, x.grad, half.weight.grad, half.bias.grad)}
    return {**results, "bf16": found == {torch.bfloat16}}


@pytest.mark.parametrize("size", [1, 2])
def test_frozen_tied_and_preset_gradients(size: int) -> None:
    for rank, got in enumerate(_sized(_unusual, size)):
        layer = ColumnParallelLinear(I, O, group=Group(rank, size))
        rows = global_index(shard_of(layer.weight), 0)
        _, dx, dw, _ = _expected(True)
        dw = dw[rows]
        assert got["bf16"]
        close(got["plain"][0], dx)
        close(got["plain"][1], dw)
        close(got["frozen"][0], numbers(B, S, O, seed=9) @ (numbers(O, I, seed=3) * 0.3))
        assert got["frozen"][1] is None
        assert got["leaf input"][0] is None
        close(got["leaf input"][1], dw)
        close(got["tied"][0], 2 * dx)
        close(got["tied"][1], 2 * dw)
        close(got["view"][2].view_as(dw), dw + 1)


def test_only_the_shard_of_the_input_is_kept() -> None:
    """Kept by a column layer under sequence parallelism: [b, s/t, i] and the weight's own rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mpctl.train.transport.group._all_gather", lambda *_, **__: None)
        kept = []
        for split in (False, True):
            layer = ColumnParallelLinear(I, O, group=Group(0, 2, NO_PEERS), sequence_parallel=split)
            x = torch.ones(B, S // 2 if split else S, I, requires_grad=True)
            kept.append(saved_bytes(lambda layer=layer, x=x: layer(x)) - layer.weight.numel() * 4)
    assert kept == [B * S * I * 4, B * S * I * 4 // 2]


def test_one_rank_is_plain_linear() -> None:
    column = ColumnParallelLinear(I, O, group=Group(), sequence_parallel=True)
    row = RowParallelLinear(I, O, group=Group(), sequence_parallel=True)
    x = torch.ones(B, S, I)
    for layer in (column, row):
        fill(layer)
        y = layer(x)
        assert torch.equal(y, F.linear(x, layer.weight, layer.bias))
        assert y.grad_fn.name() == F.linear(x, layer.weight, layer.bias).grad_fn.name()


def test_bad_sizes_name_value_bound_and_way_out() -> None:
    group = Group(0, 5)
    with pytest.raises(ValueError, match=r"24 is not divisible by 5 \(use one of 1, 2, 3"):
        ColumnParallelLinear(I, O, group=group)
    with pytest.raises(ValueError, match="12 is not divisible by 5"):
        RowParallelLinear(I, O, group=group)
    with pytest.raises(ValueError, match="8 is not divisible by 5"):
        ColumnParallelLinear(I, O, group=group, stride=3)
    with pytest.raises(ValueError, match="must sum to 24"):
        ColumnParallelLinear(I, O, group=Group(), parts=[8, 8])
    with pytest.raises(ValueError, match="gather_output and skip_bias_add"):
        ColumnParallelLinear(I, O, group=Group(), gather_output=True, skip_bias_add=True)


def test_repr_tells_local_and_full_sizes() -> None:
    column = ColumnParallelLinear(I, O, group=Group(1, 2), stride=3)
    assert repr(column) == ("ColumnParallelLinear(12 -> 12 of 24, parts=(8, 8, 8), bias=True, t=2)")
    row = RowParallelLinear(I, O, group=Group(1, 2), bias=False)
    assert repr(row) == "RowParallelLinear(6 of 12 -> 24, bias=False, t=2)"


def test_the_bound_can_fail() -> None:
    with pytest.raises(AssertionError, match="max abs difference"):
        close(torch.ones(1), torch.ones(1, dtype=torch.float64) + 2 * EXACT)
