"""A complete search on one number of GPUs or several, and in words how layouts differ.

Seconds and bytes are those of `mpctl plan` for the same layout. Cost is counted in GPU-hours per
token: two layouts on the same number of GPUs cost the same if they are as fast, and more GPUs cost
more wherever they do not make the step faster in proportion.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Literal, get_args

from mpctl.core.errors import InputError, Issue
from mpctl.core.units import bytes_text, plural, seconds_text
from mpctl.model.layout.draft import LayoutDraft
from mpctl.plan.estimate.kernels import MissingFigure
from mpctl.plan.estimate.memory import fit_text
from mpctl.plan.estimate.step import StepTime
from mpctl.plan.planning.layout_settings import LayoutSettings, changed_settings, changes_text, layout_of, layout_text
from mpctl.plan.planning.plan import make_plan
from mpctl.plan.planning.whole_run import MOST_TOKENS, WholeRun, whole_run
from mpctl.plan.search.evaluate import LayoutEvaluator, missing_link
from mpctl.plan.search.find import (
    BUDGETS,
    TIES,
    EvaluatedLayout,
    FoundLayouts,
    Note,
    Objective,
    Progress,
    find_layouts,
    plainest_first,
)
from mpctl.plan.search.nearest import nothing_fits
from mpctl.plan.search.request import OVER_COUNTS, SearchRequest, gpu_counts, read_request, require_answerable, varied
from mpctl.spec.cluster import link_hint
from mpctl.spec.job import JobSpec

SHOWN_PARTS = 3
SHOWN_SHARE = 0.002  # of a step: a part that differs by less is not named
BILLION = 1e9


@dataclass(frozen=True, repr=False)
class LayoutReport:
    """A layout with its figures.

    job: the job under this layout; time: of its step; bytes: on the device of the fullest rank;
    price: of a GPU-hour, if known; alike: layouts of the same tp, pp, ep and tensor mode that
    are about as fast and less plain (plan/search/find.py); run: of the request's tokens, if it names
    any.
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
    def alike_text(self) -> str:
        """`3 similar ones within 0.2 %`: the largest difference in step time between this layout
        and those alike; empty without any."""
        if not self.alike:
            return ""
        most = max(abs(one.seconds / self.time.total - 1) for one in self.alike)
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
        return self.job.world_size * BILLION / self.tokens_per_second / 3600

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


def reasons(best: LayoutReport, others: Iterable[LayoutReport]) -> Iterator[str]:
    """A sentence for each other layout: how much slower, in which parts, what memory it saves."""
    for other in others:
        settings = changes_text(changed_settings(best.layout, other.layout))
        yield f"with {settings or 'the same settings'}: {_difference(best, other)}"


def given_reason(best: LayoutReport, given: LayoutReport) -> str:
    """Compare the layout of the job as given with the best one, in a sentence."""
    settings = changes_text(changed_settings(best.layout, given.layout))
    if not settings:
        return "the job as given has this layout"
    if not given.fits:
        return f"the job as given ({settings}) {given.verdict}"
    return f"the job as given ({settings}): {_difference(best, given)}"


def _difference(best: LayoutReport, other: LayoutReport) -> str:
    """Describe the slowdown, the parts that differ most, signed, and the memory that it saves."""
    slower = other.time.total - best.time.total
    word, share = "slower" if slower >= 0 else "faster", abs(slower) / best.time.total
    text = f"{seconds_text(abs(slower))} ({share:.1%}) {word}"
    ours, theirs = best.time.parts(), other.time.parts()
    names = dict.fromkeys((*ours, *theirs))
    differences = sorted(((theirs.get(n, 0.0) - ours.get(n, 0.0), n) for n in names), key=lambda pair: -abs(pair[0]))
    shown = [
        f"{name} {'+' if difference > 0 else '−'}{seconds_text(abs(difference))}"
        for difference, name in differences[:SHOWN_PARTS]
        if abs(difference) > SHOWN_SHARE * best.time.total
    ]
    text += f" ({', '.join(shown)})" if shown else ""
    more = other.bytes - best.bytes
    if abs(more) >= 0.02 * best.bytes:
        text += f", {bytes_text(abs(more))} {'less' if more < 0 else 'more'} memory"
    return text


@dataclass(repr=False)
class SearchResult:
    """The result of a search.

    best, front: on the job's number of GPUs; for the objective cost, and where nothing was found on
    that number, on the number that the objective prefers; each of best has a different combination
    of tp, pp, ep and tensor mode, and represents `alike` ones (plan/search/find.py). by_gpus: the best
    layout of each number, None where none was found; why_none has the reasons. given: the layout
    that the job sets. seen: every layout that was estimated for `best`. estimated: how many in all.
    too_large: how many were left out for their memory. is_complete: false where it was interrupted.
    searched: the fields of a layout that varied. is_plain_first: the first of best is the plainest
    of a tie, not the fastest.
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
    request: SearchRequest,
    counts: Sequence[int],
    *,
    top: int,
    objective: str,
    exhaustive: bool,
    on_progress: Progress,
    on_note: Note | None = None,
) -> SearchResult:
    """Search each number of GPUs in counts. top: layouts wanted; exhaustive: evaluate every layout.

    On one number of GPUs the layout of least days, cost or energy is the fastest one, as nearly as
    a save stops training equally long under all of them. Raises InputError where the objective
    needs tokens or power that are not stated, or the device no rate for the data type; DoesNotFit
    or InputError where on none of the counts there is a layout that fits and can be timed.
    """
    require_answerable(request, objective)
    result = SearchResult(request, objective)
    aim: Objective = "memory" if objective == "memory" else "tokens"
    evaluators = {gpus: _evaluator(request, gpus) for gpus in counts}

    def search(gpus: int, *, top: int, budgets: int) -> FoundLayouts:
        found = find_layouts(
            evaluators[gpus].space,
            top=top,
            budgets=budgets,
            objective=aim,
            exhaustive=exhaustive,
            evaluator=evaluators[gpus],
            on_note=on_note,
            on_progress=lambda stage, done, n: on_progress(f"{stage}, {gpus} GPUs", done, n),
        )
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
        most = top if aim == "memory" else max(top, TIES)
        found = search(preferred, top=most, budgets=BUDGETS)
    if preferred is None or not found.best:
        if result.is_complete:
            raise _no_time(request, evaluators) or nothing_fits(request, counts, on_progress)
        return result
    _add_best(result, evaluators[preferred], found, top)
    return result


def _add_count(result: SearchResult, evaluator: LayoutEvaluator, found: FoundLayouts) -> None:
    gpus, best = evaluator.space.world, layout_reports(evaluator, found.best, result.request)
    result.by_gpus[gpus] = best[0] if best else None
    if not best:
        level = missing_link(evaluator) if result.is_complete else None
        untimed = f"cannot be timed: cluster.{level} has no bandwidth"
        result.why_none[gpus] = untimed if level else "nothing fits"


def _add_best(result: SearchResult, evaluator: LayoutEvaluator, found: FoundLayouts, top: int) -> None:
    request = result.request
    result.searched = varied(evaluator.space)
    groups = found.groups
    if groups and result.objective != "memory":
        (first,) = layout_reports(evaluator, found.best[:1], request)
        groups = plainest_first(groups, first.time.high / first.time.low)
        result.is_plain_first = groups[0].plainest.seconds > found.groups[0].plainest.seconds
    result.best = [
        replace(report, alike=group.others)
        for group, report in zip(
            groups[:top], layout_reports(evaluator, (group.plainest for group in groups[:top]), request), strict=True
        )
    ]
    result.front = layout_reports(evaluator, found.front, request)
    result.seen = found.evaluated
    world, own = evaluator.space.world, result.request.job.world_size
    if world in result.by_gpus and result.best:
        result.by_gpus[world] = result.best[0]  # the same answer in both tables
    if world == own and result.request.gives_layout:
        result.given = given_report(evaluator, request)


def _preferred_count(result: SearchResult) -> int | None:
    """The number of GPUs that is best by cost, days or energy where one of these is the objective;
    else the job's, or where that has no layout the largest number that has one; None where none
    has."""
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


Goal = Literal["tokens", "memory", "cost", "days", "energy"]


def search_layouts(
    source: str | None,
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
    on_progress: Callable[[str, int, int], None] | None = None,
) -> SearchResult:
    """The best layouts of a job, in `best` of the result.

    source: a job file, a job preset's name, or None. overrides: settings over it, by full or short
    name, `{"tp": 8, "headroom": 10}`; those of a layout are fixed. top: how many layouts.
    objective: most tokens a second, least memory, fewest GPU-hours, or fewest days or least energy
    of a run of `tokens`. gpus: also find the best layout on each of these numbers of GPUs, in
    `by_gpus`; "all": powers of two, the default for cost, days and energy. `best` is on the job's
    number of GPUs except for these. fix: settings not to vary, as text: `["pp=4"]`. max_tp, max_pp,
    max_cp: largest sizes to try. price: of a GPU-hour; layouts then have `price_per_billion`
    tokens. tokens: of a whole run; layouts then have its days, cost and failures in `run`.
    exhaustive: rule nothing out by bounds. on_progress: is
    called with a description, the amount done, and the total.

    Raises InputError where the job is not legal, names no model or no device, or where no layout of
    it can be timed; DoesNotFit, an InputError too, where none fits the memory.
    """
    sizes = {"tp": max_tp, "pp": max_pp, "cp": max_cp}
    most = {axis: size for axis, size in sizes.items() if size is not None}
    _require_possible(objective, price, tokens, {"top": top} | {f"max_{a}": n for a, n in most.items()})
    request = read_request(source, overrides or {}, fix, most, price, tokens)
    return answer_search(
        request,
        gpu_counts(gpus, objective, request.job),
        top=top,
        objective=objective,
        exhaustive=exhaustive,
        on_progress=on_progress or (lambda stage, done, total: None),
    )


def _require_possible(objective: str, price: float | None, tokens: int | None, counts: Mapping[str, int]) -> None:
    """Raises InputError for values that the options of the command refuse as well."""
    issues = [
        Issue("bad-value", name, f"{count!r} is no number from 1", "use 1 or more")
        for name, count in counts.items()
        if not isinstance(count, int) or count < 1
    ]
    if objective not in get_args(Goal):
        known = ", ".join(get_args(Goal))
        issues.append(Issue("bad-value", "objective", f"{objective!r} is none", f"use {known}"))
    if tokens is not None and not (isinstance(tokens, int) and 1 <= tokens <= MOST_TOKENS):
        message = f"{tokens!r} is not from 1 to 1e18"
        issues.append(Issue("bad-value", "tokens", message, "use a whole number such as 10**12"))
    if price is not None and not 0 <= price < inf:
        issues.append(Issue("bad-value", "price", f"{price!r} is no price", "use 0 or more"))
    if issues:
        raise InputError(issues)
