"""The axes of parallelism, one row each; a new kind of parallelism starts here.

A row determines the rank law and its groups (topology.py), the size as a key of `[parallel]`
(spec/parallel.py), the law that the sizes fill the world, the loops and keys of a search, and every
table, picture and JSON that lists axes. sharding.py defines what an axis splits.

A *group kind* is a named set of axes: the ranks that differ only along them form one group. An axis
may be split into several (`Topology.factored`): GRID_AXES has those of tp in 2d, 2.5d and 3d
(tensor_grid.py). The same ranks may be numbered along other axes (`Topology.view`: experts).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from math import prod
from typing import NamedTuple


class Axis(NamedTuple):
    """One axis of parallelism.

    splits, sends: in words. size: the meaning of its size in `[parallel]`. supported_by: the key of
    a runtime's `[runs]` that says whether it has the axis; empty where every runtime has it.
    in_layer: whether the seconds and bytes of a single layer depend on its size.
    """

    name: str
    title: str
    splits: str
    sends: str
    size: str = ""
    supported_by: str = ""
    in_layer: bool = True


AXES = (
    Axis("tp", "tensor", "every large matrix", "activations, four times a block", "tensor-parallel size", "tensor"),
    Axis(
        "cp",
        "context",
        "the sequence",
        "keys and values, every layer",
        "context-parallel size: ranks that share each sequence",
        "context",
    ),
    Axis(
        "dp",
        "data",
        "the batch",
        "gradients, once a step",
        "data-parallel size; ranks / (tp x cp x pp) when absent",
        in_layer=False,
    ),
    Axis(
        "pp",
        "pipeline",
        "the layers",
        "activations, between neighbours",
        "pipeline-parallel size: number of stages",
        "pipeline",
        in_layer=False,
    ),
)
FILLING = "dp"
"""The axis that fills the rest of the world if a job does not give its size."""
# Axes into which tp is split in tensor_mode 2d (col, row), 2.5d (and depth) and 3d.
GRID_AXES = (
    Axis("col", "columns of tp", "hidden states, heads and MLP columns", "blocks of activations"),
    Axis("row", "rows of tp", "samples, and the rows of matrices", "blocks of matrices"),
    Axis("depth", "layers of tp", "samples", "gradients of matrices, once a step"),
    Axis("weight", "weights of tp", "samples, and each rank's matrices", "parts of matrices"),
    Axis("input", "inputs of tp", "heads and MLP columns; samples between layers", "parts of what a layer reads"),
    Axis("output", "outputs of tp", "hidden states; samples inside of layers", "parts of what a layer writes"),
)
# The axes of the experts' view: the same ranks, numbered again with ep at cp's place.
EXPERT_AXES = (
    Axis("etp", "expert tensor", "every expert", "rows of tokens, twice a layer", supported_by="expert_tensor"),
    Axis("ep", "expert", "the experts of a layer", "rows of tokens, twice a layer", supported_by="experts"),
    Axis("edp", "expert data", "the tokens of a step", "experts' gradients, once a step"),
)
AXIS_NAMES = tuple(axis.name for axis in AXES)
CHOSEN_AXES = tuple(name for name in AXIS_NAMES if name != FILLING)
DEFAULT_ORDER = "-".join(AXIS_NAMES)

# dp_cp: the ranks that hold the same parameters and reduce their gradients together. mp: the ranks
# of one replica of the model. The two embedding kinds are subsets of a pp group.
UNIONS: dict[str, tuple[str, ...]] = {
    "dp_cp": ("dp", "cp"),
    "mp": ("tp", "pp"),
    "embedding": ("pp",),
    "position_embedding": ("pp",),
}

EXPERT_UNIONS: dict[str, tuple[str, ...]] = {"etp_ep": ("etp", "ep")}
"""etp_ep: the ranks that together hold each expert of a layer once."""

CP_GROUPS = ("cp_a2a", "cp_p2p")
"""Groups that `parallel.cp_a2a_size` cuts cp into: consecutive ranks that exchange sequence for heads, and
rings of ranks with the same heads."""

# The groups that messages of a step go over: gradients over all ranks with the same parameters.
MESSAGE_GROUPS = tuple("dp_cp" if name == FILLING else name for name in AXIS_NAMES)


def zero_groups(replicas: str) -> tuple[str, str]:
    """Return names of the groups that `parallel.zero_size` cuts `replicas` into: consecutive
    replicas that share ZeRO's states, and ranks that hold equal shares.

    >>> zero_groups("dp_cp"), zero_groups("edp")
    (('zero', 'zero_replicas'), ('edp_zero', 'edp_zero_replicas'))
    """
    prefix = "" if replicas == "dp_cp" else f"{replicas}_"
    return f"{prefix}zero", f"{prefix}zero_replicas"


def group_kinds(axes: Iterable[str], unions: Mapping[str, tuple[str, ...]] = UNIONS) -> dict[str, tuple[str, ...]]:
    """Every group kind over these axes: each axis by itself, then the unions of them."""
    return {axis: (axis,) for axis in axes} | dict(unions)


GROUP_KINDS = group_kinds(AXIS_NAMES)


def chosen_ranks(sizes: Mapping[str, int]) -> int:
    """Ranks of all axes but the one that fills the world; their product must divide the world.

    >>> chosen_ranks({"tp": 2, "cp": 1, "dp": 8, "pp": 4})
    8
    """
    return prod(sizes[axis] for axis in CHOSEN_AXES)


def sizes_text(sizes: Mapping[str, int], axes: Iterable[str] = AXIS_NAMES) -> str:
    """`tp 2 x cp 1 x dp 8 x pp 4`."""
    return " x ".join(f"{axis} {sizes[axis]}" for axis in axes)


def used_axes(order: str, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The axes of more than one rank in an order, those that it leaves out last: orders with the
    same used axes number the ranks alike.

    >>> used_axes("tp-cp-dp-pp", {"tp": 2, "cp": 1, "dp": 4, "pp": 1})
    ('tp', 'dp')
    """
    named = dense_order(order).split("-")
    axes = (*named, *(axis for axis in AXIS_NAMES if axis not in named))
    return tuple(axis for axis in axes if sizes[axis] > 1)


def dense_order(order: str) -> str:
    """An order of a job without ep, which numbers the ranks for experts alone.

    >>> dense_order("tp-cp-ep-dp-pp")
    'tp-cp-dp-pp'
    """
    return "-".join([axis for axis in order.split("-") if axis != "ep"])


def expert_order(order: str) -> tuple[str, ...]:
    """The order of the experts' view: etp and edp for tp and dp, without cp; ep stands where the
    order names it, else where it names cp (Megatron-Core's parallel_state.py). An empty order, of a
    layout whose ranks are not placed yet, is the default.

    >>> expert_order("tp-cp-ep-pp-dp"), expert_order("tp-cp-dp-pp"), expert_order("pp")
    (('etp', 'ep', 'pp', 'edp'), ('etp', 'ep', 'edp', 'pp'), ('pp', 'etp', 'ep', 'edp'))
    """
    named = [axis for axis in order.split("-") if axis]
    named += [axis for axis in AXIS_NAMES if axis not in named]
    if "ep" not in named:
        named.insert(named.index("cp"), "ep")
    names = {"tp": "etp", "dp": "edp"}
    return tuple([names.get(axis, axis) for axis in named if axis != "cp"])


def find_order(order: str, orders: Iterable[str], sizes: Mapping[str, int]) -> str | None:
    """The first of these orders that numbers the ranks as `order` does, if one does."""
    own = used_axes(order, sizes)
    return next((other for other in orders if used_axes(other, sizes) == own), None)


def parse_order(order: str, sizes: Mapping[str, int], axes: Iterable[str] = AXIS_NAMES) -> tuple[str, ...]:
    """`"tp-cp-dp-pp"` -> its axes, fastest-varying first; axes of size 1 may be left out.

    axes: the known names. Raises ValueError naming the axes that are unknown, repeated or missing.
    """
    if not isinstance(order, str):
        raise ValueError(f"{order!r} is no text")
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
    """Format of an order of these axes."""
    return f"use each of {', '.join(axes)} once, fastest first, as in {'-'.join(axes)}"
