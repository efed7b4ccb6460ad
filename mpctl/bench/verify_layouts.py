"""Layouts by short names, and the built-in set that `mpctl bench verify` holds the plan against.

The set has each way to split a job once, alone where it can be told apart from the others, and the
common combinations: 1 to 4 ranks, and what a step costs them differs by every part of the estimate
(products, messages of each axis, bubbles, optimizer, host).

>>> file_name("dp2 zero3")
'dp2-zero3'
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from math import prod

from mpctl.axes import AXIS_NAMES, DEFAULT_ORDER
from mpctl.planning.layout_settings import LayoutSettings, SettingValue, setting_name

LayoutFields = Mapping[str, SettingValue]
"""A layout by the fields of LayoutSettings in which it differs from a single rank's."""

DEFAULT_LAYOUTS: tuple[LayoutFields, ...] = (
    {},
    {"recompute": "full"},
    {"tp": 2},
    {"tp": 2, "sequence_parallel": True},
    {"dp": 2},
    {"dp": 2, "zero": 1},
    {"dp": 2, "zero": 3},
    {"cp": 2},
    {"pp": 2},
    {"pp": 2, "vpp": 2},
    {"pp": 2, "schedule": "zero-bubble"},
    {"tp": 4},
    {"dp": 4},
    {"pp": 4},
    {"tp": 2, "dp": 2},
    {"tp": 2, "pp": 2},
    {"dp": 2, "pp": 2},
    {"cp": 2, "dp": 2},
    {"tp": 2, "dp": 2, "zero": 1, "recompute": "full"},
    {"tp": 4, "tensor_mode": "2d"},
)
QUICK_LAYOUTS: tuple[LayoutFields, ...] = ({}, {"tp": 2}, {"dp": 2}, {"pp": 2}, {"tp": 2, "dp": 2})
DEFAULT_SETTINGS: Mapping[str, object] = {
    "training.micro_batch_size": 2,
    "training.global_batch_size": 8,
    "data.max_bytes": 1_000_000,
}
"""Settings of the job whose layouts the built-in set has: four micro batches of a single replica,
and so little text that it is prepared in seconds."""

SINGLE_RANK: LayoutFields = {
    "tp": 1, "cp": 1, "dp": 1, "pp": 1, "vpp": 1, "schedule": "1f1b", "sequence_parallel": False,
    "zero": 0, "tensor_mode": "1d", "recompute": "none",
}  # fmt: skip


def ranks_of(layout: LayoutFields) -> int:
    """Ranks of a layout: the product of the sizes of its axes.

    >>> ranks_of({"tp": 2, "dp": 2, "zero": 1})
    4
    """
    return prod(int(layout.get(axis) or 1) for axis in AXIS_NAMES)


def layout_overrides(layout: LayoutFields, nodes: int = 1) -> dict[str, object]:
    """The settings that give any job exactly this layout, on so many nodes that share its ranks
    evenly; of several nodes even a tensor-parallel group may leave one."""
    settings = {setting_name(key): value for key, value in {**SINGLE_RANK, **layout}.items()}
    across = {"parallel.allow_tp_across_nodes": True} if nodes > 1 else {}
    each = {"cluster.nodes": nodes, "cluster.gpus_per_node": ranks_of(layout) // nodes}
    return {**each, **settings, **across}


def layout_name(layout: LayoutSettings) -> str:
    """A layout in few words, without what a single rank has too: `tp2 dp2 zero1`, `pp2 vpp2`; of
    one rank `1 rank`. The micro batch is not told."""
    sizes = [f"{axis}{size}" for axis in ("tp", "cp", "dp", "pp", "vpp")
             if (size := getattr(layout, axis)) > 1]  # fmt: skip
    depth = f"-{layout.tensor_depth}" if layout.tensor_depth else ""
    others = (
        (layout.tensor_mode != "1d", f"{layout.tensor_mode}{depth}"),
        (layout.schedule not in ("1f1b", "interleaved"), layout.schedule),
        (layout.sequence_parallel, "sp"),
        (layout.zero > 0, f"zero{layout.zero}"),
        (layout.recompute != "none", _recompute(layout.recompute)),
        (layout.stage_balance != "even", "by-cost"),
        (layout.order != DEFAULT_ORDER, layout.order),
    )
    return " ".join([*(sizes or ["1 rank"]), *(word for is_told, word in others if is_told)])


def _recompute(granularity: str) -> str:
    return "recompute" if granularity == "full" else f"recompute-{granularity}"


def fields_name(layout: LayoutFields) -> str:
    """The name of a layout of the built-in set.

    >>> fields_name({"tp": 2, "zero": 1})
    'tp2 zero1'
    """
    others = {"stage_balance": "even", "micro_batch_size": 1, "order": DEFAULT_ORDER}
    return layout_name(LayoutSettings(**{**SINGLE_RANK, **others, **layout}))  # type: ignore[arg-type]


def file_name(title: str) -> str:
    """A title with `-` for every run of characters that a file name should not have."""
    return re.sub(r"[^A-Za-z0-9._+]+", "-", title).strip("-.") or "case"


def told_apart(titles: Iterable[str]) -> list[str]:
    """The titles, numbered from the second on where several are the same as file names.

    >>> told_apart(["tp2", "dp2", "tp2"])
    ['tp2', 'dp2', 'tp2 (2)']
    """
    taken: set[str] = set()
    unique = []
    for title in titles:
        name, number = title, 1
        while file_name(name).lower() in taken:
            number += 1
            name = f"{title} ({number})"
        taken.add(file_name(name).lower())
        unique.append(name)
    return unique
