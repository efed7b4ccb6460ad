"""Layouts that fit, nearest to one that does not: fewest settings changed, then fastest.

dp is no setting here: it is what the other axes leave. Of one change and then of two, every layout
that the rules of the space allow is thought of; in the order of their bounds (bound.py) they are
estimated until enough fit that nothing left can be faster, or MOST_TRIED were. Stages that are cut
evenly stay so, and with several chunks are not cut by cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import combinations
from math import inf

from mpctl.estimate.kernels import MissingFigure
from mpctl.planning.layout_settings import (
    LayoutSettings,
    NearbyLayout,
    changed_settings,
    layout_of,
)
from mpctl.planning.plan import Plan
from mpctl.rules.validate import has_errors
from mpctl.search.bound import StepTimeBound
from mpctl.search.evaluate import LayoutEvaluator
from mpctl.search.find import EvaluatedLayout
from mpctl.search.space import SearchSpace
from mpctl.spec.job import JobSpec

SETTINGS = tuple(name for name in LayoutSettings._fields if name != "dp")
MOST_CHANGES = 2
MOST_TRIED = 300  # layouts of each number of changes whose memory is asked for


def with_nearest(plan: Plan) -> Plan:
    """The plan; where it does not fit its devices, with the nearest layouts that do, as a field and
    as the hint of its check `memory-fits`. Nothing is searched for a plan that fits."""
    if plan.fits is not False:
        return plan
    nearest = tuple(nearest_that_fit(plan.job))
    if not nearest:
        return plan
    hint = f"nearest that fit: {'; '.join(near.text for near in nearest)}"
    checks = (replace(c, hint=hint) if c.rule == "memory-fits" else c for c in plan.checks)
    return replace(plan, checks=tuple(checks), nearest=nearest)


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
    return [NearbyLayout(changed_settings(here, p.layout), p.seconds, p.bytes) for p in found]


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
    return not has_errors(space.job_of(layout))
