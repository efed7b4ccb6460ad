"""A whole search: on one number of GPUs or several, with the job's own layout beside the answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mpctl.errors import DoesNotFit, InputError
from mpctl.estimate.kernels import MissingFigure
from mpctl.planning.layout_settings import layout_text
from mpctl.rules.model import slow_dtype
from mpctl.search.evaluate import LayoutEvaluator, unknown_link
from mpctl.search.find import (
    RUNGS,
    EvaluatedLayout,
    FoundLayouts,
    Objective,
    Progress,
    find_layouts,
)
from mpctl.search.report import Choice, choices, own_choice, own_reason, reasons
from mpctl.search.request import SearchRequest, varied
from mpctl.units import plural

Line = Callable[[Choice], str]


@dataclass
class SearchResult:
    """best: of the number of GPUs that the objective prefers; by_gpus: the best of each, None
    where none was found, and why_none says why; own: the job's own layout; seen: all that were
    estimated beside best; searched: the fields of a layout that varied."""

    asked: SearchRequest
    objective: str
    best: list[Choice] = field(default_factory=list)
    front: list[Choice] = field(default_factory=list)
    by_gpus: dict[int, Choice | None] = field(default_factory=dict)
    why_none: dict[int, str] = field(default_factory=dict)
    own: Choice | None = None
    seen: list[EvaluatedLayout] = field(default_factory=list)
    estimated: int = 0
    is_complete: bool = True
    searched: list[str] = field(default_factory=list)

    def document(self, price: float | None, line: Line) -> dict[str, Any]:
        job = self.asked.job
        assert job.model is not None, "a search is of a model"
        return {
            "schema": "mpctl.search/1", "job": job.name, "model": job.model.name,
            "device": job.cluster.device.name if job.cluster.device else None,
            "device_memory_bytes": job.cluster.device.memory_bytes if job.cluster.device else None,
            "gpus": job.world_size, "runtime": job.training.runtime,
            "dtype": job.training.dtype, "global_batch_size": job.training.global_batch_size,
            "fixed": self.asked.fixed, "searched": self.searched,
            "warnings": [check.issue.as_dict() for check in slow_dtype(job)],
            "objective": self.objective, "is_complete": self.is_complete,
            "estimated": self.estimated,
            "best": [_entry(choice, price, line) for choice in self.best],
            "reasons": list(reasons(self.best[0], self.best[1:])) if self.best else [],
            "own": _entry(self.own, price, line) if self.own else None,
            "own_reason": own_reason(self.best[0], self.own) if self.own and self.best else None,
            "front": [_entry(choice, price, line) for choice in self.front],
            "by_gpus": [
                _entry(choice, price, line) if choice
                else {"gpus": gpus, "settings": None, "reason": self.why_none[gpus]}
                for gpus, choice in self.by_gpus.items()
            ],
        }  # fmt: skip


def _entry(choice: Choice, price: float | None, line: Line) -> dict[str, Any]:
    return {**choice.as_dict(price), "layout": layout_text(choice.layout), "command": line(choice)}


def answer_search(
    asked: SearchRequest, counts: Sequence[int], *, top: int, objective: str, exhaustive: bool,
    on_progress: Progress,
) -> SearchResult:  # fmt: skip
    """Raises InputError where the device states no rate, or on none of the counts a
    layout fits that can be timed."""
    answer, aim = SearchResult(asked, objective), _aim(objective)
    engines = {gpus: _engine(asked, gpus) for gpus in counts}
    found: dict[int, FoundLayouts] = {}

    def look(gpus: int, *, top: int, rungs: int) -> None:
        found[gpus] = find_layouts(
            engines[gpus].space, top=top, rungs=rungs, objective=aim, exhaustive=exhaustive,
            engine=engines[gpus], on_progress=_of_gpus(on_progress, gpus),
        )  # fmt: skip
        answer.estimated += found[gpus].estimated
        answer.is_complete &= found[gpus].is_complete

    for gpus in counts if len(counts) > 1 else ():
        if answer.is_complete:
            look(gpus, top=1, rungs=1)
            best = choices(engines[gpus], found[gpus].points)
            answer.by_gpus[gpus] = best[0] if best else None
            if not best:
                level = unknown_link(engines[gpus]) if answer.is_complete else None
                answer.why_none[gpus] = _untimed(level) if level else "nothing fits"
    chosen = counts[0] if len(counts) == 1 else _chosen(answer)
    if chosen is not None and answer.is_complete:
        look(chosen, top=top, rungs=RUNGS)
    if chosen is None or not found[chosen].points:
        if answer.is_complete:
            raise _no_time(engines) or _nothing_fits(asked, counts)
        return answer
    own, engine = found[chosen], engines[chosen]
    answer.searched = varied(engine.space)
    answer.best, answer.front = choices(engine, own.points), choices(engine, own.front)
    answer.seen = own.seen
    if engine.space.world == asked.job.world_size:
        answer.own = own_choice(engine)
    return answer


def _aim(objective: str) -> Objective:
    return "memory" if objective == "memory" else "tokens"


def _of_gpus(report: Progress, gpus: int) -> Progress:
    return lambda stage, done, total: report(f"{stage}, {gpus} GPUs", done, total)


def _chosen(answer: SearchResult) -> int | None:
    """Of several numbers of GPUs the cheapest where cost is what counts, else the largest that
    has a layout."""
    costs = {g: c.gpu_hours_per_billion for g, c in answer.by_gpus.items() if c is not None}
    if answer.objective == "cost" and costs:
        return min(costs, key=lambda gpus: costs[gpus])
    return max(costs, default=None)


def _engine(asked: SearchRequest, gpus: int) -> LayoutEvaluator:
    is_whole = gpus == asked.job.world_size
    try:
        return LayoutEvaluator(asked.space(None if is_whole else gpus))
    except MissingFigure as missing:
        hint = "use a device preset that states it, or another training.dtype"
        raise InputError.of("no-step-time", "cluster.device", str(missing), hint) from None


def _no_time(engines: Mapping[int, LayoutEvaluator]) -> InputError | None:
    """What to do where a layout fits the memory, and its messages cannot be timed."""
    for gpus, engine in engines.items():
        if level := unknown_link(engine):
            hint = f"set cluster.{level}.bandwidth, bytes/s in one direction"
            if level == "inter_node":
                hint += f"; or keep the ranks on one node: --gpus-per-node {max(engines)}"
            message = f"no layout of {plural(gpus, 'GPU')} can be timed: {_no_bandwidth(level)}"
            return InputError.of("no-step-time", f"cluster.{level}", message, hint)
    return None


def _untimed(level: str) -> str:
    return f"cannot be timed: {_no_bandwidth(level)}"


def _no_bandwidth(level: str) -> str:
    return f"cluster.{level} has no bandwidth"


def _nothing_fits(asked: SearchRequest, counts: Sequence[int]) -> InputError:
    """In words: whether there is any legal layout, and what may make one fit."""
    where = f"{' or '.join(f'{count:,}' for count in counts)} {'GPU' if counts == [1] else 'GPUs'}"
    for gpus in counts:
        space = asked.space(None if gpus == asked.job.world_size else gpus)
        if next(space.layouts(), None) is not None:
            message = f"none of {plural(_legal(space), 'legal layout')} fits the memory of {where}"
            narrow = ", or training.dtype bf16" * (asked.job.training.dtype in ("fp32", "fp64"))
            hint = f"use more GPUs, a smaller model, or another --fix{narrow}"
            return DoesNotFit.of("nothing-fits", "cluster", message, hint)
    hint = "change --fix and --max-*, the number of GPUs, or training.global_batch_size"
    return InputError.of("no-layout", "parallel", f"no legal layout fills {where}", hint)


def _legal(space: Any) -> int:
    return sum(1 for _ in space.layouts())


COLUMNS = (
    "gpus", "step_seconds", "step_seconds_low", "step_seconds_high", "tokens_per_second", "mfu",
    "peak_bytes", "gpu_hours_per_billion_tokens",
)  # fmt: skip


def csv_rows(document: dict[str, Any]) -> Iterator[list[Any]]:
    """The best, the front and the best of each number of GPUs, one layout a row."""
    settings = list(document["best"][0]["settings"]) if document["best"] else []
    yield ["list", *COLUMNS, *settings, "command"]
    for name in ("best", "front", "by_gpus"):
        for entry in document[name]:
            if entry["settings"]:
                own = (entry["settings"][key] for key in settings)
                yield [name, *(entry[key] for key in COLUMNS), *own, entry["command"]]
