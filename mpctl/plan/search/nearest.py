"""Layouts that fit, near one that does not; and why a search found nothing, with ways out.

Nearest are those with fewest settings changed, then the fastest. dp is no setting here: it follows
from the other axes. With one change, then with two, every layout of the space is considered, in the
order of the bounds on its seconds (bound.py), and evaluated until enough fit that nothing left can
be faster, or MOST_EVALUATED were. Stages of equal numbers of layers stay so where there are several
chunks.

Each way out that is offered was tried: where the layout of least memory takes 30.1 GiB of a GPU's
40, and the headroom is 40 %, a headroom of 24 % is offered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from math import floor, inf

from mpctl.core.errors import DoesNotFit, InputError
from mpctl.core.units import bytes_text, plural
from mpctl.plan.estimate.kernels import MissingFigure
from mpctl.plan.planning.layout_settings import LayoutSettings, NearbyLayout, changed_settings, layout_of, layout_text
from mpctl.plan.planning.plan import Plan
from mpctl.plan.rules.check import listed
from mpctl.plan.search.bound import StepTimeBound
from mpctl.plan.search.evaluate import LayoutEvaluator
from mpctl.plan.search.find import EvaluatedLayout, Progress, find_layouts
from mpctl.plan.search.request import SearchRequest
from mpctl.plan.search.space import SearchSpace, overlaps_experts
from mpctl.spec.job import JobSpec

SETTINGS = tuple(name for name in LayoutSettings._fields if name != "dp")
MOST_CHANGES = 2
MOST_EVALUATED = 300  # layouts of each number of changes


def with_nearest(plan: Plan) -> Plan:
    """The plan; if it does not fit its devices, with the nearest layouts that do, as a field and as
    the hint of its check `memory-fits`. There is no search for a plan that fits."""
    if plan.fits is not False:
        return plan
    nearest = tuple(nearest_that_fit(plan.job))
    if not nearest:
        too_few = too_few_gpus(plan.job)
        return with_hint(plan, too_few) if too_few else plan
    texts = "; ".join(near.text for near in nearest)
    return replace(with_hint(plan, f"nearest that fit: {texts}"), nearest=nearest)


def too_few_gpus(job: JobSpec) -> str:
    """The way out where the states of the job's model are too large for its GPUs under any layout,
    in words; empty where they are not, or the device states no rate."""
    try:
        least = LayoutEvaluator(SearchSpace(job)).least_gpus
    except MissingFigure:
        return ""
    if least is None or least <= job.world_size:
        return ""
    return (
        f"parameters, gradients and optimizer states, shared equally, need {least:,} GPUs or more "
        f"with {job.cluster.headroom:g} % headroom: use as many, or a smaller model"
    )


def with_hint(plan: Plan, hint: str) -> Plan:
    """The plan with this hint in its check `memory-fits`."""
    checks = (c._replace(hint=hint) if c.rule == "memory-fits" else c for c in plan.checks)
    return replace(plan, checks=tuple(checks))


def nearest_that_fit(job: JobSpec, *, count: int = 3) -> list[NearbyLayout]:
    """Layouts near that of a complete job with a model, the nearest first. Empty where its device
    states no rate, or nothing near fits."""
    space = SearchSpace(job)
    try:
        evaluator = LayoutEvaluator(space)
    except MissingFigure:
        return []
    if evaluator.min_state_bytes > evaluator.usable_memory:
        return []
    bound, given = StepTimeBound(evaluator), layout_of(job)
    nearest: list[EvaluatedLayout] = []
    for changes in range(1, MOST_CHANGES + 1):
        if len(nearest) < count:
            candidates = set(_changed_layouts(job, given, changes))
            nearest += _fastest(bound, candidates, count - len(nearest))
    return [NearbyLayout(changed_settings(given, p.layout), p.seconds, p.bytes) for p in nearest]


def faster_nearby(job: JobSpec, *, count: int = 5) -> list[NearbyLayout]:
    """Layouts that fit and differ from that of a complete job in one setting, the fastest first, then in two."""
    try:
        bound = StepTimeBound(LayoutEvaluator(SearchSpace(job)))
    except MissingFigure:
        return []
    given = layout_of(job)
    space = bound.evaluator.space
    overlapped = {given._replace(moe_overlap=True)} if space.tries_overlap and overlaps_experts(given) else set()
    candidates = [
        {*_changed_layouts(job, given, n)} | (overlapped if n == 1 else set()) for n in range(1, MOST_CHANGES + 1)
    ]
    found = [near for layouts in candidates for near in _fastest(bound, layouts - {given}, count)]
    return [NearbyLayout(changed_settings(given, p.layout), p.seconds, p.bytes) for p in found]


def _changed_layouts(job: JobSpec, given: LayoutSettings, changes: int) -> Iterator[LayoutSettings]:
    has_experts = job.model is not None and job.model.experts is not None
    idle = {"stage_balance"} if given.vpp > 1 else set()
    idle |= set() if has_experts else {"ep", "etp"}
    idle |= set() if given.moe_overlap else {"moe_overlap"}
    settings = [name for name in SETTINGS if name not in idle]
    for free in combinations(settings, changes):
        fixed = {name: getattr(given, name) for name in SETTINGS if name not in free}
        for layout in SearchSpace(job, fixed).layouts():
            if all(getattr(layout, name) != getattr(given, name) for name in free) and (
                len(changed_settings(given, layout)) == changes
            ):
                yield layout


def _fastest(bound: StepTimeBound, layouts: Iterable[LayoutSettings], count: int) -> list[EvaluatedLayout]:
    evaluator, memory = bound.evaluator, bound.evaluator.usable_memory
    fitting = (one for one in layouts if evaluator.min_bytes(one, one.zero) <= memory)
    by_bound = sorted((bound.of_family(one), one) for one in fitting)
    fastest: list[EvaluatedLayout] = []
    for seconds, layout in by_bound[:MOST_EVALUATED]:
        if seconds == inf or (len(fastest) >= count and seconds > fastest[count - 1].seconds):
            break
        size = evaluator.device_bytes(layout)
        if size <= memory and evaluator.is_legal(layout):
            time = evaluator.step_time(layout)
            fastest += [EvaluatedLayout(time.total, size, layout)] if time else []
            fastest.sort()
    return fastest[:count]


def nothing_fits(request: SearchRequest, counts: Sequence[int], on_progress: Progress) -> InputError:
    """The error if nothing was found: whether any layout is legal, and changes that may make one
    fit."""
    where = f"{' or '.join(f'{count:,}' for count in counts)} {'GPU' if counts == [1] else 'GPUs'}"
    for gpus in reversed(counts):
        space = request.space(gpus)
        if count := sum(1 for _ in space.layouts()):
            none = f"none of {plural(count, 'legal layout')} fits the memory of {where}"
            message = f"{none} with {space.job.cluster.headroom:g} % headroom"
            return DoesNotFit.of("nothing-fits", "cluster", message, _hint(space, on_progress))
    hint = "change --fix and --max-*, the number of GPUs, or training.global_batch_size"
    fixed = [f"{name} {request.fixed[name]}" for name in _hindering(request, counts)]
    if hindering := listed(fixed):
        where += f" with what is fixed; without {hindering} there is one"
    return InputError.of("no-layout", "parallel", f"no legal layout fills {where}", hint)


def _hint(space: SearchSpace, on_progress: Progress) -> str:
    """Changes that may make a layout fit: less headroom where that is enough, more GPUs, other
    values of fixed settings."""
    limits = {name: f"up to {most}" for name, most in space.largest.items()}
    given = [f"{name} {value}" for name, value in {**space.fixed, **limits}.items()]
    ways = [way for way in (_less_headroom(space, on_progress),) if way]
    ways += [too_few_gpus(space.job) or "use more GPUs, or a smaller model"]
    ways += [f"change what is fixed: {', '.join(given)}"] * bool(given)
    ways += ["training.dtype bf16"] * (space.job.training.dtype in ("fp32", "fp64"))
    return "; or ".join(ways)


def _less_headroom(space: SearchSpace, on_progress: Progress) -> str:
    """The headroom with which the layout of least memory fits, in integer percent; empty if there
    is none."""
    cluster = space.job.cluster
    if cluster.device is None or cluster.headroom < 1:
        return ""
    whole = cluster.model_copy(update={"headroom": 0.0})
    wider = replace(space, job=space.job.model_copy(update={"cluster": whole}))
    found = find_layouts(wider, top=1, budgets=1, objective="memory", on_progress=on_progress)
    if not found.best:
        return ""
    best = found.best[0]
    headroom = floor(100 * (1 - best.bytes / cluster.device.memory_bytes))
    return (
        f"with cluster.headroom {headroom} one fits: {layout_text(best.layout)}, "
        f"{bytes_text(best.bytes)} of {bytes_text(cluster.device.memory_bytes)}"
    )


def _hindering(request: SearchRequest, counts: Sequence[int]) -> Iterator[str]:
    """Fixed fields of a layout, each of which makes some layout legal when it is not fixed."""
    for name in request.fixed:
        others = {key: value for key, value in request.fixed.items() if key != name}
        spaces = (replace(request, fixed=others).space(gpus) for gpus in counts)
        if any(next(space.layouts(), None) is not None for space in spaces):
            yield name
