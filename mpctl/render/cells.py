"""GPUs as cells of a picture: a cell is a GPU on up to SHOWN_NODES nodes, else one or more nodes.

A cell is a range of consecutive ranks. Its letter is the number of its first rank's tp group, so
that a picture without colour says the same; below it stand its coordinates along the other axes,
and in a line of their own those of its experts.

>>> t = Topology.of({"tp": 2, "dp": 2, "pp": 4}, gpus_per_node=8)
>>> coordinates_text(t, range(8, 16)), letters(group_number(t, 9, ("tp",)))
('d0-1 p2-3', 'e')
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from mpctl.core.axes import AXIS_NAMES
from mpctl.core.topology import Topology
from mpctl.plan.planning.plan import Plan
from mpctl.render.fold import layers_text, merged, span_text

SHOWN_RANKS, SHOWN_NODES = 512, 16  # of a world that is drawn rank by rank
TILES = 1024  # cells of a larger one, at most


class Box(NamedTuple):
    """A node and its ranks as cells; number None: the full world, with nodes as cells."""

    number: int | None
    cells: tuple[range, ...]


def boxes(topology: Topology) -> list[Box]:
    """A box for each node of a small world, with a cell for each rank; for a large world one box,
    whose cells are nodes or, above TILES nodes, equal runs of nodes."""
    world, size = topology.world_size, topology.gpus_per_node
    if world <= SHOWN_RANKS and topology.nodes <= SHOWN_NODES:
        starts = range(0, world, size)
        return [
            Box(node, tuple(range(rank, rank + 1) for rank in range(s, min(s + size, world))))
            for node, s in enumerate(starts)
        ]
    nodes = -(-topology.nodes // TILES)  # of a tile
    starts = range(0, world, size * nodes)
    return [Box(None, tuple(range(s, min(s + size * nodes, world)) for s in starts))]


def cell_title(topology: Topology, ranks: range) -> str:
    """`rank 5`, `node 3` or `nodes 4-7`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    first, last = topology.node(ranks[0]), topology.node(ranks[-1])
    return f"node{'s' * (last > first)} {span_text(first, last)}"


def cell_label(topology: Topology, ranks: range) -> str:
    """`5`, `n3` or `n4`: the text in the cell."""
    return str(ranks[0]) if len(ranks) == 1 else f"n{topology.node(ranks[0])}"


def coordinate_axes(topology: Topology) -> list[str]:
    """The axes whose coordinates a cell shows below its tp group: dp, pp and others that are
    used."""
    others = (axis for axis in AXIS_NAMES if axis not in ("tp", "dp", "pp"))
    return ["dp", "pp", *(axis for axis in others if topology.sizes[axis] > 1)]


def coordinates_text(topology: Topology, ranks: range) -> str:
    """The coordinates of a cell's ranks along these axes: `d0-1 p2`."""
    axes = coordinate_axes(topology)
    return " ".join(f"{axis[0]}{span_text(*extent(topology, axis, ranks))}" for axis in axes)


def expert_axes(topology: Topology) -> list[str]:
    """The axes of more than one rank that cut experts, which a cell shows in its last line."""
    axes = (axis for view in topology.views for axis in ("ep", "etp") if axis in view.sizes)
    return [axis for axis in axes if topology.group_size(axis) > 1]


def experts_text(topology: Topology, ranks: range) -> str:
    """Return the index of a cell's ranks along the expert axes: `ep 3`, `ep 0-7 etp 1`; empty without such axes."""
    axes = expert_axes(topology)
    return " ".join(f"{axis} {span_text(*extent(topology, axis, ranks))}" for axis in axes)


def place_names(topology: Topology) -> str:
    """Return the legend of the lines below a cell's rank: `dp (d), pp (p), cp (c); then ep`."""
    places = ", ".join(f"{axis} ({axis[0]})" for axis in coordinate_axes(topology))
    axes = expert_axes(topology)
    return f"{places}; then {' and '.join(axes)}" if axes else places


def extent(topology: Topology, axis: str, ranks: range) -> tuple[int, int]:
    """The lowest and highest coordinate of consecutive ranks."""
    seen = topology.view_of(axis)
    stride, size = seen.strides[axis], seen.sizes[axis]
    low, high = ranks[0] // stride, ranks[-1] // stride
    if high - low + 1 >= size or low % size > high % size:
        return 0, size - 1
    return low % size, high % size


def group_number(topology: Topology, rank: int, axes: Sequence[str]) -> int:
    """The number of the rank's group over these kinds of groups, counted along the other axes."""
    seen = topology.view_of(*axes)
    coords, number, width = seen.coords(rank), 0, 1
    within = {part for axis in axes for part in seen.kinds[axis]}
    for axis in seen.order:
        if axis not in within:
            number += coords[axis] * width
            width *= seen.sizes[axis]
    return number


def node_layers(plan: Plan, topology: Topology, ranks: Iterable[int]) -> str:
    """The layers of all stages of these ranks, `layers 0-5`; empty without a model."""
    if plan.stages is None:
        return ""
    stages = sorted({topology.coords(rank)["pp"] for rank in ranks})
    spans = merged(span for stage in stages for span in plan.stages[stage])
    return f"layers {layers_text(spans)}"


def letters(number: int) -> str:
    """0 -> a, 25 -> z, 26 -> aa."""
    word = ""
    number += 1
    while number:
        number, letter = divmod(number - 1, 26)
        word = chr(ord("a") + letter) + word
    return word
