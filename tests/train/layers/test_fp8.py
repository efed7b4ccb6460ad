"""Linear layers' products in fp8, and delayed scaling."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from mpctl.train.kernels.fp8 import E4M3, Operand
from mpctl.train.layers.fp8 import Fp8Operands, Fp8Scales
from mpctl.train.layers.linear import ColumnParallelLinear, RowParallelLinear
from mpctl.train.layers.parameters import DeferredWgrad, defer_wgrad, initialise
from mpctl.train.transport.group import Group
from tests.threads import run_ranks
from tests.train.layers.oracle import grouped

B, S, I, O = 2, 16, 32, 64  # noqa: E741


def pair(group: Group, *, fp8: bool = True, split: bool = False) -> torch.nn.Sequential:
    """A column- and a row-parallel layer, I -> O -> I, in bf16."""

    def options() -> dict[str, Any]:
        return {
            "group": group,
            "sequence_parallel": split,
            "dtype": torch.bfloat16,
            "fp8": Fp8Operands() if fp8 else None,
        }

    layers = torch.nn.Sequential(ColumnParallelLinear(I, O, **options()), RowParallelLinear(O, I, **options()))
    initialise(layers, 7)
    return layers


def passed(layers: torch.nn.Module, x: Tensor) -> list[Tensor]:
    """Result and gradient of the input, then the gradients of the parameters."""
    x = x.clone().requires_grad_()
    y = layers(x)
    y.backward(numbers(*y.shape, seed=5) / 64)
    return [y.detach(), x.grad, *[p.grad for p in layers.parameters() if p.grad is not None]]


def numbers(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def error(ours: Tensor, exact: Tensor) -> float:
    """The length of the difference over that of the exact tensor."""
    return ((ours.float() - exact.float()).norm() / exact.float().norm()).item()


def test_results_and_gradients_are_those_of_16_bit_within_fp8s_error() -> None:
    """Rounding to 3 bits of mantissa errs by 2^-4 at most, some 2.6 % on average for each operand
    in e4m3 and twice that in e5m2; sums average it."""
    x = numbers(B, S, I)
    ours, exact = passed(pair(Group()), x), passed(pair(Group(), fp8=False), x)
    errors = [error(a, b) for a, b in zip(ours, exact, strict=True)]
    assert max(errors) < 0.09
    assert errors[0] > 0.005, "it was not multiplied in fp8"
    bias_of_row = errors[-1]
    assert bias_of_row < 1e-2, "biases and their gradients stay in 16 bit"


def test_what_is_kept_for_backward_is_the_input_in_one_byte() -> None:
    layer, kept = pair(Group())[0], []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    x = numbers(B, S, I).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x)
    own = [t for t in kept if t.data_ptr() != layer.weight.data_ptr() and t.dim()]
    assert [(t.dtype, tuple(t.shape)) for t in own] == [(E4M3, (I, B * S))]


def test_frozen_weights_keep_nothing_and_get_no_gradient() -> None:
    layer = pair(Group())[0]
    layer.weight.requires_grad_(False)
    x = numbers(B, S, I).requires_grad_()
    layer(x).sum().backward()
    assert layer.weight.grad is None and x.grad is not None
    alone = pair(Group())[0]
    alone(numbers(B, S, I)).sum().backward()
    assert alone.weight.grad is not None


def test_deferred_gradients_of_weights_are_the_same() -> None:
    x, later = numbers(B, S, I), DeferredWgrad()
    now, then = pair(Group()), pair(Group())
    for layer in then:
        defer_wgrad(layer.weight, later)
    first, second = passed(now, x), passed(then, x)
    assert torch.equal(first[1], second[1]) and then[0].weight.grad is None
    for compute in later.take():
        compute()
    for a, b in zip(now, then, strict=True):
        assert torch.equal(a.weight.grad, b.weight.grad)


def _split(rank: int, size: int, split: bool, is_deferred: bool) -> list[Tensor]:
    group = grouped(rank, size)
    layers, later = pair(group, split=split), DeferredWgrad()
    for layer in layers if is_deferred else ():
        defer_wgrad(layer.weight, later)
    x = numbers(B, S, I)
    x = x.requires_grad_() if not split else x.chunk(size, 1)[rank].clone().requires_grad_()
    y = layers(x)
    grad = numbers(B, S, I, seed=5) / 64
    y.backward(grad.chunk(size, 1)[rank] if split else grad)
    for compute in later.take():
        compute()
    return [y.detach(), x.grad, layers[0].weight.grad, layers[1].weight.grad]


@pytest.mark.parametrize(("split", "is_deferred"), [(False, False), (True, False), (True, True)])
def test_split_over_two_ranks_it_is_the_whole_layer(split: bool, is_deferred: bool) -> None:
    """Each rank scales its own shards; powers of two leave the values as they are, so that only
    the order of 16-bit sums differs."""
    whole = passed(pair(Group()), numbers(B, S, I))
    ranks = run_ranks(_split, 2, split, is_deferred)
    y, dx = (torch.cat([rank[i] for rank in ranks], 1) if split else ranks[0][i] for i in range(2))
    dw = [torch.cat([rank[2] for rank in ranks], 0), torch.cat([rank[3] for rank in ranks], 1)]
    for ours, exact in zip((y, dx, *dw), (whole[0], whole[1], whole[2], whole[4]), strict=True):
        assert error(ours, exact) < 0.01


CPU = torch.device("cpu")


def table(length: int = 2, names: tuple[str, ...] = ("a",)) -> tuple[Fp8Scales, Fp8Operands]:
    """A table, and the operands of its first layer."""
    scales, operands = Fp8Scales(names, length, CPU), Fp8Operands()
    scales.bind({names[0]: operands})
    return scales, operands


def step(scales: Fp8Scales, operands: Fp8Operands, *largest: float, group: Group | None = None) -> float:
    """A step of micro batches whose inputs have these largest elements; returns the scale that
    the last one was cast with."""
    used = 0.0
    for value in largest:
        matrix = torch.tensor([[value, -0.5 * value]], dtype=torch.bfloat16)
        rows, _ = operands.cast(Operand.INPUT, matrix, noted=True)
        assert rows is not None
        used = 1 / rows.inverse.item()
    scales.end_step(group or Group())
    return used


def test_by_hand() -> None:
    scales, operands = table()
    assert [step(scales, operands, x) for x in (3.0, 1.0, 1.0, 1.0)] == [128, 128, 128, 256]


def test_each_inverse_lies_where_cublaslt_can_read_it() -> None:
    """16 bytes divide its address; an H200 refused others with CUBLAS_STATUS_NOT_SUPPORTED."""
    for which in Operand:
        scales, operands = table(names=("first", "a", "b"))
        scales.end_step(Group())
        scales.bind({"a": operands})
        matrix = torch.ones(1, 2, dtype=torch.bfloat16)
        rows, columns = operands.cast(which, matrix, columns=True)
        assert rows is not None and columns is not None
        assert {each.inverse.data_ptr() % 16 for each in (rows, columns)} == {0}


def test_in_the_first_step_each_tensor_is_scaled_by_itself() -> None:
    scales, operands = table()
    assert step(scales, operands, 3.0, 100.0) == 4.0  # 100 x 4 = 400
    assert step(scales, operands, 3.0) == 4.0  # the largest of the whole step, whichever came last


def test_what_is_too_large_becomes_the_largest_number() -> None:
    scales, operands = table()
    step(scales, operands, 1.0)
    cast, _ = operands.cast(Operand.INPUT, torch.tensor([[50.0, -1.0]]))
    assert cast is not None and cast.values.float().tolist() == [[448.0, -256.0]]


@pytest.mark.parametrize("wrong", [math.inf, math.nan, 0.0])
def test_a_step_that_says_nothing_leaves_the_scales_as_they_were(wrong: float) -> None:
    scales, operands = table(length=1)
    assert [step(scales, operands, x) for x in (3.0, wrong, 3.0)] == [128, 128, 128]
    assert step(scales, operands, 3.0) == 128


def test_an_evaluation_notes_nothing() -> None:
    scales, operands = table()
    operands.cast(Operand.INPUT, torch.tensor([[9.0]]))
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
