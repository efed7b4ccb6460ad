"""A complete search on one number of GPUs or several, and in words how layouts differ.

Seconds and bytes are those of `mpctl plan` for the same layout. Cost is counted in GPU-hours per
token: two layouts on the same number of GPUs cost the same if they are as fast, and more GPUs cost
more wherever they do not make the step faster in proportion.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Literal, get_args

from mpctl.core.errors import InputError, Issue
from mpctl.core.units import bytes_text, count_text, days_text, plural, seconds_text
from mpctl.model.layout.draft import LayoutDraft
from mpctl.plan.estimate.kernels import MissingFigure
from mpctl.plan.estimate.memory import fit_text
from mpctl.plan.estimate.step import StepTime
from mpctl.plan.planning.difference import cost_difference, tie_text
from mpctl.plan.planning.layout_settings import LayoutSettings, changed_settings, changes_text, layout_of, layout_text
from mpctl.plan.planning.plan import make_plan
from mpctl.plan.planning.whole_run import MOST_TOKENS, WholeRun, gpu_hours_per_billion, whole_run
from mpctl.plan.search.evaluate import LayoutEvaluator, missing_link
from mpctl.plan.search.find import (
    BUDGETS,
    EvaluatedLayout,
    FoundLayouts,
    Note,
    Objective,
    Progress,
    find_layouts,
    non_dominated,
    significant,
)
from mpctl.plan.search.nearest import nothing_fits
from mpctl.plan.search.plain import complexity, savings
from mpctl.plan.search.request import OVER_COUNTS, SearchRequest, gpu_counts, read_request, require_answerable, varied
from mpctl.plan.search.room import expected_slowdown
from mpctl.spec.cluster import link_hint
from mpctl.spec.job import JobSpec
from mpctl.spec.load import Source
from mpctl.spec.runtime import get_profile

Goal = Literal["tokens", "memory", "cost", "days", "energy"]
Sort = Literal["time", "memory", "cost", "plain"]


@dataclass(frozen=True, repr=False)
class LayoutReport:
    """A layout with its figures.

    job: the job under this layout; time: of its step; bytes: on the device of the fullest rank;
    price: of a GPU-hour, if known; alike: other layouts of the same tp, pp, ep and tensor mode that
    are about as fast (plan/search/find.py); run: of the request's tokens, if it names any.
    """

    job: JobSpec
    layout: LayoutSettings
    time: StepTime
    bytes: int
    price: float | None = None
    alike: tuple[EvaluatedLayout, ...] = ()
    run: WholeRun | None = None

    def __repr__(self) -> str:
        seconds = seconds_text(self.time.total)
        return f"LayoutReport({layout_text(self.layout)}: {seconds} a step, {self.verdict})"

    @property
    def device_memory(self) -> int:
        """Bytes of memory that a device has."""
        assert self.job.cluster.device is not None, "a search is of a device"
        return self.job.cluster.device.memory_bytes

    @property
    def fits(self) -> bool:
        """Whether the fullest rank fits its device and leaves the headroom free."""
        return bool(self.job.cluster.fits(self.bytes))

    @property
    def verdict(self) -> str:
        """Whether it fits, and by how much, in words."""
        return fit_text(self.job.cluster, self.bytes, "the fullest rank")

    @property
    def slowdown(self) -> float:
        """By how much a search counts the step longer, for the room that the device lacks (room.py)."""
        return expected_slowdown(self.bytes / self.device_memory)

    @property
    def expected_seconds(self) -> float:
        """The seconds by which a search orders."""
        return significant(self.time.total * self.slowdown)

    @property
    def room_text(self) -> str:
        """How much longer the step counts for want of room, in words; empty with room."""
        more = self.slowdown - 1
        return f"counted {more:.1%} longer: so full, the allocator may have to retry" if more else ""

    @property
    def alike_text(self) -> str:
        """`3 similar ones within 0.2 %`: the largest difference in step time between this layout
        and those alike; empty without any."""
        if not self.alike:
            return ""
        most = max(abs(one.step_seconds / self.time.total - 1) for one in self.alike)
        count = plural(len(self.alike), "similar one")
        return f"{count} within {100 * max(most, 0.001):.1f} %"

    @property
    def tokens_per_second(self) -> float:
        """Tokens that all GPUs together train on in a second."""
        model, batch = self.job.model, self.job.training.global_batch_size or 1
        assert model is not None, "a search is of a model"
        return batch * model.tokens_per_sample / self.time.total

    @property
    def gpu_hours_per_billion(self) -> float:
        """GPU-hours that a billion tokens take."""
        return gpu_hours_per_billion(self.job.world_size, self.tokens_per_second)

    @property
    def price_per_billion(self) -> float | None:
        """The price of a billion tokens, if that of a GPU-hour is known."""
        return None if self.price is None else self.price * self.gpu_hours_per_billion


def layout_reports(
    evaluator: LayoutEvaluator, found: Iterable[EvaluatedLayout], request: SearchRequest | None = None
) -> list[LayoutReport]:
    """The layouts that a search found, each with its job and the parts of its step, and the run of
    the request's tokens."""
    price, tokens = (request.price, request.tokens) if request else (None, None)
    reports = []
    for point in found:
        time = evaluator.step_time(point.layout)
        assert time is not None, "it was timed before"
        job = evaluator.space.job_of(point.layout)
        run = whole_run(LayoutDraft(job).layout(), time, tokens, price) if tokens else None
        reports.append(LayoutReport(job, point.layout, time, point.bytes, price, run=run))
    return reports


def given_report(evaluator: LayoutEvaluator, request: SearchRequest) -> LayoutReport | None:
    """The layout that the job sets; None where its step cannot be estimated."""
    plan = make_plan(evaluator.space.job)
    if plan.estimate is None or isinstance(plan.estimate.time, str):
        return None
    size, time, run = plan.estimate.fullest_stage.device_bytes, plan.estimate.time, None
    if request.tokens is not None:
        run = whole_run(plan.estimate.layout, time, request.tokens, request.price)
    return LayoutReport(plan.job, layout_of(plan.job), time, size, request.price, run=run)


def difference_text(best: LayoutReport, other: LayoutReport) -> str:
    """Return how another layout differs: in settings, in seconds by part, and in memory."""
    settings = changes_text(changed_settings(best.layout, other.layout))
    cost = cost_difference(best.time, other.time, best.bytes, other.bytes)
    return f"with {settings or 'the same settings'}: {cost}"


def suggestion_text(fastest: LayoutReport, suggested: LayoutReport, error: float) -> str:
    """Return what the suggested layout costs in time and saves in complexity and memory.

    `4.1% slower than the fastest, within the 10 % that estimates cannot tell apart; no pipeline, 12.4 GiB less`.
    Where one of them lacks room, that counts, and the text says so; of a run it names the days and the price too:
    `4.1% slower than the fastest (6.6 days, price 25.4k more), ...`.
    """
    plain = get_profile(suggested.job.training.runtime).plain
    slower = suggested.expected_seconds / fastest.expected_seconds - 1
    saved = savings(fastest.layout, suggested.layout, plain)
    held = suggested.bytes - fastest.bytes
    saved.append(f"{bytes_text(abs(held))} {'less' if held < 0 else 'more'}")
    room = " with room counted" if max(fastest.slowdown, suggested.slowdown) > 1 else ""
    more = "" if room else _more_of_run(fastest.run, suggested.run)
    return f"{slower:.1%} slower than the fastest{more}{room}, {tie_text(error)}; {', '.join(saved)}"


def _more_of_run(fastest: WholeRun | None, suggested: WholeRun | None) -> str:
    """` (6.6 days, price 25.4k more)`: what a run takes longer; empty where it is no longer, or without a run."""
    if fastest is None or suggested is None or suggested.days <= fastest.days:
        return ""
    price = ""
    if suggested.price is not None and fastest.price is not None:
        price = f", price {count_text(suggested.price - fastest.price)}"
    return f" ({days_text(suggested.days - fastest.days)}{price} more)"


def given_reason(best: LayoutReport, given: LayoutReport) -> str:
    """Compare the layout of the job as given with the best one, in a sentence."""
    settings = changes_text(changed_settings(best.layout, given.layout))
    if not settings:
        return "the job as given has this layout"
    if not given.fits:
        return f"the job as given ({settings}) {given.verdict}"
    return f"the job as given ({settings}): {cost_difference(best.time, given.time, best.bytes, given.bytes)}"


@dataclass(repr=False)
class SearchResult:
    """The result of a search.

    fastest: the fastest layout. suggested: the plainest one within `error`, a share, of the fastest, which
    estimates cannot tell apart; often the fastest itself. Both are None for the objective memory. rows: the
    best layouts in the order of `sort`, with the suggested one; each has a different combination of tp, pp,
    ep and tensor mode, and represents `alike` ones; below the fastest it is the plainest of those about as fast
    (plan/search/find.py). unsorted: rows left out because a row below beat them in time and memory. front: all
    evaluated layouts that no other beats in both.

    rows and front are on the job's number of GPUs; for the objectives cost, days and energy on the number
    that the objective prefers; where the job's is not searched or has no layout, on the largest that has
    one. by_gpus: the fastest layout of each number, None where none was found; why_none has the reasons. given: the
    layout that the job sets. seen: every layout that was estimated for `rows`. estimated: how many in all.
    too_large: how many were left out for their memory. is_complete: false where it was interrupted. searched:
    the fields of a layout that varied.
    """

    request: SearchRequest
    objective: str
    sort: Sort = "time"
    fastest: LayoutReport | None = None
    suggested: LayoutReport | None = None
    error: float = 0.0
    rows: list[LayoutReport] = field(default_factory=list)
    unsorted: int = 0
    front: list[LayoutReport] = field(default_factory=list)
    by_gpus: dict[int, LayoutReport | None] = field(default_factory=dict)
    why_none: dict[int, str] = field(default_factory=dict)
    given: LayoutReport | None = None
    seen: list[EvaluatedLayout] = field(default_factory=list)
    estimated: int = 0
    too_large: int = 0
    is_complete: bool = True
    searched: list[str] = field(default_factory=list)

    def __repr__(self) -> str:
        first = f"{self.rows[0]!r} of " if self.rows else ""
        return f"SearchResult({first}{plural(self.estimated, 'layout')} estimated)"

    @property
    def best(self) -> LayoutReport | None:
        """The layout that is best by the objective: the fastest, or for memory the smallest."""
        return self.fastest or min(self.rows, key=lambda row: (row.bytes, row.time.total), default=None)

    @property
    def suggestion(self) -> str:
        """What the suggested layout costs and saves, in words; empty where it is the fastest."""
        if self.fastest is None or self.suggested is None or self.suggested.layout == self.fastest.layout:
            return ""
        return suggestion_text(self.fastest, self.suggested, self.error)


def tied(result: SearchResult) -> list[int]:
    """Return the places of the rows whose order the estimate leaves open, those to measure first in front:
    with most memory free, then the plainest. Empty where the first row has no tie."""
    if result.fastest is None:
        return []
    most = result.fastest.expected_seconds * (1 + result.error)
    rows = [(row.bytes, _complexity(row), at) for at, row in enumerate(result.rows, 1) if row.expected_seconds <= most]
    return [at for *_, at in sorted(rows)] if len(rows) > 1 else []


def in_order(rows: Iterable[LayoutReport], sort: Sort) -> tuple[list[LayoutReport], int]:
    """Return the rows in this order, without those that a row below beats in time and memory, and how many
    these were."""
    every = sorted(rows, key=_ORDERS[sort])
    kept: list[LayoutReport] = []
    for row in reversed(every):
        if not any(one.expected_seconds < row.expected_seconds and one.bytes < row.bytes for one in kept):
            kept.append(row)
    return kept[::-1], len(every) - len(kept)


def _complexity(row: LayoutReport) -> float:
    return complexity(row.layout, get_profile(row.job.training.runtime).plain)


_ORDERS: dict[Sort, Callable[[LayoutReport], tuple[float, ...]]] = {
    "time": lambda row: (row.expected_seconds, row.bytes),
    "memory": lambda row: (row.bytes, row.expected_seconds),
    "cost": lambda row: (significant(row.gpu_hours_per_billion), row.bytes),
    "plain": lambda row: (_complexity(row), row.expected_seconds, row.bytes),
}


def answer_search(
    request: SearchRequest,
    counts: Sequence[int],
    *,
    top: int,
    objective: str,
    exhaustive: bool,
    on_progress: Progress,
    on_note: Note | None = None,
    sort: Sort | None = None,
    ungroup: bool = False,
) -> SearchResult:
    """Search each number of GPUs in counts. top: layouts wanted; exhaustive: evaluate every layout; sort:
    of the rows, by default the objective's; ungroup: a row for each layout of a group.

    On one number of GPUs the layout of least days, cost or energy is the fastest one, as nearly as
    a save stops training equally long under all of them. Raises InputError where the objective
    needs tokens or power that are not stated, or the device no rate for the data type; DoesNotFit
    or InputError where on none of the counts there is a layout that fits and can be timed.
    """
    require_answerable(request, objective)
    result = SearchResult(request, objective, sort or ("memory" if objective == "memory" else "time"))
    aim: Objective = "memory" if objective == "memory" else "tokens"
    evaluators = {gpus: _evaluator(request, gpus) for gpus in counts}
    seen: dict[int, set[EvaluatedLayout]] = {gpus: set() for gpus in counts}

    def search(gpus: int, *, top: int, budgets: int, suggest: bool) -> FoundLayouts:
        found = find_layouts(
            evaluators[gpus].space,
            top=top,
            budgets=budgets,
            objective=aim,
            suggest=suggest,
            exhaustive=exhaustive,
            evaluator=evaluators[gpus],
            on_note=on_note,
            on_progress=lambda stage, done, n: on_progress(f"{stage}, {gpus} GPUs", done, n),
        )
        result.too_large += found.too_large if not seen[gpus] else 0
        seen[gpus].update(found.evaluated)
        result.estimated = sum(map(len, seen.values()))
        result.is_complete &= found.is_complete
        return found

    found = FoundLayouts()
    own = request.job.world_size
    for gpus in sorted(counts, key=lambda gpus: gpus != own) if len(counts) > 1 else ():
        if result.is_complete:
            found = search(gpus, top=1, budgets=1, suggest=False)
            _add_count(result, evaluators[gpus], found)
    result.by_gpus = dict(sorted(result.by_gpus.items()))
    preferred = counts[0] if len(counts) == 1 else _preferred_count(result)
    if preferred is not None and result.is_complete:
        found = search(preferred, top=top, budgets=BUDGETS, suggest=True)
    if preferred is None or not found.best:
        if result.is_complete:
            raise _no_time(request, evaluators) or nothing_fits(request, counts, on_progress)
        return result
    result.seen = sorted(seen[preferred])
    _add_rows(result, evaluators[preferred], found, ungroup=ungroup)
    return result


def _add_count(result: SearchResult, evaluator: LayoutEvaluator, found: FoundLayouts) -> None:
    gpus, best = evaluator.space.world, layout_reports(evaluator, found.best, result.request)
    result.by_gpus[gpus] = best[0] if best else None
    if not best:
        level = missing_link(evaluator) if result.is_complete else None
        untimed = f"cannot be timed: cluster.{level} has no bandwidth"
        result.why_none[gpus] = untimed if level else "nothing fits"


def _add_rows(result: SearchResult, evaluator: LayoutEvaluator, found: FoundLayouts, *, ungroup: bool) -> None:
    request = result.request
    result.searched, result.error = varied(evaluator.space), found.error
    proposes = "pipeline_layout" not in request.fixed and any(p.layout.pipeline_layout for p in result.seen)
    result.searched += ["pipeline_layout"] * proposes
    best, plain = found.groups[0].first, evaluator.profile.plain
    alike = dict[EvaluatedLayout, tuple[EvaluatedLayout, ...]]()
    for group in found.groups:
        stands = best if best in group.members else group.plainest(plain, found.suggested)
        alike[stands] = tuple(point for point in group.members if point != stands)
    if ungroup:
        alike = {point: () for group in found.groups for point in group.members}
    if found.suggested is not None:  # a row of its own
        alike = {point: tuple(p for p in others if p != found.suggested) for point, others in alike.items()}
        alike.setdefault(found.suggested, ())
    front = non_dominated(result.seen)
    points = dict.fromkeys((*alike, *front))
    reports = dict(zip(points, layout_reports(evaluator, points, request), strict=True))
    rows = [replace(reports[point], alike=others) for point, others in alike.items()]
    result.front = [reports[point] for point in front]
    if result.objective != "memory":
        by_layout = {row.layout: row for row in rows}
        result.fastest = by_layout[found.best[0].layout]
        result.suggested = by_layout[found.suggested.layout] if found.suggested else None
    result.rows, result.unsorted = in_order(rows, result.sort)
    world, own = evaluator.space.world, request.job.world_size
    if world in result.by_gpus and result.fastest:
        result.by_gpus[world] = result.fastest  # the same answer in both tables
    if world == own and request.gives_layout:
        result.given = given_report(evaluator, request)


def _preferred_count(result: SearchResult) -> int | None:
    """The number of GPUs that is best by cost, days or energy where one of these is the objective;
    else the job's, or where that is not searched or has no layout the largest number that has one;
    None where none has."""
    costs = {g: cost_of(c, result.objective) for g, c in result.by_gpus.items() if c is not None}
    if result.objective in OVER_COUNTS and costs:
        return min(costs, key=lambda gpus: costs[gpus])
    own = result.request.job.world_size
    return own if own in costs else max(costs, default=None)


def cost_of(choice: LayoutReport, objective: str) -> float:
    """Return the figure to minimise over GPU counts: days or energy of the run; for cost its GPU-hours.
    Without a run, the GPU-hours of a billion tokens."""
    if choice.run is None:
        return choice.gpu_hours_per_billion
    return {"days": choice.run.days, "energy": choice.run.watt_hours or 0.0}.get(objective, choice.run.gpu_hours)


def _evaluator(request: SearchRequest, gpus: int) -> LayoutEvaluator:
    try:
        return LayoutEvaluator(request.space(gpus))
    except MissingFigure as missing:
        hint = "use a device preset that states it, or another training.dtype"
        raise InputError.of("no-step-time", "cluster.device", str(missing), hint) from None


def why_nothing(request: SearchRequest, evaluator: LayoutEvaluator, on_progress: Progress) -> InputError:
    """The error where no layout of the job's number of GPUs fits and can be timed."""
    gpus = request.job.world_size
    return _no_time(request, {gpus: evaluator}) or nothing_fits(request, [gpus], on_progress)


def _no_time(request: SearchRequest, evaluators: Mapping[int, LayoutEvaluator]) -> InputError | None:
    for gpus, evaluator in evaluators.items():
        if level := missing_link(evaluator):
            hint = link_hint(request.job.cluster, level)
            if level == "inter_node":
                hint += f"; or keep the ranks on one node: --gpus-per-node {max(evaluators)}"
            layouts = f"no layout of {plural(gpus, 'GPU')}"
            message = f"{layouts} can be timed: cluster.{level} has no bandwidth"
            return InputError.of("no-step-time", f"cluster.{level}", message, hint)
    return None


def search_layouts(
    source: Source,
    overrides: Mapping[str, Any] | None = None,
    *,
    top: int = 5,
    objective: Goal = "tokens",
    gpus: Sequence[int] | Literal["all"] | None = None,
    fix: Sequence[str] = (),
    max_tp: int | None = None,
    max_pp: int | None = None,
    max_cp: int | None = None,
    price: float | None = None,
    tokens: int | None = None,
    exhaustive: bool = False,
    sort: Sort | None = None,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> SearchResult:
    """Search the layouts of a job: the fastest, the suggested, and the best as `rows` of the result.

    source: a job file, a job preset's name, tables as in load_plan, or None. overrides: settings
    over it, by full or short name, `{"tp": 8, "headroom": 10}`; those of a layout are fixed. top: how many layouts.
    objective: most tokens a second, least memory, fewest GPU-hours, or fewest days or least energy
    of a run of `tokens`. gpus: find the fastest layout on each of these numbers of GPUs, in
    `by_gpus`; "all": powers of two, the default for cost, days and energy. `rows` are on the job's
    number of GPUs if it is one of them, except for these objectives, else on the largest.
    fix: settings not to vary, as text: `["pp=4"]`. max_tp, max_pp,
    max_cp: largest sizes to try. price: of a GPU-hour; layouts then have `price_per_billion`
    tokens. tokens: of a whole run; layouts then have its days, cost and failures in `run`.
    exhaustive: rule nothing out by bounds. sort: the order of the rows. on_progress: is
    called with a description, the amount done, and the total.

    Raises InputError where the job is not legal, names no model or no device, or where no layout of
    it can be timed; DoesNotFit, an InputError too, where none fits the memory.
    """
    sizes = {"tp": max_tp, "pp": max_pp, "cp": max_cp}
    most = {axis: size for axis, size in sizes.items() if size is not None}
    if isinstance(fix, str) or not (isinstance(fix, Sequence) and all(isinstance(one, str) for one in fix)):
        raise InputError.of("bad-value", "fix", f"{fix!r} is no list of settings", 'write ["pp=4"]')
    _require_possible(objective, sort, price, tokens, {"top": top} | {f"max_{a}": n for a, n in most.items()})
    request = read_request(source, {} if overrides is None else overrides, fix, most, price, tokens)
    return answer_search(
        request,
        gpu_counts(gpus, objective, request.job),
        top=top,
        objective=objective,
        exhaustive=exhaustive,
        on_progress=on_progress or (lambda stage, done, total: None),
        sort=sort,
    )


def _require_possible(
    objective: str, sort: str | None, price: float | None, tokens: int | None, counts: Mapping[str, int]
) -> None:
    """Raises InputError for values that the options of the command refuse as well."""
    issues = [
        Issue("bad-value", name, f"{count!r} is no number from 1", "use 1 or more")
        for name, count in counts.items()
        if not isinstance(count, int) or count < 1
    ]
    for name, value, known in (("objective", objective, get_args(Goal)), ("sort", sort, (None, *get_args(Sort)))):
        if value not in known:
            issues.append(Issue("bad-value", name, f"{value!r} is none", f"use {', '.join(filter(None, known))}"))
    if tokens is not None and not (isinstance(tokens, int) and 1 <= tokens <= MOST_TOKENS):
        message = f"{tokens!r} is not from 1 to 1e18"
        issues.append(Issue("bad-value", "tokens", message, "use a whole number such as 10**12"))
    if price is not None and not (isinstance(price, int | float) and 0 <= price < inf):
        issues.append(Issue("bad-value", "price", f"{price!r} is no price", "use 0 or more"))
    if issues:
        raise InputError(issues)
