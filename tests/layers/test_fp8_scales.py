"""Delayed scaling: what a table learns of a step, shares between ranks, saves and loads."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import Tensor

from mpctl.kernels.fp8 import Operand
from mpctl.layers.fp8 import Fp8Operands, Fp8Scales
from mpctl.transport.group import Group
from tests.layers.oracle import grouped
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def table(length: int = 2, names: tuple[str, ...] = ("a",)) -> tuple[Fp8Scales, Fp8Operands]:
    """A table, and the operands of its first layer."""
    scales, operands = Fp8Scales(names, length, CPU), Fp8Operands()
    scales.bind({names[0]: operands})
    return scales, operands


def step(
    scales: Fp8Scales, operands: Fp8Operands, *largest: float, group: Group | None = None
) -> float:
    """A step of micro batches whose inputs have these largest elements; returns the scale that
    the last one was cast with."""
    used = 0.0
    for value in largest:
        matrix = torch.tensor([[value, -0.5 * value]], dtype=torch.bfloat16)
        used = 1 / operands.by_rows(Operand.INPUT, matrix, noted=True).inverse.item()
    scales.end_step(group or Group())
    return used


def test_by_hand() -> None:
    scales, operands = table()
    assert [step(scales, operands, x) for x in (3.0, 1.0, 1.0, 1.0)] == [128, 128, 128, 256]


def test_in_the_first_step_each_tensor_is_scaled_by_itself() -> None:
    scales, operands = table()
    assert step(scales, operands, 3.0, 100.0) == 4.0  # 100 x 4 = 400
    assert step(scales, operands, 3.0) == 4.0  # the largest of the whole step, whichever came last


def test_what_is_too_large_becomes_the_largest_number() -> None:
    scales, operands = table()
    step(scales, operands, 1.0)
    cast = operands.by_rows(Operand.INPUT, torch.tensor([[50.0, -1.0]]), noted=False)
    assert cast.values.float().tolist() == [[448.0, -256.0]]


@pytest.mark.parametrize("wrong", [math.inf, math.nan, 0.0])
def test_a_step_that_says_nothing_leaves_the_scales_as_they_were(wrong: float) -> None:
    scales, operands = table(length=1)
    assert [step(scales, operands, x) for x in (3.0, wrong, 3.0)] == [128, 128, 128]
    assert step(scales, operands, 3.0) == 128


def test_an_evaluation_notes_nothing() -> None:
    scales, operands = table()
    operands.by_rows(Operand.INPUT, torch.tensor([[9.0]]), noted=False)
    assert not scales.amax.any()


def _two(rank: int, size: int) -> list[Tensor]:
    scales, operands = table(names=("a", "b"))
    step(scales, operands, 3.0 if rank else 100.0, group=grouped(rank, size))
    return [scales.history.clone(), scales.scales.clone()]


def test_ranks_agree_on_the_largest_of_all() -> None:
    first, second = run_ranks(_two, 2)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert first[0][-1].tolist() == [[100.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    assert first[1].tolist() == [[4.0, 1.0, 1.0], [1.0, 1.0, 1.0]]


@pytest.mark.parametrize("length", [2, 3, 8])
def test_a_saved_table_goes_on_where_it_was(length: int) -> None:
    """Through JSON, as a checkpoint keeps it; a longer or shorter history takes what it can."""
    scales, operands = table(length=3)
    for value in (100.0, 3.0, 1.0):
        step(scales, operands, value)
    again, restored = table(length=length)
    again.load(json.loads(json.dumps(scales.state())))
    assert again.steps == min(length, 3)
    assert step(again, restored, 1.0) == (4.0 if length > 2 else 128.0)
    if length == 3:
        step(scales, operands, 1.0)
        assert torch.equal(again.history, scales.history)


def test_the_table_of_another_model_or_dtype_is_not_taken() -> None:
    scales, operands = table()
    scales.load({})
    scales.load({"b": [[1.0, 1.0, 1.0]]})
    assert scales.steps == 0 and operands.row is not None and operands.row.scales is None


def test_a_layer_without_a_row_is_refused() -> None:
    with pytest.raises(ValueError, match="without a row of scales: z"):
        table()[0].bind({"z": Fp8Operands()})
