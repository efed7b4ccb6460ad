"""A message starts before the work that hides it, and is waited for after that work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mpctl.train.layers.linear import ColumnParallelLinear
from mpctl.train.transport.exchange import Reduction
from mpctl.train.transport.group import Group, Pending
from tests.threads import run_ranks
from tests.train.layers.oracle import close, fill, grouped, numbers

B, S, I, O = 2, 6, 4, 10  # noqa: E741


@dataclass(frozen=True)
class _Told(Pending):
    events: list | None = None
    name: str = ""

    def wait(self) -> Tensor:
        self.events.append(f"wait {self.name}")
        return self.result


class _Watched(Group):
    """A group of two that tells when a message starts and is waited for; both ranks are equal."""

    events: list[str]

    def _told(self, name: str, result: Tensor) -> Pending:
        self.events.append(f"start {name}")
        return _Told(result, events=self.events, name=name)

    def start_all_reduce(self, tensor: Tensor, op: Reduction = "sum", *, is_async: bool = True) -> Pending:
        return self._told("all_reduce", tensor.mul_(2))

    def start_all_gather(self, tensor: Tensor, dim: int, *, is_async: bool = True) -> Pending:
        return self._told("all_gather", torch.cat([tensor, tensor], dim))

    def start_reduce_scatter(self, tensor: Tensor, dim: int, *, is_async: bool = True) -> Pending:
        return self._told("reduce_scatter", tensor.chunk(2, dim)[0] * 2)


class _Products(TorchDispatchMode):
    """Appends the shape of every matrix product's result, and `sum` for the bias gradient."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.name.split("::")[1] in ("mm", "addmm", "bmm", "baddbmm"):
            self.events.append({(O // 2, I): "dW", (B * S, I): "dX"}.get(tuple(result.shape), "Y"))
        if func is torch.ops.aten.sum.dim_IntList:
            self.events.append("db")
        return result


def _events(split: bool, *, frozen: bool = False, input_grad: bool = True) -> list[str]:
    group = _Watched(0, 2)
    object.__setattr__(group, "events", [])
    layer = ColumnParallelLinear(I, O, group=group, sequence_parallel=split)
    layer.requires_grad_(not frozen)
    x = torch.ones(B, S // 2 if split else S, I, requires_grad=input_grad)
    with _Products(group.events):
        y = layer(x)
        group.events.append("|")
        y.backward(torch.ones_like(y))
    return group.events[group.events.index("|") + 1 :]


def test_the_all_reduce_of_dx_travels_while_dw_and_db_are_computed() -> None:
    assert _events(False) == ["dX", "start all_reduce", "db", "dW", "wait all_reduce"]


def test_under_sequence_parallelism_both_messages_are_hidden() -> None:
    assert _events(True) == [
        "start all_gather",
        "dX",
        "start reduce_scatter",
        "db",
        "wait all_gather",
        "dW",
        "wait reduce_scatter",
    ]


@pytest.mark.parametrize("split", [False, True])
def test_what_needs_no_gradient_costs_neither_product_nor_message(split: bool) -> None:
    summing = "reduce_scatter" if split else "all_reduce"
    assert _events(split, frozen=True) == ["dX", f"start {summing}", f"wait {summing}"]
    gather = ["start all_gather"] * split, ["wait all_gather"] * split
    assert _events(split, input_grad=False) == [*gather[0], "db", *gather[1], "dW"]


def _halves(rank: int, size: int) -> list:
    group, found = grouped(rank, size), []
    # samples in halves, positions in halves, of one sample and of three, and what has no halves
    for b, n, bias in ((2, 3, True), (1, 4, True), (1, 2, False), (3, 2, True), (1, 3, False)):
        for overlaps in (False, True):
            layer = ColumnParallelLinear(
                I, O * size, group=group, bias=bias, sequence_parallel=True, overlaps=overlaps, dtype=torch.float64
            )
            fill(layer)
            x = numbers(b, n * size, I)[:, rank * n : (rank + 1) * n].clone().requires_grad_()
            y = layer(x)
            y.backward(numbers(*y.shape, seed=9))
            found.append([y.detach(), x.grad, *(w.grad for w in layer.parameters())])
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_inputs_in_halves_give_what_whole_ones_give(size: int) -> None:
    for found in run_ranks(_halves, size):
        for whole, in_halves in zip(found[::2], found[1::2], strict=True):
            for one, other in zip(whole, in_halves, strict=True):
                close(one, other)


@pytest.mark.parametrize("b", [1, 2])
def test_the_second_half_arrives_while_the_first_is_multiplied(b: int) -> None:
    group = _Watched(0, 2)
    object.__setattr__(group, "events", [])
    layer = ColumnParallelLinear(I, O, group=group, sequence_parallel=True, overlaps=True)
    with torch.no_grad(), _Products(group.events):
        layer(torch.ones(b, S, I))
    assert group.events == ["start all_gather"] * 2 + ["wait all_gather", "Y"] * 2
