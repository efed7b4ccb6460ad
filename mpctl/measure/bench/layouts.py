"""Layouts to be run: from words such as `tp=1,2 pp=1,2`, or the built-in set of `bench verify`.

Words mean every combination of their sizes; dp is 1 unless a word has it, so that a layout has as
many ranks as its sizes multiply to. With world sizes, only combinations that multiply to one of
them are used, and dp takes the remaining ranks. Several chunks a stage (vpp) without a pipeline are
left out.

The built-in set has each way to split a job once by itself, and the common combinations: 1 to 4
ranks, chosen so that their steps differ in every part of the estimate (products, messages of each
axis, bubbles, optimizer, host).

>>> file_name("dp2 zero3")
'dp2-zero3'
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import gcd, prod
from typing import Literal

from mpctl.core.axes import AXIS_NAMES, CHOSEN_AXES, DEFAULT_ORDER
from mpctl.core.errors import InputError, Issue
from mpctl.plan.planning.layout_settings import LayoutSettings, SettingValue, setting_name
from mpctl.plan.planning.plan import Overrides
from mpctl.spec.job import JobSpec
from mpctl.spec.parallel import ParallelSpec

Along = Literal["job", "tp", "cp", "pp", "dp"]
OPTIONS = ("vpp", "zero")
"""Settings of [parallel] that a layout may vary besides the sizes of the axes."""
MOST_LAYOUTS = 256
EXAMPLE = "for example --layouts tp=1,2 pp=1,2"


@dataclass(frozen=True)
class Layout:
    """Sizes of every axis of parallelism. options: vpp and the ZeRO stage, where they differ from
    the job's."""

    sizes: Mapping[str, int]
    options: Mapping[str, int]

    @property
    def world_size(self) -> int:
        return prod(self.sizes.values())

    @property
    def name(self) -> str:
        """`tp2 dp2`, `tp2 zero1`; `1 rank` where all axes are 1."""
        used = [f"{axis}{size}" for axis, size in self.sizes.items() if size > 1]
        return " ".join([*(used or ["1 rank"]), *(f"{key}{n}" for key, n in self.options.items())])

    def settings(self, job: JobSpec) -> Overrides:
        """The settings that put a job's ranks into this layout: on one node or, where the job has
        several, on as many of them as the ranks fill. Settings of the job that only concern axes of
        size 1 are left out."""
        cluster, ranks = job.cluster, self.world_size
        each = cluster.gpus_per_node if cluster.nodes > 1 else None
        nodes = max(1, ranks // each) if each else 1
        return {
            "cluster.nodes": nodes,
            "cluster.gpus_per_node": ranks // nodes,
            **dict(_without_axes(self.sizes, job.parallel)),
            **{f"parallel.{key}": number for key, number in {**self.sizes, **self.options}.items()},
        }


def _without_axes(sizes: Mapping[str, int], parallel: ParallelSpec) -> Iterator[tuple[str, object]]:
    """Settings of the job that a layout without pipeline, or without tensor parallelism, cannot
    have."""
    if sizes["tp"] == 1 and parallel.sequence_parallel:
        yield "parallel.sequence_parallel", False
    if sizes["pp"] == 1 and parallel.vpp > 1:
        yield "parallel.vpp", 1
        yield "parallel.schedule", "1f1b"


def job_layouts(parallel: ParallelSpec, worlds: Sequence[int], along: Along) -> list[Layout]:
    """One layout for each world size: all ranks along one axis, or for `job` along the axes that
    the job has, as far as they divide the ranks, and then along dp."""
    return [Layout(_along(parallel, world, along), {}) for world in sorted(set(worlds))]


def _along(parallel: ParallelSpec, world: int, along: Along) -> dict[str, int]:
    if along != "job":
        return {axis: world if axis == along else 1 for axis in AXIS_NAMES}
    sizes, left = dict.fromkeys(AXIS_NAMES, 1), world
    for axis in CHOSEN_AXES:
        sizes[axis] = gcd(getattr(parallel, axis), left)
        left //= sizes[axis]
    return {**sizes, "dp": left}


def parse_worlds(text: str) -> list[int]:
    """`"1,2,4"` -> [1, 2, 4]; raises InputError for anything else."""
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise InputError.of(
            "bad-worlds", "--world", f"{text!r} is not a list of world sizes", "for example --world 1,2,4"
        )
    return sorted({int(word) for word in words})


def parse_layouts(words: Sequence[str], worlds: Sequence[int] | None = None) -> list[Layout]:
    """The layouts that words such as `tp=1,2` and `pp=1,2` name together, smallest first.

    worlds: the world sizes that they may have, None for any. Raises InputError with every word
    that cannot be read, and with the world sizes that no combination makes.
    """
    sizes, issues = _parsed(" ".join(words).split())
    if issues:
        raise InputError(issues)
    if (count := prod(map(len, sizes.values()))) > MOST_LAYOUTS:
        message = f"{count:,} layouts, more than {MOST_LAYOUTS}"
        raise InputError.of("bad-layouts", "--layouts", message, "name fewer sizes")
    if worlds is None:
        layouts = [_layout(chosen, chosen.get("dp", 1)) for chosen in _combined(sizes)]
        if not layouts:
            raise InputError.of(
                "bad-layouts", "--layouts", "vpp cuts the stages of a pipeline", "name pp of 2 or more with it"
            )
    else:
        layouts = [found for world in worlds for found in _of_world(sizes, world)]
        _require_all(worlds, layouts)
    return sorted(layouts, key=lambda layout: layout.world_size)


def _combined(sizes: Mapping[str, Sequence[int]]) -> Iterator[dict[str, int]]:
    """Every combination except those of chunks without a pipeline."""
    for numbers in product(*sizes.values()):
        chosen = dict(zip(sizes, numbers, strict=True))
        if chosen.get("vpp", 1) == 1 or chosen.get("pp", 1) > 1:
            yield chosen


def _layout(chosen: Mapping[str, int], dp: int) -> Layout:
    sizes = {axis: chosen.get(axis, 1) for axis in AXIS_NAMES}
    options = {key: chosen[key] for key in OPTIONS if key in chosen}
    return Layout({**sizes, "dp": dp}, options)


def _of_world(sizes: Mapping[str, Sequence[int]], world: int) -> Iterator[Layout]:
    for chosen in _combined(sizes):
        others = prod(chosen.get(axis, 1) for axis in CHOSEN_AXES)
        dp = chosen.get("dp", world // others)
        if others * dp == world:
            yield _layout(chosen, dp)


def _require_all(worlds: Sequence[int], layouts: Sequence[Layout]) -> None:
    made = {layout.world_size for layout in layouts}
    issues = [
        Issue(
            "bad-layouts",
            "--world",
            f"no combination of --layouts makes {world} ranks",
            "name other sizes, or leave --world out",
        )
        for world in worlds
        if world not in made
    ]
    if issues:
        raise InputError(issues)


def _parsed(words: Sequence[str]) -> tuple[dict[str, list[int]], list[Issue]]:
    sizes: dict[str, list[int]] = {}
    issues: list[Issue] = []
    for word in words or [""]:
        key, _, text = word.partition("=")
        numbers = text.split(",")
        if wrong := _wrong(key, numbers, sizes):
            issues.append(Issue("bad-layouts", "--layouts", f"{word!r}: {wrong}", EXAMPLE))
        else:
            sizes[key] = list(dict.fromkeys(map(int, numbers)))
    return sizes, issues


def _wrong(key: str, numbers: Sequence[str], known: Mapping[str, object]) -> str | None:
    if key not in (*AXIS_NAMES, *OPTIONS):
        return f"not one of {', '.join((*AXIS_NAMES, *OPTIONS))} with its sizes"
    if key in known:
        return f"{key} was named before"
    least = 0 if key == "zero" else 1
    if not all(number.isdecimal() and least <= int(number) < 10**6 for number in numbers):
        return f"not sizes of {least} or more, separated by commas"
    return None


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
    "tp": 1,
    "cp": 1,
    "dp": 1,
    "pp": 1,
    "vpp": 1,
    "schedule": "1f1b",
    "sequence_parallel": False,
    "zero": 0,
    "tensor_mode": "1d",
    "recompute": "none",
}


def ranks_of(layout: LayoutFields) -> int:
    """Ranks of a layout: the product of the sizes of its axes.

    >>> ranks_of({"tp": 2, "dp": 2, "zero": 1})
    4
    """
    return prod(int(layout.get(axis) or 1) for axis in AXIS_NAMES)


def layout_overrides(layout: LayoutFields, nodes: int = 1) -> dict[str, object]:
    """The settings that give any job exactly this layout, on `nodes` nodes that share its ranks
    evenly; on several nodes a tensor-parallel group may also leave a node."""
    settings = {setting_name(key): value for key, value in {**SINGLE_RANK, **layout}.items()}
    across = {"parallel.allow_tp_across_nodes": True} if nodes > 1 else {}
    each = {"cluster.nodes": nodes, "cluster.gpus_per_node": ranks_of(layout) // nodes}
    return {**each, **settings, **across}


def layout_name(layout: LayoutSettings) -> str:
    """A layout in few words, without settings that a single rank has too: `tp2 dp2 zero1`, `pp2
    vpp2`; `1 rank` for one rank. The micro batch is left out."""
    counts = {**layout.sizes, "vpp": layout.vpp}
    sizes = [f"{name}{count}" for name, count in counts.items() if count > 1]
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


def numbered_titles(titles: Iterable[str]) -> list[str]:
    """The titles, numbered from the second on where several are the same as file names.

    >>> numbered_titles(["tp2", "dp2", "tp2"])
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
