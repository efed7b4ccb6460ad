"""A search in one call, for programs: what `mpctl search` does, without its tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from mpctl.search.request import read_request
from mpctl.search.result import SearchResult, answer_search


def search_layouts(
    source: str | None,
    overrides: Mapping[str, Any] | None = None,
    *,
    keep: Sequence[str] = (),
    top: int = 5,
    objective: Literal["tokens", "memory"] = "tokens",
) -> SearchResult:
    """The best layouts of a job on all GPUs of its cluster, in `best` of the result.

    source: a job file, a job preset's name, or None. overrides: settings over it, by full name:
    `{"parallel.tp": 8}`; those of a layout are kept as they are. keep: settings to keep, as text:
    `["pp=4"]`. top: how many layouts. objective: most tokens a second, or least memory.

    Raises InputError where the job is not legal, names no model or no device, or where no layout of
    it can be timed; DoesNotFit, an InputError too, where none fits the memory.
    """
    request = read_request(source, overrides or {}, keep, {})
    return answer_search(
        request,
        [request.job.world_size],
        top=top,
        objective=objective,
        exhaustive=False,
        on_progress=lambda stage, done, total: None,
    )
