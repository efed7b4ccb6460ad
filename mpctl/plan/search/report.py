"""A search's answer as one page for those who decide: schema mpctl.report/1.

What to run, what it costs, what the next two layouts lose, how far the forecast may be off and what it rests on, and
what to measure first. By hand, a band of 1.2 around a step of 10 s is 8.33 to 12 s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import exp
from typing import Literal

from typing_extensions import TypedDict  # pydantic needs it to validate them before Python 3.12

from mpctl.core.errors import IssueEntry
from mpctl.core.units import plural, seconds_text
from mpctl.plan.estimate.step import QUANTILE
from mpctl.plan.estimate.system import SPREAD, find_system, own_spread
from mpctl.plan.planning.layout_settings import layout_text
from mpctl.plan.planning.plan import make_plan
from mpctl.plan.planning.runtimes import is_open, open_text
from mpctl.plan.planning.summary import TrainingEntry, training_settings
from mpctl.plan.search.document import LayoutEntry, SearchDocument, search_document
from mpctl.plan.search.result import LayoutReport, SearchResult, difference_text
from mpctl.spec.runtime import RuntimeProfile, get_profile

OTHERS = 2
TRIAL = 20  # steps that a trial takes, the first of which warm up
Line = Callable[[LayoutReport, str | None], str]
"""The line of a layout; of a verb, or of the one that launches it or else plans it."""


class OtherEntry(TypedDict):
    """A layout that is not recommended. loses: in settings, seconds by part and memory, next to the one that is; days
    and price of the run, if its tokens and a price are known."""

    layout: str
    step_seconds: float
    fits: bool
    loses: str
    days: float | None
    price: float | None
    command: str


class RiskEntry(TypedDict):
    """How far a measured step may be off. is_measured: whether runs of this software on this cluster were fitted;
    kept_back: the share within which 9 of 10 runs were that such a fit had not seen; rests_on: in sentences."""

    low_seconds: float
    high_seconds: float
    is_measured: bool
    kept_back: float
    rests_on: list[str]


class ReportDocument(TypedDict):
    """Schema mpctl.report/1: what `mpctl report --json` prints. training: of the recommended layout; why: why this
    layout; emit: the line that writes it for its launcher, if there is one; measure_first: what to do, in order.
    warnings: what the answer assumes, the global batch and the runtime among it."""

    schema: Literal["mpctl.report/1"]
    model: str
    gpus: int
    device: str
    launcher: str
    training: TrainingEntry
    recommended: LayoutEntry
    why: str
    emit: str | None
    others: list[OtherEntry]
    risk: RiskEntry
    measure_first: list[str]
    warnings: list[str]


def report_document(result: SearchResult, line: Line) -> ReportDocument:
    """Return the report on a search that found a layout."""
    search = search_document(result, lambda choice: line(choice, None))
    best = result.suggested or result.best
    assert best is not None
    profile = get_profile(best.job.training.runtime)
    ranked = [result.fastest, *result.rows] if result.fastest else result.rows
    others = list({row.layout: row for row in ranked if row.layout != best.layout}.values())[:OTHERS]
    launchers = profile.runs.emit
    return {
        "schema": "mpctl.report/1",
        "model": search["model"] or search["job"] or "the model",
        "gpus": best.job.world_size,
        "device": search["device"] or "",
        "launcher": profile.name,
        "training": training_settings(best.job),
        "recommended": search["suggested"] or search["fastest"] or search["rows"][0],
        "why": _why(search),
        "emit": f"{line(best, 'emit')} {launchers[0]}" if launchers else None,
        "others": [_other(best, row, line) for row in others],
        "risk": _risk(best, profile),
        "measure_first": list(_measure_first(best, others, result.error)),
        "warnings": [*_assumed(result, best), *(_text(warning) for warning in search["warnings"])],
    }


def _assumed(result: SearchResult, best: LayoutReport) -> Iterator[str]:
    """What nobody said and the answer rests on."""
    training = best.job.training
    if result.request.opens_batch:
        yield (
            f"global batch {training.global_batch_size}: assumed, micro batch x dp of this layout: set "
            "--global-batch-size, on which step, MFU and the best layout depend"
        )
    if is_open(best.job):
        yield f"runtime {open_text(best.job)}: set --runtime to what will train it"


def _text(warning: IssueEntry) -> str:
    return f"{warning['message']}: {warning['hint']}" if warning["hint"] else warning["message"]


def _why(search: SearchDocument) -> str:
    if search["suggestion"]:
        return f"the plainest of the fastest: {search['suggestion']}"
    return f"the fastest of {search['estimated']:,} layouts estimated; {search['too_large']:,} more do not fit"


def _other(best: LayoutReport, row: LayoutReport, line: Line) -> OtherEntry:
    return {
        "layout": layout_text(row.layout),
        "step_seconds": row.time.total,
        "fits": row.fits,
        "loses": difference_text(best, row),
        "days": row.run.days if row.run else None,
        "price": row.run.price if row.run else None,
        "command": line(row, None),
    }


def _risk(best: LayoutReport, profile: RuntimeProfile) -> RiskEntry:
    cluster = best.job.cluster
    is_measured = find_system(cluster, profile).is_measured
    spread = own_spread(cluster, profile)
    if spread is None:
        spread = profile.spread if is_measured else max(profile.spread_apart, SPREAD)
        if best.job.has_experts:
            spread = max(spread, profile.experts.spread)
    kept_back = exp(QUANTILE * spread) - 1
    return {
        "low_seconds": best.time.low,
        "high_seconds": best.time.high,
        "is_measured": is_measured,
        "kept_back": kept_back,
        "rests_on": list(_rests_on(best, profile, kept_back, is_measured=is_measured)),
    }


def _rests_on(best: LayoutReport, profile: RuntimeProfile, kept_back: float, *, is_measured: bool) -> Iterator[str]:
    seen, name = profile.seen, best.job.cluster.name or "this cluster"
    if is_measured:
        others = plural(sum(one != name for one in seen.clusters), "other cluster")
        yield f"measured: {profile.name} on {name} and {others}, up to {seen.gpus:,} GPUs, is behind the figures"
    else:
        yield f"not measured: no run of {profile.name} on {name} is behind the figures"
    kind = " with experts" if best.job.has_experts else ""
    yield f"9 of 10 runs{kind} that a fit had not seen were within {kept_back:.0%} of their forecast"
    yield from best.time.extrapolates


def _measure_first(best: LayoutReport, others: list[LayoutReport], error: float) -> Iterator[str]:
    """What to measure, in order: what narrows the band, the layout itself, those that estimates cannot tell apart."""
    estimate = make_plan(best.job).estimate
    if estimate is not None and estimate.measure_next:
        yield estimate.measure_next
    low, high = seconds_text(best.time.low), seconds_text(best.time.high)
    yield f"{TRIAL} steps of the recommended layout: outside of {low} to {high}, `mpctl why JOB LOG` says what is slow"
    near = [row for row in others if row.expected_seconds <= best.expected_seconds * (1 + error)]
    if near:
        texts = " and ".join(_name(at) for at, row in enumerate(others, 1) if row in near)
        yield f"{TRIAL} steps of {texts}: estimates this close ({error:.0%}) do not tell them apart"
    yield "`mpctl calibrate LOG --out presets`: the next forecast then rests on your own runs"


def _name(at: int) -> str:
    return f"alternative {at}"
