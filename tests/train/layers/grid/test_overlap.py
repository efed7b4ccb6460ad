"""Blocks travel while others are multiplied, and few of them are in memory at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from mpctl.train.layers.linear import WEIGHTS
from mpctl.train.layers.parameters import initialise
from mpctl.train.runtime.memory import MemoryTracker
from tests.train.layers.grid.echo import Events, echo_context
from tests.train.layers.grid.grids import Where

SIDE, ROWS, WIDTH = 4, 6, 20  # of a rank's blocks: 6 rows of 20 columns, and 20 x 20 of a weight
SQUARE: Where = ("2d", SIDE**2, None)
CUBE: Where = ("3d", SIDE**3, None)


class _Products(TorchDispatchMode):
    """Tells every matrix product."""

    def __init__(self, events: Events) -> None:
        super().__init__()
        self.events, self.count = events, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.out):
            self.events.told.append(f"product {self.count}")
            self.count += 1
        return func(*args, **(kwargs or {}))


def _module(kind: str, where: Where, rank: int) -> tuple[nn.Module, Tensor, Events]:
    context, events = echo_context(where, rank)
    layers, h = context.layers, WIDTH * context.grid.hidden_parts
    if kind == "head":
        module = layers.output_head(h, h, padded_vocab=h, init=WEIGHTS)
    else:
        module = layers.column_linear(h, h, bias=False, init=WEIGHTS)
    initialise(module, 1)
    return module, torch.ones(ROWS, 1, WIDTH, requires_grad=True), events


def _told(kind: str, where: Where, rank: int) -> tuple[list[str], list[str]]:
    """The events of forward and those of backward."""
    module, x, events = _module(kind, where, rank)
    with _Products(events) as products:
        y = module(x)
        forward, products.count = list(events.told), 0
        events.told.clear()
        y.backward(torch.ones_like(y))
    assert not any(events.under_way.values())
    assert max(events.most_under_way.values()) <= 2
    return forward, events.told


def _first(told: list[str], *names: str) -> list[int]:
    return [told.index(name) for name in names]


def _assert_ahead(told: list[str], broadcast: str, first: int = 0, stride: int = 1) -> None:
    """The block of step l has arrived and that of step l + 1 has started before product l, counted
    from product `first` on, of which each step has `stride`."""
    for step in range(SIDE):
        product = told.index(f"product {first + stride * step}")
        assert told.index(f"wait {broadcast} {step}") < product
        if step + 1 < SIDE:
            assert told.index(f"start {broadcast} {step + 1}") < product
            assert told.index(f"wait {broadcast} {step + 1}") > product


def _assert_behind(told: list[str], summing: str, first: int = 0, stride: int = 1) -> None:
    """The sum of product l is started behind it and waited for behind product l + 1."""
    for step in range(SIDE):
        product = told.index(f"product {first + stride * step}")
        assert told.index(f"start {summing} {step}") > product
        if step + 1 < SIDE:
            following = told.index(f"product {first + stride * (step + 1)}")
            assert told.index(f"start {summing} {step}") < following
            assert told.index(f"wait {summing} {step}") > following


@pytest.mark.parametrize("rank", [0, 6, 15])
def test_blocks_of_a_product_travel_one_step_ahead(rank: int) -> None:
    forward, backward = _told("column", SQUARE, rank)
    _assert_ahead(forward, "col broadcast")
    _assert_ahead(forward, "row broadcast")
    _assert_ahead(backward, "row broadcast")
    _assert_behind(backward, "col reduce")
    _assert_ahead(backward, "col broadcast", first=SIDE)
    _assert_behind(backward, "row reduce", first=SIDE)


@pytest.mark.parametrize("rank", [0, 6, 15])
def test_blocks_of_a_head_travel_one_step_ahead(rank: int) -> None:
    forward, backward = _told("head", SQUARE, rank)
    _assert_ahead(forward, "row broadcast")
    _assert_behind(forward, "col reduce")
    # a step of backward has two products: of dX, and of dW
    _assert_ahead(backward, "col broadcast", stride=2)
    _assert_ahead(backward, "row broadcast", stride=2)
    _assert_behind(backward, "row reduce", first=1, stride=2)


def test_the_messages_of_a_cube_travel_together() -> None:
    forward, backward = _told("column", CUBE, 5)
    assert forward == [
        "start input all_gather",
        "start weight all_gather",
        "wait input all_gather",
        "wait weight all_gather",
        "product 0",
        "start output reduce_scatter",
        "wait output reduce_scatter",
    ]
    dx, dw = _first(backward, "product 0", "product 1")
    for axis in ("output", "weight", "input"):
        assert backward.index(f"start {axis} all_gather") < dx < dw
    assert dx < backward.index("start input reduce_scatter") < dw
    assert backward.index("wait input reduce_scatter") > dw


def _peaks(kind: str, rank: int) -> tuple[int, int]:
    """The most bytes in forward, with x and the weight, and in backward, with y and dy too."""
    module, x, events = _module(kind, SQUARE, rank)
    block, weight = x.nbytes, module.weight.nbytes
    tracker = MemoryTracker(torch.device("cpu"))
    with tracker:
        tracker.add("parameters", [module.weight, x])
        y = module(x)
        forward = tracker.peak
        assert tracker.total == weight + 2 * block  # with y
        assert max(map(len, events.buffers.values())) <= 2
        events.buffers.clear()
        tracker.restart()
        y.backward(torch.ones_like(y))
        assert tracker.total == 2 * (weight + block) + block
        assert max(map(len, events.buffers.values())) <= 2
    return forward - weight - block, tracker.peak - weight - 3 * block


@pytest.mark.parametrize("kind", ["column", "head"])
def test_two_buffers_an_operand_and_two_sums_under_way(kind: str) -> None:
    """The peaks beside the operands themselves, exactly; a third sum is the one that is kept."""
    block, weight = 4 * ROWS * WIDTH, 4 * WIDTH**2
    forward, backward = zip(*(_peaks(kind, rank) for rank in range(SIDE**2)), strict=True)
    if kind == "column":
        y, dx = block, block
        assert max(forward) == 2 * block + 2 * weight + y
        assert max(backward) == max(2 * weight + 3 * block, dx + 2 * block + 3 * weight)
    else:
        assert max(forward) == 2 * weight + 3 * block
        assert max(backward) == 2 * block + 2 * weight + block + 3 * weight
