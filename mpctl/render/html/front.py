"""The section of a search: time against memory, with the layouts that no other beats in both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import log10
from typing import TYPE_CHECKING

from mpctl.render.html.frame import details, note, scrolling, section, table
from mpctl.render.markup import Raw, el, number
from mpctl.render.search_words import (
    comparison_lines,
    figure_cells,
    header_lines,
    headline,
    notes,
    row_text,
)
from mpctl.units import bytes_text, seconds_text

if TYPE_CHECKING:
    from mpctl.search.document import LayoutEntry, NoLayoutEntry, SearchDocument

WIDTH, HEIGHT, LEFT, BASE, TOP = 640, 320, 66, 284, 14
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
        "search", "Search", *(_answer(search) if search else ()),
        el("h3", "Step time against memory"),
        scrolling(_scatter(front, others[:DRAWN], label), label),
        note("Filled and joined by a line: layouts that no other beats in both time and memory."),
        details(f"All {len(points)} layouts that were estimated" if len(rows) == len(points)
                else f"The first {len(rows)} of {len(points)} layouts that were estimated",
                table("Layouts estimated, those on the front first", columns, rows, left=2)),
    )  # fmt: skip


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
    columns = ("GPUs", "layout", "step time", "tokens/s", "MFU", "memory", "GPU-h/Gtok")
    rows = [
        (entry["gpus"], entry["reason"], *[""] * 5) if "reason" in entry
        else (entry["gpus"], row_text(entry), *figure_cells(entry, has_cost=True)[:5])
        for entry in entries
    ]  # fmt: skip
    yield table("Best by number of GPUs", columns, rows, left=2)
    lines = [entry["command"] for entry in entries if "command" in entry]
    yield details("Ready to type, by number of GPUs", el("pre", el("code", "\n".join(lines))))


@dataclass(frozen=True)
class _Scale:
    """A logarithmic axis from low to high over [first, last] units."""

    low: float
    high: float
    first: float
    last: float

    @classmethod
    def of(cls, values: Sequence[float], first: float, last: float) -> _Scale:
        low, high = min(values), max(values)
        return cls(log10(low / 1.08), log10(high * 1.08), first, last)

    def at(self, value: float) -> float:
        return self.first + (log10(value) - self.low) / (self.high - self.low) * self._span

    @property
    def _span(self) -> float:
        return self.last - self.first

    @property
    def ticks(self) -> list[float]:
        return [10 ** (self.low + (self.high - self.low) * part / 3) for part in range(4)]


def _scatter(front: Sequence[FrontPoint], others: Sequence[FrontPoint], label: str) -> Raw:
    every = [*front, *others]
    across = _Scale.of([p.seconds for p in every], LEFT, WIDTH - 24)
    up = _Scale.of([p.bytes for p in every], BASE, TOP)
    line = " ".join(f"{number(across.at(p.seconds))},{number(up.at(p.bytes))}" for p in front)
    dots = [_dot(p, across.at(p.seconds), up.at(p.bytes)) for p in (*others, *front)]
    return el(
        "svg", el("title", label), *_axes(across, up),
        el("polyline", points=line, class_="frontline"), *dots,
        viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=label, class_="scatter",
    )  # fmt: skip


def _dot(point: FrontPoint, x: float, y: float) -> Raw:
    title = (
        f"{point.label}: {point.layout}, {seconds_text(point.seconds)}, {bytes_text(point.bytes)}"
    )
    return el("circle", el("title", title), cx=number(x), cy=number(y),
              r=5 if point.is_on_front else 3,
              class_="onfront" if point.is_on_front else "offfront")  # fmt: skip


def _axes(across: _Scale, up: _Scale) -> list[Raw]:
    frame = el("path", d=f"M{LEFT} {TOP}V{BASE}H{WIDTH}", class_="tick")
    seconds_labels = [
        el("text", seconds_text(t), x=number(across.at(t)), y=BASE + 18, text_anchor="middle")
        for t in across.ticks
    ]
    bytes_labels = [
        el("text", bytes_text(b), x=LEFT - 6, y=number(up.at(b) + 4), text_anchor="end")
        for b in up.ticks
    ]
    name = el("text", "seconds a step", x=WIDTH, y=BASE + 34, text_anchor="end", class_="dim")
    return [frame, *seconds_labels, *bytes_labels, name]
