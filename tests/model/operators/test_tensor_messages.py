"""Messages of products, norms and loss on a grid: by hand, and against the closed forms of papers.

A layer forward, elements that a rank receives (b batch, s sequence, h hidden): 2d (7 bsh + 12
h^2)/q of broadcasts (arXiv 2104.05343), 2.5d 7 bsh/(dq) + 12 h^2/q (2105.14500), and 3d, in a ring,
(l-1)/l^3 (16 bsh + 12 h^2) (2105.14450).
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

import pytest

from mpctl.core.tensor_grid import TensorGrid
from mpctl.model.families.gpt.ops import HIDDEN, operator_table
from mpctl.model.operators.blocks import head, lookup
from mpctl.model.operators.matmul import GradNeeds, MatMul
from mpctl.model.operators.tensor_messages import (
    ProductSize,
    TensorMessage,
    loss_messages,
    norm_messages,
    product_messages,
)
from tests.jobs import GPT, job_of, shape_of

B, S, H = 72, 4, 144  # divided by 4 and 9, and by 8 and 27
BSH, H2 = B * S * H, H * H
WIDTHS = {"hidden": 1, "heads": 3, "ffn": 4}
SQUARES, CUBES = (4, 9), (8, 27)
Sent = list[tuple[str, str, int, int, str]]


def size_of(product: MatMul) -> ProductSize:
    """Of a layer whose attention.output reads h columns of heads, and qkv writes 3 h."""
    inputs = 1 if product.name == "attention.output" else WIDTHS[product.reads[-1]]
    return ProductSize(B * S, inputs * H, WIDTHS[product.writes[-1]] * H)


BLOCK = operator_table(shape_of(job_of(GPT)), tp=1).stacks[0].block_of(0).products


def layer(grid: TensorGrid) -> list[TensorMessage]:
    return [m for p in BLOCK for m in product_messages(grid, p, size_of(p), GradNeeds())]


def elements(messages: Iterable[TensorMessage], phase: str, kinds: Iterable[str]) -> int:
    return sum(m.elements * m.count for m in messages if m.phase == phase and m.kind in kinds)


def fields(messages: Iterable[TensorMessage]) -> Sent:
    return [(m.axis, m.kind, m.elements, m.count, m.phase) for m in messages]


@pytest.mark.parametrize("tp", SQUARES)
def test_a_layer_in_2d_is_as_optimus_has_it(tp: int) -> None:
    q = round(tp**0.5)
    messages = layer(TensorGrid.of("2d", tp))
    assert {m.kind for m in messages if m.phase == "forward"} == {"broadcast"}
    assert elements(messages, "forward", ["broadcast"]) * q == 7 * BSH + 12 * H2
    # Backward: dX moves W once and sums dX once, dW moves X once and sums dW once.
    assert elements(messages, "backward", ["broadcast"]) * q == 7 * BSH + 12 * H2
    assert elements(messages, "backward", ["reduce"]) * q == 7 * BSH + 12 * H2
    assert sum(m.count for m in messages if m.phase == "forward") == 4 * 2 * q


@pytest.mark.parametrize(("tp", "d"), [(4, 1), (8, 2), (18, 2), (27, 3)])
def test_a_layer_in_2_5d_is_as_tesseract_has_it(tp: int, d: int) -> None:
    grid = TensorGrid.of("2.5d", tp, d)
    q = grid.axes["col"]
    found = elements(layer(grid), "forward", ["broadcast"])
    assert found == Fraction(7 * BSH, d * q) + Fraction(12 * H2, q)
    assert {m.axis for m in layer(grid)} == {"col", "row"}  # depth is summed once a step


@pytest.mark.parametrize("tp", CUBES)
def test_a_layer_in_3d_is_as_its_paper_has_it(tp: int) -> None:
    side = round(tp ** (1 / 3))
    messages = layer(TensorGrid.of("3d", tp))
    kinds = ("all_gather", "reduce_scatter")
    ring = Fraction(side - 1, side) * elements(messages, "forward", kinds)
    assert ring == Fraction(side - 1, side**3) * (16 * BSH + 12 * H2)
    # Backward gathers dY, W and X, and scatters dX and dW: twice the forward but for one Y.
    back = elements(messages, "backward", kinds)
    assert back * side**2 == 2 * (16 * BSH + 12 * H2) - 9 * BSH


def test_a_layer_in_1d_is_four_all_reduces() -> None:
    messages = layer(TensorGrid.of("1d", 4))
    assert fields(messages) == [
        ("tp", "all_reduce", BSH, 1, "backward"),
        ("tp", "all_reduce", BSH, 1, "forward"),
        ("tp", "all_reduce", BSH, 1, "backward"),
        ("tp", "all_reduce", BSH, 1, "forward"),
    ]
    split = layer(TensorGrid.of("1d", 4, sequence_parallel=True))
    assert sum(m.elements for m in split) == 10 * BSH


def test_a_column_product_whose_result_is_gathered_sends_it_too() -> None:
    product = MatMul("up", "mlp", HIDDEN, ("hidden", "ffn"), (*HIDDEN[:2], "ffn"), is_gathered=True)
    size, needs = ProductSize(8, 4, 6), GradNeeds()
    plain = product_messages(TensorGrid.of("1d", 2), product, size, needs)
    assert fields(plain) == [("tp", "all_reduce", 32, 1, "backward"), ("tp", "all_gather", 48, 1, "forward")]
    grid = TensorGrid.of("1d", 2, sequence_parallel=True)
    sent = fields(product_messages(grid, product, size, needs))
    assert sent.count(("tp", "all_gather", 48, 1, "forward")) == 1
    assert sent.count(("tp", "all_gather", 48, 1, "backward")) == 1
    frozen = product_messages(grid, product, size, GradNeeds(False, False, False))
    assert {message.phase for message in frozen} == {"forward"}


@pytest.mark.parametrize(
    ("mode", "axes"),
    [("1d", ["tp"]), ("2d", ["col", "row"]), ("2.5d", ["col", "row", "depth"]), ("3d", ["weight", "input", "output"])],
)
def test_one_rank_sends_nothing(mode: str, axes: list[str]) -> None:
    grid = TensorGrid(mode, dict.fromkeys(axes, 1))
    assert not layer(grid) and not loss_messages(grid, 8)
    assert not norm_messages(grid, "layernorm", 8, goes_back=True)


def test_what_is_frozen_sends_less() -> None:
    """2d, q=2, X [8, 4] by W [4, 4]: blocks of 8 and of 4 elements."""
    grid, size = TensorGrid.of("2d", 4), ProductSize(8, 4, 4)
    forward = [("col", "broadcast", 8, 2, "forward"), ("row", "broadcast", 4, 2, "forward")]
    of_x = [("row", "broadcast", 4, 2, "backward"), ("col", "reduce", 8, 2, "backward")]
    of_w = [("col", "broadcast", 8, 2, "backward"), ("row", "reduce", 4, 2, "backward")]
    for x, w in ((True, True), (True, False), (False, True), (False, False)):
        found = product_messages(grid, BLOCK[0], size, GradNeeds(x, w))
        assert fields(found) == forward + of_x * x + of_w * w


def test_a_head_in_2d_moves_table_and_logits() -> None:
    """q=2, r=8, h=4, v=16: table blocks of 16 elements, logits blocks of 32."""
    found = product_messages(TensorGrid.of("2d", 4), head(HIDDEN, tied=True), ProductSize(8, 4, 16), GradNeeds())
    assert fields(found) == [
        ("row", "broadcast", 16, 2, "forward"),
        ("col", "reduce", 32, 2, "forward"),
        ("col", "broadcast", 32, 2, "backward"),
        ("row", "broadcast", 16, 2, "backward"),
        ("row", "reduce", 16, 2, "backward"),
    ]


def test_a_row_product_in_3d_has_the_roles_of_input_and_output_swapped() -> None:
    """l=2, X [8, 4] by W [4, 12]: 8, 12 and 24 elements of a gathered or scattered block."""
    grid, size = TensorGrid.of("3d", 8), ProductSize(8, 4, 12)
    for product, source, target in ((BLOCK[0], "input", "output"), (BLOCK[1], "output", "input")):
        assert fields(product_messages(grid, product, size, GradNeeds())) == [
            (source, "all_gather", 8, 1, "forward"),
            ("weight", "all_gather", 12, 1, "forward"),
            (target, "reduce_scatter", 24, 1, "forward"),
            (target, "all_gather", 24, 1, "backward"),
            ("weight", "all_gather", 12, 1, "backward"),
            (source, "reduce_scatter", 8, 1, "backward"),
            (source, "all_gather", 8, 1, "backward"),
            ("weight", "reduce_scatter", 12, 1, "backward"),
        ]


@pytest.mark.parametrize(
    ("mode", "tp", "axis", "own"),
    [("2d", 4, "row", 16 * 4 // 2), ("2.5d", 8, "row", 8 * 4 // 2), ("3d", 8, "weight-input", 32)],
)
def test_a_lookup_sums_vectors_and_scatters_samples(mode: str, tp: int, axis: str, own: int) -> None:
    """16 rows of 4 hidden: each rank's half of the columns, in 2.5d of this depth's rows."""
    found = product_messages(TensorGrid.of(mode, tp), lookup(HIDDEN), ProductSize(16, 32, 4), GradNeeds(x=False))
    assert fields(found) == [(axis, "reduce_scatter", own, 1, "forward"), (axis, "all_gather", own, 1, "backward")]


def test_norms_and_loss_send_a_number_or_two_a_row() -> None:
    """2d, q=2, 16 rows, 8 of them here; in float32 at least."""
    grid = TensorGrid.of("2d", 4)
    layernorm = norm_messages(grid, "layernorm", 16, goes_back=True)
    rmsnorm = norm_messages(grid, "rmsnorm", 16, goes_back=True)
    assert fields(layernorm) == [("col", "all_gather", 32, 1, "forward"), ("col", "all_reduce", 16, 1, "backward")]
    assert fields(rmsnorm) == [("col", "all_reduce", 8, 1, "forward"), ("col", "all_reduce", 8, 1, "backward")]
    loss = loss_messages(grid, 16)
    assert fields(loss) == [("col", "all_reduce", 8, 3, "forward")]
    assert all(m.is_float for m in (*layernorm, *rmsnorm, *loss))
    assert fields(norm_messages(grid, "rmsnorm", 16, goes_back=False)) == fields(rmsnorm)[:1]
