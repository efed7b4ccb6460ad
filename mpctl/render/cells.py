"""GPUs as cells of a picture: one each on up to SHOWN_NODES nodes, then a node each, then many.

A cell is a range of consecutive ranks. Its letter is the number of its first rank's tp group, so
that a picture without colour says the same; `place` is where it stands along the other axes.

>>> t = Topology.of({"tp": 2, "dp": 2, "pp": 4}, gpus_per_node=8)
>>> place(t, range(8, 16)), letters(group_number(t, 9, ("tp",)))
('d0-1 p2-3', 'e')
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpctl.render.fold import span_text
from mpctl.topology import Topology

SHOWN, SHOWN_NODES = 512, 16
TILES = 1024


@dataclass(frozen=True, slots=True)
class Box:
    """A node, or all nodes as tiles (number is None)."""

    number: int | None
    cells: tuple[range, ...]


def boxes(topology: Topology) -> list[Box]:
    world, size = topology.world_size, topology.gpus_per_node
    if world <= SHOWN and topology.nodes <= SHOWN_NODES:
        return [
            Box(node, tuple(range(r, r + 1) for r in _node(topology, node, 1)))
            for node in range(topology.nodes)
        ]
    nodes = -(-topology.nodes // TILES)  # of a tile
    starts = range(0, world, size * nodes)
    return [Box(None, tuple(range(s, min(s + size * nodes, world)) for s in starts))]


def _node(topology: Topology, node: int, nodes: int) -> range:
    first = node * topology.gpus_per_node
    return range(first, min(first + nodes * topology.gpus_per_node, topology.world_size))


def title(topology: Topology, ranks: range) -> str:
    """`rank 5`, `node 3` or `nodes 4-7`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    nodes = [topology.node(rank) for rank in (ranks[0], ranks[-1])]
    return f"node {nodes[0]}" if nodes[0] == nodes[1] else f"nodes {nodes[0]}-{nodes[1]}"


def short(topology: Topology, ranks: range) -> str:
    """`5`, `n3` or `n4`: what is written in the cell."""
    return str(ranks[0]) if len(ranks) == 1 else f"n{topology.node(ranks[0])}"


def place(topology: Topology, ranks: range) -> str:
    """Along dp, pp and, where there is one, cp: of all its ranks."""
    axes = ("dp", "pp") + ("cp",) * (topology.sizes["cp"] > 1)
    return " ".join(f"{axis[0]}{span_text(*extent(topology, axis, ranks))}" for axis in axes)


def extent(topology: Topology, axis: str, ranks: range) -> tuple[int, int]:
    """The lowest and highest coordinate of consecutive ranks."""
    stride, size = topology.strides[axis], topology.sizes[axis]
    low, high = ranks[0] // stride, ranks[-1] // stride
    if high - low + 1 >= size or low % size > high % size:
        return 0, size - 1
    return low % size, high % size


def group_number(topology: Topology, rank: int, axes: Sequence[str]) -> int:
    """Where the rank's group over `axes` comes, counted along the other axes."""
    coords, found, width = topology.coords(rank), 0, 1
    for axis in topology.order:
        if axis not in axes:
            found += coords[axis] * width
            width *= topology.sizes[axis]
    return found


def letters(number: int) -> str:
    """0 -> a, 25 -> z, 26 -> aa."""
    word = ""
    number += 1
    while number:
        number, letter = divmod(number - 1, 26)
        word = chr(ord("a") + letter) + word
    return word
