"""The result of a search as data: schema mpctl.search/3, and the same as rows of a table.

Seconds and bytes are those of `mpctl plan` for the same layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NotRequired, final

from typing_extensions import TypedDict  # pydantic needs it to validate them before Python 3.12

from mpctl.core.errors import Issue, IssueEntry
from mpctl.core.records import Json, to_json
from mpctl.model.layout.draft import LayoutDraft
from mpctl.plan.planning.layout_settings import SettingValue, layout_text
from mpctl.plan.planning.summary import TrainingEntry, training_settings
from mpctl.plan.rules.gradients import gradient_rules
from mpctl.plan.rules.launched import why_not_launched
from mpctl.plan.rules.runtime import runtime_rules
from mpctl.plan.rules.training import slow_dtype
from mpctl.plan.search.find import EvaluatedLayout
from mpctl.plan.search.result import LayoutReport, difference_text, given_reason, tied
from mpctl.spec.figure_sources import FigureSource, figure_sources
from mpctl.spec.runtime import is_launched

if TYPE_CHECKING:
    from mpctl.plan.search.result import SearchResult

CSV_FIGURES = (
    "gpus",
    "step_seconds",
    "step_seconds_low",
    "step_seconds_high",
    "tokens_per_second",
    "mfu",
    "peak_bytes",
    "gpu_hours_per_billion_tokens",
)
CSV_RUN = ("days", "gpu_hours", "price", "watt_hours", "useful")
CommandLine = Callable[[LayoutReport], str]  # the line to type for a layout


@final
class LayoutEntry(TypedDict):
    """One layout: its settings, its figures, and the command that runs or plans it.

    step_seconds_low, step_seconds_high: 9 of 10 measured steps are between them. peak_bytes: on the device of
    the fullest rank. slowdown: by how much an order by time counts the step longer, since a device so full may
    make the allocator retry; 1 with room; room: that in words. breakdown: seconds of the step by part. layout:
    the settings in words. alike: layouts that this one represents, the fastest first, with the same keys.
    difference: from the fastest layout, in words; empty for that one. price: only if that of a GPU-hour is
    known. run: of `--tokens` (WholeRun).
    """

    fits: bool
    verdict: str
    gpus: int
    settings: dict[str, SettingValue]
    step_seconds: float
    step_seconds_low: float
    step_seconds_high: float
    extrapolates: list[str]
    tokens_per_second: float
    mfu: float
    peak_bytes: int
    slowdown: float
    room: str
    gpu_hours_per_billion_tokens: float
    price_per_billion_tokens: NotRequired[float]
    run: NotRequired[Json]
    breakdown: dict[str, float]
    layout: str
    alike: list[Json]
    alike_text: str
    difference: str
    command: str


@final
class NoLayoutEntry(TypedDict):
    """A number of GPUs for which no layout was found, and why."""

    gpus: int
    settings: None
    reason: str


class SearchDocument(TypedDict):
    """Schema mpctl.search/3: what `mpctl search --json` prints.

    training: settings that all layouts share. figures_from: the user's presets behind the figures. fixed:
    settings of a layout that the request fixes. has_balanced_steps: seconds are with balanced routing to
    experts, bytes with the load that memory holds. searched: those that varied. estimated: number of layouts
    whose step was estimated, estimated_here of them on the GPUs of the rows. too_large: number of layouts left
    out for their memory, of those that no bound on time had ruled out before. is_complete: false after Ctrl-C.
    fastest: the fastest layout. suggested: the plainest of those that estimates cannot tell from the fastest,
    whose difference is at most the share ranking_error; suggestion: what it costs and saves, in words, empty
    where it is the fastest. Both layouts are null for the objective memory. rows: the best layouts and the
    suggested one, in the order of sort; each has a different combination of tp, pp, ep and tensor mode. tied:
    places of the rows within ranking_error of the fastest, whose order is open, those to measure first in
    front; empty without a tie. unsorted: rows left out because a row below beat them in time and memory. own:
    the layout of the job as written, if it sets one. front: the estimated layouts that no other beats in time
    and memory, the fastest first. by_gpus: with `--gpus`, the fastest layout of each number of GPUs. changes:
    with `--from`, what to change in the launcher's own keys.
    """

    schema: Literal["mpctl.search/3"]
    training: TrainingEntry
    figures_from: list[FigureSource]
    job: str | None
    model: str | None
    device: str | None
    device_memory_bytes: int | None
    headroom_percent: float
    gpus: int
    runtime: str
    dtype: str
    has_balanced_steps: bool
    global_batch_size: int | None
    fixed: dict[str, SettingValue]
    searched: list[str]
    warnings: list[IssueEntry]
    objective: str
    sort: str
    is_complete: bool
    estimated: int
    estimated_here: int
    too_large: int
    ranking_error: float
    fastest: LayoutEntry | None
    suggested: LayoutEntry | None
    suggestion: str
    rows: list[LayoutEntry]
    tied: list[int]
    unsorted: int
    own: LayoutEntry | None
    own_reason: str | None
    front: list[LayoutEntry]
    by_gpus: list[LayoutEntry | NoLayoutEntry]
    changes: NotRequired[dict[str, object]]


def search_document(result: SearchResult, command: CommandLine) -> SearchDocument:
    """The result as JSON. command: the line to type for a layout."""

    job, best, given = result.request.job, result.best, result.given

    def entry(choice: LayoutReport) -> LayoutEntry:
        return _layout_entry(choice, best, command)

    device = job.cluster.device
    return {
        "schema": "mpctl.search/3",
        "training": training_settings(best.job if best else job, result.searched),
        "figures_from": figure_sources(job, result.request.presets),
        "job": job.name,
        "model": job.model.name if job.model else None,
        "device": device.name if device else None,
        "device_memory_bytes": device.memory_bytes if device else None,
        "headroom_percent": job.cluster.headroom,
        "gpus": job.world_size,
        "runtime": job.training.runtime,
        "dtype": job.training.dtype,
        "has_balanced_steps": job.has_experts and job.training.moe_load is None,
        "global_batch_size": job.training.global_batch_size,
        "fixed": result.request.fixed,
        "searched": result.searched,
        "warnings": [issue.as_dict() for issue in _warnings(result)],
        "objective": result.objective,
        "sort": result.sort,
        "is_complete": result.is_complete,
        "estimated": result.estimated,
        "estimated_here": len(result.seen),
        "too_large": result.too_large,
        "ranking_error": result.error,
        "fastest": entry(result.fastest) if result.fastest else None,
        "suggested": entry(result.suggested) if result.suggested else None,
        "suggestion": result.suggestion,
        "rows": list(map(entry, result.rows)),
        "tied": tied(result),
        "unsorted": result.unsorted,
        "own": entry(given) if given else None,
        "own_reason": given_reason(best, given) if given and best else None,
        "front": list(map(entry, result.front)),
        "by_gpus": [
            entry(choice) if choice else {"gpus": gpus, "settings": None, "reason": result.why_none[gpus]}
            for gpus, choice in result.by_gpus.items()
        ],
    }


def _warnings(result: SearchResult) -> list[Issue]:
    """Warnings of the job, before its layouts, and of fixed settings in the first one that the
    runtime does not run."""
    request = result.request
    job, checks = request.job, [*slow_dtype(LayoutDraft(request.job))]
    if result.rows:
        draft = LayoutDraft(result.rows[0].job)
        checks += [*runtime_rules(draft), *gradient_rules(draft)]
    if is_launched(job.training.runtime):
        checks += why_not_launched(job)
    return [*request.warnings, *(check.issue for check in checks)]


def _layout_entry(choice: LayoutReport, best: LayoutReport | None, command: CommandLine) -> LayoutEntry:
    time, price = choice.time, choice.price_per_billion
    entry: LayoutEntry = {
        "fits": choice.fits,
        "verdict": choice.verdict,
        "gpus": choice.job.world_size,
        "settings": choice.layout._asdict(),
        "step_seconds": time.total,
        "step_seconds_low": time.low,
        "step_seconds_high": time.high,
        "extrapolates": list(time.extrapolates),
        "tokens_per_second": choice.tokens_per_second,
        "mfu": time.mfu,
        "peak_bytes": choice.bytes,
        "slowdown": choice.slowdown,
        "room": choice.room_text,
        "gpu_hours_per_billion_tokens": choice.gpu_hours_per_billion,
        "breakdown": time.parts(),
        "layout": layout_text(choice.layout),
        "alike": [_alike_entry(point) for point in choice.alike],
        "alike_text": choice.alike_text,
        "difference": difference_text(best, choice) if best and choice.layout != best.layout else "",
        "command": command(choice),
    }
    if price is not None:
        entry["price_per_billion_tokens"] = price
    if choice.run is not None:
        entry["run"] = to_json(choice.run)
    return entry


def _alike_entry(point: EvaluatedLayout) -> Json:
    settings, layout = point.layout._asdict(), layout_text(point.layout)
    return {"settings": settings, "step_seconds": point.step_seconds, "peak_bytes": point.bytes, "layout": layout}


def csv_rows(document: SearchDocument) -> Iterator[list[object]]:
    """A row of titles, then the two answers, the rows, the front and the fastest of each number of GPUs, one
    layout a row; where no layout was found, no row."""
    first = document["rows"][0] if document["rows"] else None
    settings = list(first["settings"]) if first else []
    run = [f"run_{name}" for name in CSV_RUN] if first and "run" in first else []
    yield ["list", *CSV_FIGURES, *run, *settings, "command"]
    lists = {
        **{name: [entry] for name in ("fastest", "suggested") if (entry := document[name])},
        "rows": document["rows"],
        "front": document["front"],
        "by_gpus": [entry for entry in document["by_gpus"] if "command" in entry],
    }
    for title, entries in lists.items():
        yield from ([title, *_csv_cells(entry, settings)] for entry in entries)


def _csv_cells(entry: LayoutEntry, settings: Sequence[str]) -> list[object]:
    figures: Mapping[str, object] = entry
    values = (entry["settings"][name] for name in settings)
    run = [entry["run"][name] for name in CSV_RUN] if "run" in entry else []
    return [*(figures[key] for key in CSV_FIGURES), *run, *values, entry["command"]]
