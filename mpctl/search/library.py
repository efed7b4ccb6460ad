"""A search in one call, for programs: what `mpctl search` does, without its tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any, Literal, get_args

from mpctl.errors import InputError, Issue
from mpctl.search.request import gpu_counts, read_request
from mpctl.search.result import SearchResult, answer_search

Goal = Literal["tokens", "memory", "cost"]


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
    exhaustive: bool = False,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> SearchResult:
    """The best layouts of a job, in `best` of the result.

    source: a job file, a job preset's name, or None. overrides: settings over it, by full or short
    name, `{"tp": 8, "headroom": 10}`; those of a layout are kept as they are. top: how many
    layouts. objective: most tokens a second, least memory, or fewest GPU-hours a token. gpus: also
    find the best layout on each of these numbers of GPUs, in `by_gpus`; "all": powers of two, the
    default for cost. `best` is on the job's own number but for cost. fix: settings to keep, as
    text: `["pp=4"]`. max_tp, max_pp, max_cp: largest sizes to try. price: of a GPU-hour; layouts
    then have `price_per_billion` tokens. exhaustive: rule nothing out by bounds. on_progress: is
    called with what is done, how much of it, and of how much.

    Raises InputError where the job is not legal, names no model or no device, or where no layout of
    it can be timed; DoesNotFit, an InputError too, where none fits the memory.
    """
    sizes = {"tp": max_tp, "pp": max_pp, "cp": max_cp}
    most = {axis: size for axis, size in sizes.items() if size is not None}
    _require_possible(objective, price, {"top": top} | {f"max_{a}": n for a, n in most.items()})
    request = read_request(source, overrides or {}, fix, most, price)
    return answer_search(
        request,
        gpu_counts(gpus, objective, request.job),
        top=top,
        objective=objective,
        exhaustive=exhaustive,
        on_progress=on_progress or (lambda stage, done, total: None),
    )


def _require_possible(objective: str, price: float | None, counts: Mapping[str, int]) -> None:
    """Raises InputError for what the options of the command do not take either."""
    issues = [
        Issue("bad-value", name, f"{count!r} is no number from 1", "use 1 or more")
        for name, count in counts.items()
        if not isinstance(count, int) or count < 1
    ]
    if objective not in get_args(Goal):
        known = ", ".join(get_args(Goal))
        issues.append(Issue("bad-value", "objective", f"{objective!r} is none", f"use {known}"))
    if price is not None and not 0 <= price < inf:
        issues.append(Issue("bad-value", "price", f"{price!r} is no price", "use 0 or more"))
    if issues:
        raise InputError(issues)
