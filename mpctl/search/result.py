"""A whole search: on one number of GPUs or several, with the layout of the job as given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from mpctl.errors import InputError
from mpctl.estimate.kernels import MissingFigure
from mpctl.search.evaluate import LayoutEvaluator, missing_link
from mpctl.search.find import (
    BUDGETS,
    FoundLayouts,
    Note,
    Objective,
    Progress,
    find_layouts,
)
from mpctl.search.ideas import EvaluatedLayout, plainest_first
from mpctl.search.nothing import nothing_fits
from mpctl.search.report import LayoutReport, given_report, layout_reports
from mpctl.search.request import SearchRequest, varied
from mpctl.spec.linked_clusters import link_hint
from mpctl.units import plural


@dataclass(repr=False)
class SearchResult:
    """What a search found.

    best, front: on the job's own number of GPUs; for the objective cost, and where nothing was
    found on those, on the number that the objective prefers; of best each has its own tp, pp and
    tensor mode, and stands for `alike` ones (search/ideas.py). by_gpus: the best layout of each
    number, None where none was found; why_none says why. given: the layout of the job as given.
    seen: every layout that was estimated for `best`. estimated: how many in all. too_large: how
    many were left out for their memory. is_complete: false where it was interrupted. searched: the
    fields of a layout that varied. is_plain_first: the first of best is the plainest of those that
    a wide band does not tell apart, not the fastest.
    """

    request: SearchRequest
    objective: str
    best: list[LayoutReport] = field(default_factory=list)
    front: list[LayoutReport] = field(default_factory=list)
    by_gpus: dict[int, LayoutReport | None] = field(default_factory=dict)
    why_none: dict[int, str] = field(default_factory=dict)
    given: LayoutReport | None = None
    seen: list[EvaluatedLayout] = field(default_factory=list)
    estimated: int = 0
    too_large: int = 0
    is_complete: bool = True
    searched: list[str] = field(default_factory=list)
    is_plain_first: bool = False

    def __repr__(self) -> str:
        best = f"best {self.best[0]!r} of " if self.best else ""
        return f"SearchResult({best}{plural(self.estimated, 'layout')} estimated)"


def answer_search(
    request: SearchRequest, counts: Sequence[int], *, top: int, objective: str, exhaustive: bool,
    on_progress: Progress, on_note: Note | None = None,
) -> SearchResult:  # fmt: skip
    """Search each number of GPUs in counts. top: layouts wanted; exhaustive: evaluate every layout.

    Raises InputError where the device states no rate for the data type, DoesNotFit or InputError
    where on none of the counts there is a layout that fits and can be timed.
    """
    result, aim = SearchResult(request, objective), _aim(objective)
    evaluators = {gpus: _evaluator(request, gpus) for gpus in counts}

    def search(gpus: int, *, top: int, budgets: int) -> FoundLayouts:
        found = find_layouts(
            evaluators[gpus].space, top=top, budgets=budgets, objective=aim, exhaustive=exhaustive,
            evaluator=evaluators[gpus], on_progress=_of_gpus(on_progress, gpus),
            on_note=on_note,
        )  # fmt: skip
        result.estimated += len(found.evaluated)
        result.too_large += found.too_large
        result.is_complete &= found.is_complete
        return found

    found = FoundLayouts()
    own = request.job.world_size
    for gpus in sorted(counts, key=lambda gpus: gpus != own) if len(counts) > 1 else ():
        if result.is_complete:
            found = search(gpus, top=1, budgets=1)
            _add_count(result, evaluators[gpus], found)
    result.by_gpus = dict(sorted(result.by_gpus.items()))
    preferred = counts[0] if len(counts) == 1 else _preferred_count(result)
    if preferred is not None and result.is_complete:
        found = search(preferred, top=top, budgets=BUDGETS)
    if preferred is None or not found.best:
        if result.is_complete:
            raise _no_time(request, evaluators) or nothing_fits(request, counts, on_progress)
        return result
    _add_best(result, evaluators[preferred], found)
    return result


def _add_count(result: SearchResult, evaluator: LayoutEvaluator, found: FoundLayouts) -> None:
    """The best layout on one number of GPUs, or why there is none."""
    gpus, best = evaluator.space.world, layout_reports(evaluator, found.best, result.request.price)
    result.by_gpus[gpus] = best[0] if best else None
    if not best:
        level = missing_link(evaluator) if result.is_complete else None
        result.why_none[gpus] = _untimed(level) if level else "nothing fits"


def _add_best(result: SearchResult, evaluator: LayoutEvaluator, found: FoundLayouts) -> None:
    """The layouts on the number of GPUs that the objective prefers."""
    price = result.request.price
    result.searched = varied(evaluator.space)
    groups = found.groups
    if groups and result.objective != "memory":
        (first,) = layout_reports(evaluator, found.best[:1])
        groups = plainest_first(groups, first.time.high / first.time.low)
        result.is_plain_first = groups[0] is not found.groups[0]
    result.best = [
        replace(report, alike=group.others)
        for group, report in zip(
            groups, layout_reports(evaluator, (g.face for g in groups), price), strict=True
        )
    ]
    result.front = layout_reports(evaluator, found.front, price)
    result.seen = found.evaluated
    world, own = evaluator.space.world, result.request.job.world_size
    if world in result.by_gpus and result.best:
        result.by_gpus[world] = result.best[0]  # the same answer in both tables
    if world == own and result.request.gives_layout:
        result.given = given_report(evaluator, price)


def _aim(objective: str) -> Objective:
    return "memory" if objective == "memory" else "tokens"


def _of_gpus(report: Progress, gpus: int) -> Progress:
    return lambda stage, done, total: report(f"{stage}, {gpus} GPUs", done, total)


def _preferred_count(result: SearchResult) -> int | None:
    """The number of GPUs with the cheapest layout where cost is the objective; else the job's own,
    or where that has no layout the largest number that has one; None where none has."""
    costs = {g: c.gpu_hours_per_billion for g, c in result.by_gpus.items() if c is not None}
    if result.objective == "cost" and costs:
        return min(costs, key=lambda gpus: costs[gpus])
    own = result.request.job.world_size
    return own if own in costs else max(costs, default=None)


def _evaluator(request: SearchRequest, gpus: int) -> LayoutEvaluator:
    is_whole = gpus == request.job.world_size
    try:
        return LayoutEvaluator(request.space(None if is_whole else gpus))
    except MissingFigure as missing:
        hint = "use a device preset that states it, or another training.dtype"
        raise InputError.of("no-step-time", "cluster.device", str(missing), hint) from None


def _no_time(
    request: SearchRequest, evaluators: Mapping[int, LayoutEvaluator]
) -> InputError | None:
    """The error where a layout fits the memory but a link of the cluster states no bandwidth."""
    for gpus, evaluator in evaluators.items():
        if level := missing_link(evaluator):
            hint = link_hint(request.job.cluster, level)
            if level == "inter_node":
                hint += f"; or keep the ranks on one node: --gpus-per-node {max(evaluators)}"
            message = f"no layout of {plural(gpus, 'GPU')} can be timed: {_no_bandwidth(level)}"
            return InputError.of("no-step-time", f"cluster.{level}", message, hint)
    return None


def _untimed(level: str) -> str:
    return f"cannot be timed: {_no_bandwidth(level)}"


def _no_bandwidth(level: str) -> str:
    return f"cluster.{level} has no bandwidth"
