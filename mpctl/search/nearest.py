"""Layouts that fit, nearest to one that does not: fewest settings changed, then fastest.

dp is no setting here: it is what the other axes leave. Of one change and then of two, every layout
that the rules of the space allow is thought of; in the order of their bounds (bound.py) they are
estimated until enough fit that nothing left can be faster, or MOST_TRIED were. Stages that are cut
evenly stay so, and with several chunks are not cut by cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import combinations
from math import inf
from typing import Any, NamedTuple

from mpctl.estimate.kernels import MissingFigure
from mpctl.rules.validate import check_job
from mpctl.search.bound import StepTimeBound
from mpctl.search.evaluate import LayoutEvaluator
from mpctl.search.find import EvaluatedLayout
from mpctl.search.space import LayoutSettings, SearchSpace, layout_of
from mpctl.spec.job import JobSpec
from mpctl.units import bytes_text, seconds_text

SETTINGS = tuple(name for name in LayoutSettings._fields if name != "dp")
MOST_CHANGES = 2
MOST_TRIED = 300  # layouts of each number of changes whose memory is asked for


class NearbyLayout(NamedTuple):
    """A layout that fits; changes: its settings that differ, by their names in a job."""

    changes: dict[str, Any]
    seconds: float
    bytes: int

    @property
    def text(self) -> str:
        settings = ", ".join(setting_text(name, v) for name, v in self.changes.items())
        return f"{settings} ({seconds_text(self.seconds)} a step, {bytes_text(self.bytes)})"

    def as_dict(self) -> dict[str, Any]:
        return {"changes": self.changes, "step_seconds": self.seconds, "peak_bytes": self.bytes}


def setting_text(name: str, value: Any) -> str:
    """`training.micro_batch_size` and 2 -> `micro batch size 2`; true and false as on and off."""
    shown = {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
    return f"{name.split('.')[-1].replace('_', ' ')} {shown}"


def nearest_that_fit(job: JobSpec, *, count: int = 3) -> list[NearbyLayout]:
    """Of a complete job with a model. Empty where its device states no rate, or nothing fits."""
    space = SearchSpace(job)
    try:
        engine = LayoutEvaluator(space)
    except MissingFigure:
        return []
    assert job.cluster.device is not None, "the engine asked for it"
    if engine.least_share > job.cluster.device.memory_bytes:
        return []
    floor, here = StepTimeBound(engine), layout_of(job)
    found: list[EvaluatedLayout] = []
    for changes in range(1, MOST_CHANGES + 1):
        if len(found) < count:
            near = set(_changed(job, here, changes))
            found += _fastest(floor, near, count - len(found))
    return [NearbyLayout(changed(here, p.layout), p.seconds, p.bytes) for p in found]


def changed(here: LayoutSettings, there: LayoutSettings) -> dict[str, Any]:
    """Settings of a job that lead from one layout to another."""
    values = there._asdict()
    return {
        setting(name): value for name, value in values.items()
        if name in SETTINGS and value != getattr(here, name)
    }  # fmt: skip


def setting(name: str) -> str:
    """`tp` -> `parallel.tp`."""
    table = "training" if name in ("micro_batch_size", "recompute") else "parallel"
    return f"{table}.{name}"


def _changed(job: JobSpec, here: LayoutSettings, count: int) -> Iterator[LayoutSettings]:
    """Legal layouts that differ in exactly so many settings."""
    settings = [s for s in SETTINGS if s != "stage_balance"] if here.vpp > 1 else SETTINGS
    for free in combinations(settings, count):
        fixed = {name: getattr(here, name) for name in SETTINGS if name not in free}
        for layout in SearchSpace(job, fixed).layouts():
            if all(getattr(layout, name) != getattr(here, name) for name in free):
                yield layout


def _fastest(
    floor: StepTimeBound, layouts: Iterable[LayoutSettings], count: int
) -> list[EvaluatedLayout]:
    engine, device = floor.engine, floor.space.job.cluster.device
    assert device is not None, "the engine asked for it"
    found: list[EvaluatedLayout] = []
    fitting = (one for one in layouts if engine.least_bytes(one, one.zero) <= device.memory_bytes)
    bounds = sorted((floor.family(floor.family_of(one)), one) for one in fitting)
    for bound, layout in bounds[:MOST_TRIED]:
        if bound == inf or (len(found) >= count and bound > found[count - 1].seconds):
            break
        size = engine.reserved(layout)
        if size <= device.memory_bytes and _is_legal(floor.space, layout):
            time = engine.time(layout)
            found += [EvaluatedLayout(time.total, size, layout)] if time else []
            found.sort()
    return found[:count]


def _is_legal(space: SearchSpace, layout: LayoutSettings) -> bool:
    return all(check.status != "error" for check in check_job(space.job_of(layout)))
