"""The section of a search: time against memory, with the layouts that no other beats in both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpctl.core.units import bytes_text, seconds_text
from mpctl.render.charts import Chart, ChartAxis, ChartSeries, Look, Mark, Panel, chart_svg
from mpctl.render.html.frame import details, note, scrolling, section, table
from mpctl.render.markup import Raw, el
from mpctl.render.search import (
    RUN_COLUMNS,
    comparison_lines,
    figure_cells,
    has_run,
    header_lines,
    headline,
    notes,
    row_text,
    run_cells,
)

if TYPE_CHECKING:
    from mpctl.plan.search.document import LayoutEntry, NoLayoutEntry, SearchDocument

FRONT = "no other beats it in both time and memory"
DRAWN, LISTED = 1500, 200


@dataclass(frozen=True, slots=True)
class FrontPoint:
    """A layout of the picture: seconds of a step and bytes on its fullest rank; layout: its
    settings."""

    label: str
    seconds: float
    bytes: float
    is_on_front: bool
    layout: str


def front_section(points: Sequence[FrontPoint], search: SearchDocument | None = None) -> Raw:
    """The section "Search", or nothing without points: then no search was made.

    search: the answer, above the picture of the points.
    """
    if not points:
        return Raw()
    front = sorted((p for p in points if p.is_on_front), key=lambda p: p.seconds)
    others = [p for p in points if not p.is_on_front]
    label = f"Step time against memory of {len(points)} layouts, {len(front)} of them on the front"
    rows = [
        (p.label, p.layout, seconds_text(p.seconds), bytes_text(p.bytes), "yes" * p.is_on_front)
        for p in [*front, *sorted(others, key=lambda p: p.seconds)][:LISTED]
    ]
    columns = ("name", "layout", "step time", "memory", "front")
    return section(
        "search",
        "Search",
        *(_answer(search) if search else ()),
        el("h3", "Step time against memory"),
        _picture(front, others[:DRAWN], label),
        details(
            f"All {len(points)} layouts that were estimated"
            if len(rows) == len(points)
            else f"The first {len(rows)} of {len(points)} layouts that were estimated",
            table("Layouts estimated, those on the front first", columns, rows, left=2),
        ),
    )


def _answer(search: SearchDocument) -> Iterator[Raw]:
    """The best layouts, what sets them apart, and the line that runs each."""
    yield el("p", f"{headline(search)}. ", *(f"{line}. " for line in header_lines(search)))
    columns = ("no.", "layout", "step time", "tokens/s", "MFU", "memory")
    rows = [
        (number, row_text(entry), *figure_cells(entry, has_cost=False)[:4])
        for number, entry in enumerate(search["best"], start=1)
    ]
    yield table("Best layouts; no. 1 is the plan below", columns, rows, left=2)
    yield from (note(f"{line[0].upper()}{line[1:]}.") for line in notes(search))
    if lines := comparison_lines(search):
        yield el("h3", "Compared with no. 1")
        yield el("ul", *(el("li", line) for line in lines))
    commands = "\n".join(entry["command"] for entry in search["best"])
    yield details("Ready to type", el("pre", el("code", commands)))
    if search["by_gpus"]:
        yield from _by_gpus(search["by_gpus"])


def _by_gpus(entries: Sequence[LayoutEntry | NoLayoutEntry]) -> Iterator[Raw]:
    """The best layout of each number of GPUs, or why there is none, and the line that runs it."""
    run = RUN_COLUMNS if any(has_run(entry) for entry in entries) else ()
    columns = ("GPUs", "layout", "step time", "tokens/s", "MFU", "memory", "GPU-h/Gtok", *run)
    rows = [
        (entry["gpus"], entry["reason"], *[""] * (5 + len(run)))
        if "reason" in entry
        else (entry["gpus"], row_text(entry), *figure_cells(entry, has_cost=True)[:5], *run_cells(entry))
        for entry in entries
    ]
    yield table("Best by number of GPUs", columns, rows, left=2)
    lines = [entry["command"] for entry in entries if "command" in entry]
    yield details("Ready to type, by number of GPUs", el("pre", el("code", "\n".join(lines))))


def _picture(front: Sequence[FrontPoint], others: Sequence[FrontPoint], label: str) -> Raw:
    series = [_series("others", others, 6, "points")] if others else []
    series += [_series(FRONT, front, 1, "line")] if front else []
    chart = Chart(
        "front",
        label,
        "",
        ChartAxis("step time", seconds_text, base=10),
        ChartAxis("memory", bytes_text, base=2),
        (Panel("", tuple(series)),),
    )
    return scrolling(chart_svg(chart), label)


def _series(name: str, points: Sequence[FrontPoint], colour: int, look: Look) -> ChartSeries:
    marks = (Mark(p.seconds, p.bytes, _title(p), is_hollow=not p.is_on_front) for p in points)
    return ChartSeries(name, tuple(marks), look, colour)


def _title(point: FrontPoint) -> str:
    figures = f"{seconds_text(point.seconds)}, {bytes_text(point.bytes)}"
    return f"{point.label}: {point.layout}, {figures}"
