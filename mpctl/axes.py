"""The axes of parallelism, one row each; a new kind of parallelism starts here.

A *group kind* is a named set of axes: the ranks that differ only along them form one group.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Axis:
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
AXIS_NAMES = tuple(axis.name for axis in AXES)
DEFAULT_ORDER = "tp-cp-dp-pp"

# mp is what one replica of the model spans. The two embedding kinds are subsets of a pp group.
GROUP_KINDS: dict[str, tuple[str, ...]] = {
    "tp": ("tp",),
    "cp": ("cp",),
    "dp": ("dp",),
    "pp": ("pp",),
    "mp": ("tp", "pp"),
    "embedding": ("pp",),
    "position_embedding": ("pp",),
}


def parse_order(order: str, sizes: dict[str, int]) -> tuple[str, ...]:
    """`"tp-cp-dp-pp"` -> its axes, fastest first; axes of size 1 may be left out.

    Raises ValueError saying what is unknown, repeated or missing.
    """
    named = order.split("-")
    unknown = [name for name in named if name not in AXIS_NAMES]
    repeated = sorted({name for name in named if named.count(name) > 1})
    left_out = [name for name in AXIS_NAMES if name not in named]
    missing = [name for name in left_out if sizes.get(name, 1) > 1]
    problems = [
        f"{word} {', '.join(names)}"
        for word, names in (("unknown", unknown), ("repeated", repeated), ("missing", missing))
        if names
    ]
    if problems:
        raise ValueError(f"{order!r} has axes that are {'; '.join(problems)}")
    return (*named, *left_out)
