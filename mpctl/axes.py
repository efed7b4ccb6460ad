"""The axes of parallelism, one row each; a new kind of parallelism starts here.

A row is all that `Topology` needs to number ranks along an axis and to list its groups, and all
that the tables, the JSON and the page of `mpctl plan` need to show it; `parallel.NAME` of a job is
its size (mpctl/spec/parallel.py). A *group kind* is a named set of axes: the ranks that differ only
along them form one group.

An axis may be split into several (`Topology.factored`): GRID_AXES has those of tp in 2d, 2.5d and
3d (tensor_grid.py). The same ranks may be seen along other axes (`Topology.view`: experts).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of parallelism: its short name, its title, what it splits and what it sends."""

    name: str
    title: str
    splits: str
    sends: str


AXES = (
    Axis("tp", "tensor", "every large matrix", "activations, four times a block"),
    Axis("cp", "context", "the sequence", "keys and values, every layer"),
    Axis("dp", "data", "the batch", "gradients, once a step"),
    Axis("pp", "pipeline", "the layers", "activations, between neighbours"),
)
# Axes into which tp is split in tensor_mode 2d (col, row), 2.5d (and depth) and 3d.
GRID_AXES = (
    Axis("col", "columns of tp", "hidden states, heads and MLP columns", "blocks of activations"),
    Axis("row", "rows of tp", "samples, and the rows of matrices", "blocks of matrices"),
    Axis("depth", "layers of tp", "samples", "gradients of matrices, once a step"),
    Axis("weight", "weights of tp", "samples, and each rank's matrices", "parts of matrices"),
    Axis("input", "inputs of tp", "heads and MLP columns; samples between layers",
         "parts of what a layer reads"),
    Axis("output", "outputs of tp", "hidden states; samples inside of layers",
         "parts of what a layer writes"),
)  # fmt: skip
AXIS_NAMES = tuple(axis.name for axis in AXES)
DEFAULT_ORDER = "tp-cp-dp-pp"

# mp is what one replica of the model spans. The two embedding kinds are subsets of a pp group.
UNIONS: dict[str, tuple[str, ...]] = {
    "mp": ("tp", "pp"),
    "embedding": ("pp",),
    "position_embedding": ("pp",),
}


def group_kinds(
    axes: Iterable[str], unions: Mapping[str, tuple[str, ...]] = UNIONS
) -> dict[str, tuple[str, ...]]:
    """Every group kind over these axes: each axis by itself, then the unions of them."""
    return {axis: (axis,) for axis in axes} | dict(unions)


GROUP_KINDS = group_kinds(AXIS_NAMES)


def used_axes(order: str, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The axes of more than one rank in an order, those that it leaves out last: orders with the
    same ones number the ranks alike.

    >>> used_axes("tp-cp-dp-pp", {"tp": 2, "cp": 1, "dp": 4, "pp": 1})
    ('tp', 'dp')
    """
    named = order.split("-")
    axes = (*named, *(axis for axis in AXIS_NAMES if axis not in named))
    return tuple(axis for axis in axes if sizes[axis] > 1)


def find_order(order: str, orders: Iterable[str], sizes: Mapping[str, int]) -> str | None:
    """The first of these orders that numbers the ranks as `order` does, if one does."""
    own = used_axes(order, sizes)
    return next((other for other in orders if used_axes(other, sizes) == own), None)


def parse_order(
    order: str, sizes: Mapping[str, int], axes: Iterable[str] = AXIS_NAMES
) -> tuple[str, ...]:
    """`"tp-cp-dp-pp"` -> its axes, fastest-varying first; axes of size 1 may be left out.

    axes: the names that there are. Raises ValueError naming the axes that are unknown, repeated or
    missing.
    """
    named, names = order.split("-"), tuple(axes)
    unknown = [name for name in named if name not in names]
    repeated = sorted({name for name in named if named.count(name) > 1})
    left_out = [name for name in names if name not in named]
    missing = [name for name in left_out if sizes.get(name, 1) > 1]
    problems = [
        f"{word} {', '.join(group)}"
        for word, group in (("unknown", unknown), ("repeated", repeated), ("missing", missing))
        if group
    ]
    if problems:
        raise ValueError(f"{order!r} has axes that are {'; '.join(problems)}")
    return (*named, *left_out)


def order_hint(axes: Collection[str]) -> str:
    """How to write an order of these axes."""
    return f"use each of {', '.join(axes)} once, fastest first, as in {'-'.join(axes)}"
