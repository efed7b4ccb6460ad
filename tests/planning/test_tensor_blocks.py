"""The blocks of X, W and Y that a grid's ranks hold, and the plan's documents about them."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

import pytest

from mpctl.planning.document import plan_document, rank_document
from mpctl.planning.plan import make_plan
from mpctl.planning.tensor_modes import held_blocks
from mpctl.tensor_grid import TensorGrid
from tests.jobs import job_of

GRIDS = [("2d", 4, None), ("2d", 9, None), ("2.5d", 4, 1), ("2.5d", 8, 2), ("3d", 8, None),
         ("3d", 27, None)]  # fmt: skip
SIZES = {"samples": 18, "hidden": 36, "ffn": 72}
CUBE: dict[str, Any] = {"parallel.tensor_mode": "3d", "parallel.tp": 8, "parallel.dp": 2,
                        "training.micro_batch_size": 4}  # fmt: skip


@pytest.mark.parametrize(("mode", "tp", "depth"), GRIDS)
def test_blocks_tile_each_matrix_as_often_as_it_is_held(
    mode: str, tp: int, depth: int | None
) -> None:
    """Every element once; those of W at each depth again."""
    grid = TensorGrid.of(mode, tp, depth)
    sizes = SIZES if tp != 8 else {"samples": 8, "hidden": 8, "ffn": 16}
    met = {tensor: Counter[tuple[int, int]]() for tensor in "XWY"}
    for rank in range(tp):
        for held in held_blocks(grid, sizes, rank):
            met[held.tensor].update(product(held.rows.block, held.columns.block))
            assert len(held.rows.block) * held.rows.parts == held.rows.size
    dims = {"X": ("samples", "hidden"), "W": ("hidden", "ffn"), "Y": ("samples", "ffn")}
    for tensor, (rows, columns) in dims.items():
        times = grid.axes.get("depth", 1) if tensor == "W" else 1
        whole = product(range(sizes[rows]), range(sizes[columns]))
        assert met[tensor] == dict.fromkeys(whole, times)


def test_the_hand_example() -> None:
    held = held_blocks(TensorGrid.of("2d", 4), {"samples": 4, "hidden": 8, "ffn": 16}, 2)
    assert [(block.rows.text, block.columns.text) for block in held] == [
        ("samples 2-3 of 4", "hidden 0-3 of 8"),
        ("hidden 4-7 of 8", "ffn 0-7 of 16"),
        ("samples 2-3 of 4", "ffn 0-7 of 16"),
    ]


@pytest.mark.parametrize(("mode", "tp", "depth"), GRIDS)
def test_what_is_exchanged_along_the_axes_completes_a_ranks_product(
    mode: str, tp: int, depth: int | None
) -> None:
    """2d: the blocks of X along col and of W along row meet in all of hidden. 3d: X gathered along
    input and W along weight are factors of the part of Y that is scattered along output."""
    grid = TensorGrid.of(mode, tp, depth)
    sizes = SIZES if tp != 8 else {"samples": 8, "hidden": 8, "ffn": 16}
    blocks = [held_blocks(grid, sizes, rank) for rank in range(tp)]
    along = {"X": "input", "W": "weight", "Y": "output"} if mode == "3d" else {
        "X": "col", "W": "row", "Y": ""}  # fmt: skip
    for rank in range(tp):
        me = grid.coords(rank)
        rows, columns = {}, {}
        for at, tensor in enumerate("XWY"):
            fixed = [axis for axis in grid.axes if axis != along[tensor]]
            same = [r for r in range(tp) if all(grid.coords(r)[a] == me[a] for a in fixed)]
            rows[tensor] = {i for r in same for i in blocks[r][at].rows.block}
            columns[tensor] = {i for r in same for i in blocks[r][at].columns.block}
        assert columns["X"] == rows["W"]
        assert (rows["X"], columns["W"]) == (rows["Y"], columns["Y"])


def test_a_rank_says_its_place_in_the_grid_and_its_blocks() -> None:
    plan = make_plan(job_of(CUBE))
    found = rank_document(plan, plan.require_legal(), 13)  # 5 of the second tp group
    assert found["coords"] == {"tp": 5, "weight": 1, "input": 0, "output": 1, "cp": 0, "dp": 1,
                               "pp": 0}  # fmt: skip
    assert found["groups"]["tp"] == list(range(8, 16))
    assert [found["groups"][axis] for axis in ("weight", "input", "output")] == [
        [12, 13], [13, 15], [9, 13]
    ]  # fmt: skip
    assert found["tensor_blocks"] == {
        "X": {"samples": [1, 2], "hidden": [384, 768]},
        "W": {"hidden": [576, 768], "ffn": [0, 1536]},
        "Y": {"samples": [3, 4], "ffn": [0, 1536]},
    }


def test_the_plan_says_the_mode_and_keeps_the_jobs_axes() -> None:
    plan = make_plan(job_of(CUBE))
    found = plan_document(plan, plan.require_legal(), kinds=None, ranks=True)
    assert (found["sizes"], found["order"]) == ({"tp": 8, "cp": 1, "dp": 2, "pp": 1}, "tp-cp-dp-pp")
    assert found["tensor_grid"] == {"weight": 2, "input": 2, "output": 2}
    assert (found["tensor_mode"], found["tensor_depth"]) == ("3d", None)
    assert list(found["groups"])[:4] == ["tp", "weight", "input", "output"]
    assert found["groups"]["weight-output"][1] == [2, 3, 6, 7]
    plain = make_plan(job_of({"parallel.tp": 2}))
    one = plan_document(plain, plain.require_legal(), kinds=None, ranks=False)
    assert (one["tensor_mode"], one["tensor_grid"]) == ("1d", {"tp": 2})
    assert "tensor_blocks" not in rank_document(plain, plain.require_legal(), 0)


def test_the_depth_that_was_left_open_is_told() -> None:
    settings = {"parallel.tensor_mode": "2.5d", "parallel.tp": 8, "training.micro_batch_size": 4}
    plan = make_plan(job_of(settings))
    found = plan_document(plan, plan.require_legal(), kinds=(), ranks=False)
    assert (found["tensor_depth"], found["tensor_grid"]["depth"]) == (2, 2)
