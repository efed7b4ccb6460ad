"""Layouts to be timed, from words such as `tp=1,2 pp=1,2`: every combination of the sizes.

dp is 1 unless a word has it, so that a layout has as many ranks as its sizes multiply to. With
world sizes, those combinations count that make one of them, and dp takes what the others leave.

A combination of several chunks a stage (vpp) without a pipeline is left out.

By hand, `tp=1,2 pp=1,2` is tp1 pp1, tp1 pp2, tp2 pp1, tp2 pp2 of 1, 2, 2 and 4 ranks; with world
size 4, dp is 4, 2, 2 and 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import gcd, prod
from typing import Literal

from mpctl.axes import AXIS_NAMES
from mpctl.errors import InputError, Issue
from mpctl.planning.plan import Overrides
from mpctl.spec.job import JobSpec
from mpctl.spec.parallel import ParallelSpec

Along = Literal["job", "tp", "cp", "pp", "dp"]
BESIDE = ("vpp", "zero")
"""Settings of [parallel] that a layout may vary beside the sizes of the axes."""
MOST_LAYOUTS = 256
EXAMPLE = "for example --layouts tp=1,2 pp=1,2"


@dataclass(frozen=True)
class Layout:
    """Sizes of every axis of parallelism. beside: vpp and the ZeRO stage, where they are chosen
    and not the job's."""

    sizes: Mapping[str, int]
    beside: Mapping[str, int]

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return prod(self.sizes.values())

    @property
    def name(self) -> str:
        """`tp2 dp2`, `tp2 zero1`; `1 rank` where all axes are 1."""
        used = [f"{axis}{size}" for axis, size in self.sizes.items() if size > 1]
        return " ".join([*(used or ["1 rank"]), *(f"{key}{n}" for key, n in self.beside.items())])

    def settings(self, job: JobSpec) -> Overrides:
        """The settings that put a job's ranks into this layout: on one node or, where the job has
        several, on as many of them as the ranks fill. What the job has only for axes that are 1
        here is left out."""
        cluster, ranks = job.cluster, self.world_size
        each = cluster.gpus_per_node if cluster.nodes > 1 else None
        nodes = max(1, ranks // each) if each else 1
        return {
            "cluster.nodes": nodes,
            "cluster.gpus_per_node": ranks // nodes,
            **dict(_without_axes(self.sizes, job.parallel)),
            **{f"parallel.{key}": number for key, number in {**self.sizes, **self.beside}.items()},
        }


def _without_axes(sizes: Mapping[str, int], parallel: ParallelSpec) -> Iterator[tuple[str, object]]:
    """What a layout without pipeline, or without tensor parallelism, cannot have of the job's."""
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
    for axis in ("tp", "cp", "pp"):
        sizes[axis] = gcd(getattr(parallel, axis), left)
        left //= sizes[axis]
    return {**sizes, "dp": left}


def parse_worlds(text: str) -> list[int]:
    """`"1,2,4"` -> [1, 2, 4]; raises InputError for anything else."""
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise InputError.of("bad-worlds", "--world", f"{text!r} is not a list of world sizes",
                            "for example --world 1,2,4")  # fmt: skip
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
            raise InputError.of("bad-layouts", "--layouts", "vpp cuts the stages of a pipeline",
                                "name pp of 2 or more beside it")  # fmt: skip
    else:
        layouts = [found for world in worlds for found in _of_world(sizes, world)]
        _require_all(worlds, layouts)
    return sorted(layouts, key=lambda layout: layout.world_size)


def _combined(sizes: Mapping[str, Sequence[int]]) -> Iterator[dict[str, int]]:
    """Every combination, but for those of chunks without a pipeline."""
    for numbers in product(*sizes.values()):
        chosen = dict(zip(sizes, numbers, strict=True))
        if chosen.get("vpp", 1) == 1 or chosen.get("pp", 1) > 1:
            yield chosen


def _layout(chosen: Mapping[str, int], dp: int) -> Layout:
    sizes = {axis: chosen.get(axis, 1) for axis in AXIS_NAMES}
    beside = {key: chosen[key] for key in BESIDE if key in chosen}
    return Layout({**sizes, "dp": dp}, beside)


def _of_world(sizes: Mapping[str, Sequence[int]], world: int) -> Iterator[Layout]:
    """The combinations that make a world of this size."""
    for chosen in _combined(sizes):
        others = prod(chosen.get(axis, 1) for axis in AXIS_NAMES if axis != "dp")
        dp = chosen.get("dp", world // others)
        if others * dp == world:
            yield _layout(chosen, dp)


def _require_all(worlds: Sequence[int], layouts: Sequence[Layout]) -> None:
    made = {layout.world_size for layout in layouts}
    issues = [
        Issue("bad-layouts", "--world", f"no combination of --layouts makes {world} ranks",
              "name other sizes, or leave --world out")
        for world in worlds if world not in made
    ]  # fmt: skip
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
    """Why a word cannot be read; None where it can."""
    if key not in (*AXIS_NAMES, *BESIDE):
        return f"not one of {', '.join((*AXIS_NAMES, *BESIDE))} with its sizes"
    if key in known:
        return f"{key} was named before"
    least = 0 if key == "zero" else 1
    if not all(number.isdecimal() and least <= int(number) < 10**6 for number in numbers):
        return f"not sizes of {least} or more, separated by commas"
    return None
