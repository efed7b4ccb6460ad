"""Tensor modes side by side: symbols against the list of messages, numbers against the plan."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

import pytest

from mpctl.core.collectives import get_collective, sent_by_rank
from mpctl.core.errors import InputError
from mpctl.core.tensor_grid import TensorGrid
from mpctl.model.operators.matmul import GradNeeds, MatMul
from mpctl.model.operators.tensor_messages import ProductSize, TensorMessage, product_messages
from mpctl.plan.planning.document import plan_document, rank_document
from mpctl.plan.planning.plan import load_plan, make_plan
from mpctl.plan.planning.tensor_modes import (
    COLUMNS,
    COSTS,
    grid_sizes,
    held_blocks,
    mode_choices,
    tensor_modes_document,
)
from mpctl.plan.planning.traffic import layer_figures
from tests.jobs import job_of

JOB: dict[str, Any] = {
    "cluster": "selene",
    "cluster.nodes": 1,
    "cluster.gpus_per_node": 8,
    "parallel.tp": 8,
    "model.layers": 4,
    "model.hidden": 512,
    "model.heads": 8,
    "model.vocab": 1000,
    "model.seq_length": 128,
    "training.micro_batch_size": 8,
    "training.global_batch_size": 16,
    "training.dtype": "bf16",
}
GRIDS = [
    ("1d", 4, None),
    ("2d", 4, None),
    ("2d", 16, None),
    ("2.5d", 8, 2),
    ("2.5d", 36, 4),
    ("3d", 8, None),
    ("3d", 27, None),
]
SIZE = 5760  # rows, inputs and outputs of a product, so that X, W and Y are as large


def group_size(grid: TensorGrid, message: TensorMessage) -> int:
    return grid.parts(grid.groups[message.axis]) if message.axis != "tp" else grid.size


def hops(grid: TensorGrid, message: TensorMessage) -> int:
    phases = get_collective(message.kind).phases
    return phases * message.count * (group_size(grid, message) - 1)


def test_ranks_with_more_layers_than_a_side_are_compared_in_2_5d() -> None:
    """12 = 3 x 2 x 2 is a grid, and so compared."""
    assert ("2.5d", 3) in mode_choices(12)


def test_2_5d_of_depth_1_is_said_to_be_2d() -> None:
    modes = tensor_modes_document(None, JOB, [4])["modes"]
    assert [entry["mode"] for entry in modes if entry["layer"]] == ["1d", "2d"]
    (issue,) = modes[2]["issues"]
    assert issue["message"] == "4 ranks are one layer of 2.5d, which is 2d"


@pytest.mark.parametrize(("mode", "tp", "depth"), GRIDS)
@pytest.mark.parametrize(("reads", "writes"), [("hidden", "ffn"), ("ffn", "hidden")])
def test_what_mpctl_sends_in_symbols_is_what_its_products_send(
    mode: str, tp: int, depth: int | None, reads: str, writes: str
) -> None:
    grid = TensorGrid.of(mode, tp, depth)
    product = MatMul("m", "mlp", ("batch", "seq", reads), (reads, writes), ("batch", "seq", writes))
    messages = product_messages(grid, product, ProductSize(SIZE, SIZE, SIZE), GradNeeds())
    sent = sum(m.count * sent_by_rank(m.kind, m.elements, group_size(grid, m)) for m in messages)
    costs = {name: cost.value(grid_sizes(grid)) for name, cost in COSTS[mode].items()}
    assert sent / SIZE**2 == pytest.approx(costs["sent"])
    assert sum(hops(grid, message) for message in messages) == costs["hops"]
    assert 1 / grid.weight_parts(("ffn", "hidden")) == costs["parameters"]
    if mode != "1d":
        assert 1 / (grid.sample_parts * grid.hidden_parts) == costs["activations"]


def test_documented_costs_by_hand() -> None:
    """Colossal-AI's documentation: 2.5d on q = 2, d = 2; 3d on q = 2."""
    sizes = grid_sizes(TensorGrid.of("2.5d", 8, 2))
    assert {n: COSTS["2.5d"][n].value(sizes) for n in ("bandwidth", "latency", "parameters")} == {
        "bandwidth": 3 * 1 * 3 / 4,
        "latency": 6,
        "parameters": 1 / 4,
    }
    cube = grid_sizes(TensorGrid.of("3d", 8))
    assert COSTS["3d"]["bandwidth"].value(cube) == 6 / 8
    assert all(list(costs) == list(COLUMNS) for costs in COSTS.values())


def test_the_choices_of_a_size() -> None:
    assert mode_choices(64) == [("1d", None), ("2d", None), ("2.5d", 4), ("3d", None)]
    assert mode_choices(128)[2:4] == [("2.5d", 2), ("3d", None)]
    assert mode_choices(4) == [("1d", None), ("2d", None), ("2.5d", None), ("3d", None)]


def test_each_mode_has_the_numbers_of_its_plan_or_a_reason() -> None:
    document = tensor_modes_document(None, JOB)
    able = {entry["mode"]: entry for entry in document["modes"] if entry["layer"]}
    assert list(able) == ["1d", "2.5d", "3d"]
    for mode, entry in able.items():
        settings = {"parallel.tensor_mode": mode, "parallel.tensor_depth": entry["depth"]}
        plan = load_plan(None, {**JOB, **settings})
        layer, step = entry["layer"], entry["step"]
        assert plan.estimate is not None and layer is not None and step is not None
        assert step["step_seconds"] == plan.estimate.step_seconds
        assert step["peak_bytes"] == plan.estimate.fullest_stage.device_bytes
        assert step["fits"] is plan.fits is True
        figures = layer_figures(plan.estimate.layout)
        assert layer["sent_bytes"] == figures.sent_bytes < step["sent_bytes"]
        block = plan.estimate.blocks[0].whole
        assert figures.sent_bytes == block.ring_bytes_per_rank
        assert sum(figures.traffic.values()) == sum(m.bytes * m.count for m in block.messages)
    (square,) = [entry for entry in document["modes"] if entry["mode"] == "2d"]
    assert square["axes"] is None and square["costs"]["sent"] == {"symbol": "6(q-1)/q^2", "value": None}
    assert [issue["rule"] for issue in square["issues"]] == ["tensor-mode"]
    assert "use" in square["issues"][0]["hint"]


def test_activations_and_parameters_of_a_layer_follow_the_law() -> None:
    """Against one rank: 1/P, but for vectors and statistics of norms."""
    one = load_plan(
        None, {**JOB, "parallel.tp": 1, "parallel.dp": 8, "cluster.nodes": 1, "training.global_batch_size": 64}
    ).estimate
    assert one is not None
    whole = layer_figures(one.layout)
    document = tensor_modes_document(None, JOB)
    parts = {"2.5d": (4, 8), "3d": (8, 8)}
    for entry in document["modes"]:
        if entry["mode"] in parts:
            layer, (weights, samples) = entry["layer"], parts[entry["mode"]]
            assert layer is not None
            assert layer["parameter_bytes"] == pytest.approx(whole.parameter_bytes / weights, rel=0.02)
            assert layer["saved_bytes"] == pytest.approx(whole.saved_bytes / samples, rel=0.02)
            assert layer["flops"] == whole.flops / 8


def test_sizes_that_are_asked_for_leave_dp_open() -> None:
    job = {**JOB, "parallel.dp": 1, "training.global_batch_size": 32}
    document = tensor_modes_document(None, job, [2, 4])
    able = [(entry["tp"], entry["mode"]) for entry in document["modes"] if entry["layer"]]
    assert able == [(2, "1d"), (4, "1d"), (4, "2d")]


def test_sequence_parallelism_is_left_out_where_it_cannot_be() -> None:
    document = tensor_modes_document(None, {**JOB, "parallel.sequence_parallel": True})
    assert document["changed"] == ["parallel.sequence_parallel"]
    assert [entry["mode"] for entry in document["modes"] if entry["layer"]] == ["1d", "2.5d", "3d"]


def test_what_cannot_run_in_any_mode_is_refused_with_every_reason() -> None:
    with pytest.raises(InputError) as caught:
        tensor_modes_document(None, JOB, [6])
    assert {"world-size", "tensor-mode"} <= {issue.rule for issue in caught.value.issues}
    with pytest.raises(InputError, match="needs one"):
        tensor_modes_document(None, {"parallel.tp": 4})


BLOCK_GRIDS = [("2d", 4, None), ("2d", 9, None), ("2.5d", 4, 1), ("2.5d", 8, 2), ("3d", 8, None), ("3d", 27, None)]
SIZES = {"samples": 18, "hidden": 36, "ffn": 72}
CUBE: dict[str, Any] = {
    "parallel.tensor_mode": "3d",
    "parallel.tp": 8,
    "parallel.dp": 2,
    "training.micro_batch_size": 4,
}


@pytest.mark.parametrize(("mode", "tp", "depth"), BLOCK_GRIDS)
def test_blocks_tile_each_matrix_as_often_as_it_is_held(mode: str, tp: int, depth: int | None) -> None:
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


@pytest.mark.parametrize(("mode", "tp", "depth"), BLOCK_GRIDS)
def test_what_is_exchanged_along_the_axes_completes_a_ranks_product(mode: str, tp: int, depth: int | None) -> None:
    """2d: the blocks of X along col and of W along row meet in all of hidden. 3d: X gathered along
    input and W along weight are factors of the part of Y that is scattered along output."""
    grid = TensorGrid.of(mode, tp, depth)
    sizes = SIZES if tp != 8 else {"samples": 8, "hidden": 8, "ffn": 16}
    blocks = [held_blocks(grid, sizes, rank) for rank in range(tp)]
    along = {"X": "input", "W": "weight", "Y": "output"} if mode == "3d" else {"X": "col", "W": "row", "Y": ""}
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
    assert found["coords"] == {"tp": 5, "weight": 1, "input": 0, "output": 1, "cp": 0, "dp": 1, "pp": 0}
    assert found["groups"]["tp"] == list(range(8, 16))
    assert [found["groups"][axis] for axis in ("weight", "input", "output")] == [[12, 13], [13, 15], [9, 13]]
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


def test_the_depth_that_was_left_open_is_reported() -> None:
    settings = {"parallel.tensor_mode": "2.5d", "parallel.tp": 8, "training.micro_batch_size": 4}
    plan = make_plan(job_of(settings))
    found = plan_document(plan, plan.require_legal(), kinds=(), ranks=False)
    assert (found["tensor_depth"], found["tensor_grid"]["depth"]) == (2, 2)
