"""The picture of a grid: every rank once, one rank's groups and blocks as the plan has them."""

from __future__ import annotations

import re
from typing import Any

import pytest

from mpctl.plan.planning.document import rank_document
from mpctl.plan.planning.plan import Plan, load_plan
from mpctl.render.parts import DataTable
from mpctl.render.plan_layout import grid_parts
from mpctl.render.plan_map import grid_figure
from mpctl.render.plan_svg import plan_svg
from mpctl.render.svg_grid import COLOURS, DRAWN_CELLS, MATRIX, GridPicture
from tests.cli.calls import Mpctl

GRIDS = [("2d", 4, 2), ("2d", 9, 3), ("2.5d", 8, 4), ("3d", 8, 4), ("3d", 27, 9)]
SIZES = {"model": "gpt2", "model.hidden": 1728}


def grid_plan(mode: str, tp: int, micro: int, **more: Any) -> Plan:
    return load_plan(
        None, {**SIZES, "parallel.tensor_mode": mode, "parallel.tp": tp, "training.micro_batch_size": micro, **more}
    )


def picture_of(plan: Plan) -> GridPicture:
    picture = GridPicture.find(plan, plan.require_legal(), 1000)
    assert picture is not None
    return picture


def cells(drawn: str) -> dict[int, tuple[str, str]]:
    """Rank -> its place and the class of its cell."""
    found = re.findall(r"<title>rank (\d+): ([^<]+)</title><rect[^>]*class=\"([^\"]+)\"", drawn)
    assert len({rank for rank, *_ in found}) == len(found)
    return {int(rank): (place, kind) for rank, place, kind in found}


@pytest.mark.parametrize(("mode", "tp", "micro"), GRIDS)
def test_every_rank_is_drawn_once_and_the_marked_ones_groups_are_coloured(mode: str, tp: int, micro: int) -> None:
    plan = grid_plan(mode, tp, micro)
    topology, picture = plan.require_legal(), picture_of(plan)
    drawn, height = picture.draw()
    found, me = cells(drawn), picture.ranks[picture.marked]
    assert sorted(found) == list(range(tp)) and height > MATRIX
    for rank, (place, kind) in found.items():
        coords = topology.coords(rank)
        assert place == ", ".join(f"{axis} {coords[axis]}" for axis in topology.parts["tp"])
        shared = [axis for axis in topology.parts["tp"] if rank in topology.group(me, axis)]
        axis = "me" if rank == me else shared[0] if shared else None
        assert kind == ("box" if axis is None else f"cell g{COLOURS[axis]}")
    reported = {text.split(":")[0]: colour for colour, text in picture.legend()}
    for axis in topology.parts["tp"]:
        members = ", ".join(map(str, topology.group(me, axis)))
        assert reported[f"its {axis} group [{members}]"] == COLOURS[axis]


@pytest.mark.parametrize(("mode", "tp", "micro"), GRIDS)
def test_the_marked_ranks_blocks_stand_where_they_lie(mode: str, tp: int, micro: int) -> None:
    plan = grid_plan(mode, tp, micro)
    picture = picture_of(plan)
    blocks = rank_document(plan, plan.require_legal(), picture.ranks[picture.marked])
    whole = {"samples": micro, "hidden": 1728, "ffn": 6912}
    drawn = re.findall(
        r'<rect x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)" class="cell g1">'
        r"<title>(\w+) ([\d-]+) of \d+, (\w+) ([\d-]+) of",
        picture.draw()[0],
    )
    assert len(drawn) == 3
    for (x, y, width, height, rows, _, columns, _), parts in zip(drawn, blocks["tensor_blocks"].values(), strict=True):
        assert list(parts) == [rows, columns]
        for at, size, dim in ((float(y) - 22, height, rows), (float(x), width, columns)):
            first, stop = parts[dim]
            assert at == pytest.approx(MATRIX * first / whole[dim], abs=0.01)
            assert float(size) == pytest.approx(MATRIX * (stop - first) / whole[dim], abs=0.01)


def test_1d_has_no_grid_and_a_grid_needs_no_model() -> None:
    plain = load_plan(None, {"model": "gpt2", "parallel.tp": 2})
    assert list(grid_parts(plain, plain.require_legal())) == []
    settings = {"parallel.tensor_mode": "2d", "parallel.tp": 4, "training.micro_batch_size": 2}
    bare = load_plan(None, settings)
    text = "".join(grid_figure(bare, bare.require_legal()))
    assert sorted(cells(text)) == [0, 1, 2, 3]
    tables = [part.title for part in grid_parts(bare, bare.require_legal()) if isinstance(part, DataTable)]
    assert tables == ["Tensor parallelism in 2d"]  # none of blocks
    assert "Grid of the 4 ranks" in plan_svg(bare, bare.require_legal())


def test_a_large_grid_is_drawn_in_part_and_a_huge_one_is_not() -> None:
    large = {
        "cluster.nodes": 512,
        "cluster.gpus_per_node": 8,
        "parallel.tp": 4096,
        "parallel.allow_tp_across_nodes": True,
        "training.micro_batch_size": 256,
    }
    cube = load_plan(None, {**large, "parallel.tensor_mode": "3d"})
    picture = picture_of(cube)
    assert len(cells(picture.draw()[0])) == DRAWN_CELLS
    assert "the first 1024" in picture.label
    square = load_plan(None, {**large, "parallel.tensor_mode": "2d"})
    assert GridPicture.find(square, square.require_legal(), 1000) is None
    assert "too many ranks" in "".join(grid_figure(square, square.require_legal()))


def test_the_terminal_shows_the_squares_and_what_the_axes_send(mpctl: Mpctl) -> None:
    cube = ("plan", "--tp", 8, "--tensor-mode", "3d", "--micro-batch-size", 4)
    said = mpctl(*cube)
    assert said.code == 0
    lines = [line.split() for line in said.out.splitlines()]
    at = lines.index(["output", "0", "output", "1"])
    assert lines[at + 1 : at + 3] == [["0", "1", "4", "5"], ["2", "3", "6", "7"]]
    assert ["weight-output", "2", "4", "[0,1,4,5]", "[2,3,6,7]"] in lines
    assert "parts of what a layer reads" in said.out
    ranks = [line.split() for line in mpctl(*cube, "--ranks").out.splitlines()]
    at = ranks.index(["rank", "node", "local", "tp", "weight", "input", "output", "layers"])
    assert ranks[at + 6] == ["5", "0", "5", "5", "1", "0", "1"]
    rank = mpctl(*cube, "--model", "gpt2", "--rank", 5).out
    assert "tp 5, weight 1, input 0, output 1" in rank
    assert "X: samples 1, hidden 384-767\nW: hidden 576-767, ffn 0-1535\n" in rank
