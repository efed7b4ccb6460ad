"""What the axes of a tensor-parallel grid cut: by hand, and by counting who holds which element."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpctl.core.tensor_grid import MODES, TensorGrid, grid_axes
from mpctl.core.topology import Topology

# Of every kind that a layer, an embedding and a head have; matrices are [out, in].
PARAMETERS = (
    ("heads", "hidden"),
    ("ffn", "hidden"),
    ("hidden", "heads"),
    ("hidden", "ffn"),
    ("vocab", "hidden"),
    ("positions", "hidden"),
    ("hidden",),
    ("heads",),
    ("ffn",),
    ("vocab",),
)
VECTORS = tuple(dims for dims in PARAMETERS if len(dims) == 1 or dims[0] == "positions")


@st.composite
def grids(draw: st.DrawFn) -> TensorGrid:
    mode, side = draw(st.sampled_from(MODES[1:])), draw(st.integers(2, 4))
    depth = draw(st.integers(1, side)) if mode == "2.5d" else None
    ranks = {"2d": side**2, "2.5d": side**2 * (depth or 1), "3d": side**3}[mode]
    return TensorGrid.of(mode, ranks, depth)


def _blocks(grid: TensorGrid, dims: tuple[str, ...], shape: tuple[int, ...]) -> list[tuple[range, ...]]:
    """The part of each dimension that every rank keeps."""
    cuts = list(zip(shape, grid.weight_axes(dims), strict=True))
    places = [grid.coords(rank) for rank in range(grid.size)]
    return [tuple(grid.block(size, axes, place) for size, axes in cuts) for place in places]


def _shape(grid: TensorGrid, dims: tuple[str, ...]) -> tuple[int, ...]:
    """Two elements in each part, and 3 positions, which nothing cuts."""
    return tuple(
        3 if dim == "positions" else 2 * grid.parts(axes)
        for dim, axes in zip(dims, grid.weight_axes(dims), strict=True)
    )


@given(grids(), st.sampled_from(PARAMETERS))
def test_the_parts_of_a_parameter_cover_it_evenly(grid: TensorGrid, dims: tuple[str, ...]) -> None:
    shape = _shape(grid, dims)
    held = Counter(element for blocks in _blocks(grid, dims, shape) for element in product(*blocks))
    assert set(held) == set(product(*map(range, shape)))
    assert set(held.values()) == {grid.size // grid.weight_parts(dims)}


@given(grids(), st.sampled_from(PARAMETERS))
def test_a_gradient_is_summed_over_all_that_hold_the_part(grid: TensorGrid, dims: tuple[str, ...]) -> None:
    """So the ranks that hold a part are one group, by its name one of those that are made."""
    holders = defaultdict(list)
    for rank, blocks in enumerate(_blocks(grid, dims, _shape(grid, dims))):
        holders[blocks].append(rank)
    kind = grid.partial_kind(dims)
    assert (kind == "") == all(len(ranks) == 1 for ranks in holders.values())
    topology = _factored(grid)
    if kind:
        axes = grid.groups[kind]
        assert sorted(holders.values()) == sorted(list(g) for g in topology.groups(*axes))


@given(grids(), st.booleans())
def test_activations_are_cut_into_one_part_a_rank(grid: TensorGrid, inside: bool) -> None:
    samples, width = 2 * grid.sample_parts, 3 * grid.hidden_parts
    columns = grid.feature_axes if inside else grid.hidden_axes
    held = Counter(
        element
        for rank in range(grid.size)
        for element in product(
            grid.block(samples, grid.sample_axes(inside=inside), grid.coords(rank)),
            grid.block(width, columns, grid.coords(rank)),
        )
    )
    assert held == Counter(product(range(samples), range(width)))
    assert grid.parts(grid.sample_axes(inside=inside)) == grid.sample_parts
    assert grid.feature_parts == grid.hidden_parts


@given(grids())
def test_the_parts_of_a_product_meet(grid: TensorGrid) -> None:
    """Inside follows outside through a column- and a row-parallel product: features of the weight
    are those of the activations, and a bias meets the columns that it is added to."""
    for features in ("heads", "ffn"):
        up, down = grid.weight_axes((features, "hidden")), grid.weight_axes(("hidden", features))
        assert up[0] == grid.feature_axes == grid.weight_axes((features,))[0]
        assert down[0] == grid.hidden_axes == grid.weight_axes(("hidden",))[0]
        assert grid.weight_parts((features, "hidden")) == grid.weight_parts(("hidden", features))
    assert grid.weight_axes(("positions", "hidden")) == ((), grid.hidden_axes)
    assert grid.weight_axes(("vocab", "hidden"))[1] == grid.hidden_axes


def _factored(grid: TensorGrid, dp: int = 1) -> Topology:
    several = {name: axes for name, axes in grid.groups.items() if len(axes) > 1}
    whole = Topology.of({"tp": grid.size, "dp": dp})
    return whole.factored("tp", grid.axes, several)


@given(grids(), st.integers(1, 2))
def test_groups_are_those_of_the_topology(grid: TensorGrid, dp: int) -> None:
    """By its coordinates: ranks that differ along the group's axes only, in the order of the blocks
    of samples where the group cuts those."""
    topology = _factored(grid, dp)
    for rank in range(grid.size * dp):
        first = rank - rank % grid.size
        own = grid.coords(rank % grid.size)
        assert own.items() <= topology.coords(rank).items()
        for name, axes in grid.groups.items():
            others = {axis: place for axis, place in own.items() if axis not in axes}
            wanted = [first + peer for peer in range(grid.size) if others.items() <= grid.coords(peer).items()]
            assert list(topology.group(rank, *axes)) == wanted
            assert grid.kind_of(axes) == name


@given(grids(), st.booleans())
def test_a_group_is_in_the_order_of_its_samples(grid: TensorGrid, inside: bool) -> None:
    """So that its reduce-scatter gives each rank its own samples, and its all-gather all of them in
    order."""
    axes = grid.sample_axes(inside=inside)
    for group in _factored(grid).groups(*grid.groups[grid.kind_of(axes)]):
        blocks = [grid.block(grid.sample_parts, axes, grid.coords(rank)) for rank in group]
        assert blocks == [range(at, at + 1) for at in range(grid.sample_parts)]


def test_the_table_by_hand() -> None:
    """Rank 5 of 9 is row 1, column 2; rank 6 of 2 x 2 x 2 is column 0, row 1, depth 1."""
    square = TensorGrid.of("2d", 9)
    assert square.coords(5) == {"col": 2, "row": 1}
    assert square.block(9, square.sample_axes(), square.coords(5)) == range(3, 6)
    assert square.block(9, square.hidden_axes, square.coords(5)) == range(6, 9)
    # [out, in]: out over col, in over row
    assert _blocks(square, ("ffn", "hidden"), (9, 9))[5] == (range(6, 9), range(3, 6))
    assert _blocks(square, ("hidden", "ffn"), (9, 9))[5] == (range(6, 9), range(3, 6))
    assert _blocks(square, ("vocab", "hidden"), (9, 9))[5] == (range(3, 6), range(6, 9))
    deep = TensorGrid.of("2.5d", 8, 2)
    assert deep.coords(6) == {"col": 0, "row": 1, "depth": 1}
    assert deep.block(8, deep.sample_axes(), deep.coords(6)) == range(6, 8)
    assert _blocks(deep, ("ffn", "hidden"), (8, 8))[6] == (range(4), range(4, 8))
    assert deep.groups == {"col": ("col",), "row": ("row",), "depth": ("depth",), "row-depth": ("row", "depth")}
    assert (deep.partial_kind(("ffn", "hidden")), deep.partial_kind(("hidden",))) == ("depth", "row-depth")


def test_a_cube_by_hand() -> None:
    """Rank 3 of 8 is weight 1, input 1, output 0. Of 8 samples it has, outside, those of input 1
    and in them of weight 1; inside, those of output 0 and weight 1."""
    cube = TensorGrid.of("3d", 8)
    place = cube.coords(3)
    assert place == {"weight": 1, "input": 1, "output": 0}
    assert cube.block(8, cube.sample_axes(), place) == range(6, 8)
    assert cube.block(8, cube.sample_axes(inside=True), place) == range(2, 4)
    assert _blocks(cube, ("ffn", "hidden"), (8, 8))[3] == (range(4, 8), range(2, 4))
    assert _blocks(cube, ("hidden", "ffn"), (8, 8))[3] == (range(4), range(6, 8))
    assert (cube.partial_kind(("hidden",)), cube.partial_kind(("ffn",))) == ("weight-input", "weight-output")
    assert cube.partial_kind(("ffn", "hidden")) == ""


@pytest.mark.parametrize(
    ("mode", "ranks", "depth", "axes"),
    [
        ("2d", 4, None, {"col": 2, "row": 2}),
        ("2d", 6, None, None),
        ("2d", 1, None, None),
        ("2.5d", 4, None, {"col": 2, "row": 2, "depth": 1}),
        ("2.5d", 8, None, {"col": 2, "row": 2, "depth": 2}),
        ("2.5d", 8, 1, None),
        ("2.5d", 12, None, {"col": 2, "row": 2, "depth": 3}),
        ("2.5d", 64, None, {"col": 8, "row": 8, "depth": 1}),
        ("2.5d", 6, None, None),
        ("2.5d", 12, 3, {"col": 2, "row": 2, "depth": 3}),
        ("2.5d", 27, None, {"col": 3, "row": 3, "depth": 3}),
        ("2.5d", 2, 2, None),
        ("3d", 8, None, {"weight": 2, "input": 2, "output": 2}),
        ("3d", 1000, None, {"weight": 10, "input": 10, "output": 10}),
        ("3d", 9, None, None),
    ],
)
def test_which_ranks_are_a_grid(mode: str, ranks: int, depth: int | None, axes: dict[str, int] | None) -> None:
    assert grid_axes(mode, ranks, depth) == axes
    if axes is None:
        with pytest.raises(ValueError, match=f"{ranks} ranks are no grid of tensor_mode {mode}"):
            TensorGrid.of(mode, ranks, depth)
    else:
        grid = TensorGrid.of(mode, ranks, depth)
        assert grid.size == ranks
        places = [tuple(grid.coords(rank).values()) for rank in range(ranks)]
        assert sorted(set(places)) == sorted(places)


@pytest.mark.parametrize("split", [False, True])
def test_a_row_of_ranks_cuts_features_alone(split: bool) -> None:
    row = TensorGrid.of("1d", 4, sequence_parallel=split)
    assert (row.sample_parts, row.hidden_parts, row.feature_parts) == (1, 1, 4)
    assert [row.weight_parts(dims) for dims in PARAMETERS] == [4] * 5 + [1, 1] + [4] * 3
    whole = {("hidden",), ("positions", "hidden")}
    for dims in PARAMETERS:
        assert row.partial_kind(dims) == ("tp" if split and dims in whole else "")
    assert row.groups == {}


def test_what_does_not_divide_is_refused() -> None:
    grid = TensorGrid.of("3d", 8)
    with pytest.raises(ValueError, match="6 is not divisible by 4"):
        grid.block(6, grid.sample_axes(), grid.coords(0))


def test_vectors_are_in_every_part_of_the_samples() -> None:
    """Of a 2.5d grid of one depth the group over row and depth is that over row."""
    flat = TensorGrid.of("2.5d", 4, 1)
    assert set(flat.groups) == {"col", "row"}
    assert {flat.partial_kind(dims) for dims in VECTORS} == {"row"}
    assert {flat.partial_kind(dims) for dims in PARAMETERS if dims not in VECTORS} == {""}
