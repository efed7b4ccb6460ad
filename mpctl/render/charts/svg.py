"""A chart as SVG: for a page, and as a file that needs nothing from the network.

Series differ in colour and in the shape of their marks; colours follow the reader's scheme. A point
tells its name and figures where it is pointed at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from textwrap import wrap

from mpctl.render.charts.chart import MARKED, Chart, ChartSeries, Mark, Panel, Span, colour_and_shape
from mpctl.render.markup import Raw, el, join, number
from mpctl.render.svg import Part, picture, picture_file, stacked

WIDTH, GAP, RIGHT, FOOT, HEAD = 860, 18, 24, 46, 24
LETTER, TITLE_LETTER, LINE, ROW = 6.7, 8.0, 18, 22  # widths and heights of text, in pixels
SHAPES = (
    "M-4 0A4 4 0 1 0 4 0A4 4 0 1 0 -4 0Z",
    "M-3.6 -3.6H3.6V3.6H-3.6Z",
    "M0 -5L5 0L0 5L-5 0Z",
    "M0 -4.8L4.8 3.8H-4.8Z",
    "M0 4.8L4.8 -3.8H-4.8Z",
    "M-5 0L-2.5 -4.3H2.5L5 0L2.5 4.3H-2.5Z",
    "M-1.6 -4.6H1.6V-1.6H4.6V1.6H1.6V4.6H-1.6V1.6H-4.6V-1.6H-1.6Z",
)
"""Shapes, by which series differ without colour: circle, square, diamond, ..."""


def chart_svg(chart: Chart, **attributes: object) -> Raw:
    """The chart without its title and note, which a page has as text."""
    part = stacked([_legend(chart), *_rows(chart)])
    return picture(chart.title, part, WIDTH, **{"class_": "chart", **attributes})


def chart_file(chart: Chart, source: str = "") -> str:
    """The whole file of a chart; source: a line on where the figures are from."""
    notes = [el("text", line, y=13, class_="dim") for line in wrap(chart.note, 135)]
    title = (el("text", chart.title, y=18, class_="head"), 28.0)
    head = [title, *((note, float(LINE)) for note in notes), (Raw(), 8.0)]
    tail = [(el("text", source, y=14, class_="dim"), 18.0)] if source else []
    part = stacked([*head, _legend(chart), *_rows(chart), *tail])
    return picture_file(chart.title, part, WIDTH)


def _legend(chart: Chart) -> Part:
    """A sample and a name for each series, in as many lines as they take."""
    x, y, parts = 0.0, 0.0, []
    for series in chart.legend:
        wide = 34 + LETTER * len(series.name) + 18
        if x and x + wide > WIDTH:
            x, y = 0.0, y + LINE
        sample = el(
            "g",
            _sample(series),
            el("text", series.name, x=34, y=5),
            transform=f"translate({number(x)} {number(y + 8)})",
        )
        parts.append(sample)
        x += wide
    return join(parts), y + LINE + 8


def _sample(series: ChartSeries) -> Raw:
    if series.look == "bar":
        return _band_of(series, 2.0, 28.0, 15.0, 0.0)
    parts = [] if series.look == "points" else [_path(series, [(0.0, 0.0), (28.0, 0.0)])]
    return join([*parts, *([_symbol(series, 14, 0, is_hollow=False)] if _has_marks(series) else [])])


@dataclass(frozen=True)
class _Field:
    """The rectangle of a panel, in which a mark lies by its axes."""

    chart: Chart
    left: float
    width: float
    height: float

    def across(self, value: float) -> float:
        return self.left + self.chart.x.share(value) * self.width

    def up(self, value: float) -> float:
        return HEAD + (1 - self.chart.y.share(value)) * self.height


def _rows(chart: Chart) -> Iterator[Part]:
    """The panels in rows of up to three."""
    columns = chart.columns
    wide = (WIDTH - GAP * (columns - 1)) / columns
    left = min(max(LETTER * len(text) for _, text in chart.y.ticks) + 12, wide * 0.45)
    high = float({1: 340, 2: 270}.get(columns, 210))
    if not chart.y.label:  # an axis of names
        high = max(ROW * len(chart.y.ticks), 60.0)
    field = _Field(chart, left, wide - left - RIGHT, high)
    for first in range(0, len(chart.panels), columns):
        shown = chart.panels[first : first + columns]
        drawn = join(
            el("g", _panel(panel, field), transform=f"translate({number(at * (wide + GAP))} 0)")
            for at, panel in enumerate(shown)
        )
        yield drawn, HEAD + high + FOOT


def _panel(panel: Panel, field: _Field) -> Raw:
    lines = [s for s in panel.series if s.look in ("dashed", "dotted", "faint")]
    others = [s for s in panel.series if s not in lines]
    title = _cut(panel.title, field.width * LETTER / TITLE_LETTER)
    return join(
        [
            el("text", title, x=number(field.left), y=14, class_="title"),
            *_axes(field),
            *(_drawn(series, field) for series in (*lines, *others)),
        ]
    )


def _axes(field: _Field) -> Iterator[Raw]:
    left, base, right = field.left, HEAD + field.height, field.left + field.width
    for value, text in field.chart.x_ticks:
        x = number(field.across(value))
        yield el("path", d=f"M{x} {HEAD}V{number(base)}", class_="grid")
        yield el("text", text, x=x, y=number(base + 16), text_anchor="middle")
    for value, text in field.chart.y.ticks:
        y = field.up(value)
        yield el("path", d=f"M{number(left)} {number(y)}H{number(right)}", class_="grid")
        yield el("text", _cut(text, left), x=number(left - 6), y=number(y + 4), text_anchor="end")
    yield el("path", d=f"M{number(left)} {HEAD}V{number(base)}H{number(right)}", class_="tick")
    yield el("text", field.chart.x.label, x=number(right), y=number(base + 33), text_anchor="end", class_="dim")
    if field.chart.y.label:
        yield el("text", field.chart.y.label, x=number(left + 5), y=HEAD + 11, class_="dim")


def _cut(text: str, wide: float) -> str:
    most = int((wide - 10) / LETTER)
    return text if len(text) <= most + 1 else text[: max(most - 1, 1)] + "…"


def _drawn(series: ChartSeries, field: _Field) -> Raw:
    points = [(field.across(mark.x), field.up(mark.y)) for mark in series.marks]
    if series.look == "bar":
        return join(_bar(series, mark, field) for mark in series.marks)
    parts = [] if series.look == "points" else [_path(series, points)]
    if _has_marks(series):
        for mark, (x, y) in zip(series.marks, points, strict=True):
            shown = [*_spans(series, mark, field), _symbol(series, x, y, is_hollow=mark.is_hollow)]
            parts.append(el("g", el("title", mark.name), *shown))
    return join(parts)


def _has_marks(series: ChartSeries) -> bool:
    return series.look in MARKED


def _spans(series: ChartSeries, mark: Mark, field: _Field) -> Iterator[Raw]:
    """The bars through a mark."""
    x, y = number(field.across(mark.x)), number(field.up(mark.y))
    if mark.x_span:
        low, high = _ends(mark.x_span, field.across)
        yield el("path", d=f"M{low} {y}H{high}", class_=f"span {_stroke(series)}")
    if mark.y_span:
        low, high = _ends(mark.y_span, field.up)
        yield el("path", d=f"M{x} {low}V{high}", class_=f"span {_stroke(series)}")


def _ends(span: Span, place: Callable[[float], float]) -> tuple[str, str]:
    return number(place(span[0])), number(place(span[1]))


def _bar(series: ChartSeries, mark: Mark, field: _Field) -> Raw:
    low, high = mark.x_span or (mark.x, mark.x)
    drawn = _band_of(series, field.across(low), field.across(high), field.across(mark.x), field.up(mark.y))
    return el("g", el("title", mark.name), drawn)


def _band_of(series: ChartSeries, low: float, high: float, at: float, y: float) -> Raw:
    """A pale bar from low to high, and a stroke at the prediction."""
    colour, _ = colour_and_shape(series.colour or 0)
    bar = el(
        "rect", x=number(low), y=number(y - 7), width=number(max(high - low, 1)), height=14, class_=f"pale q{colour}"
    )
    stroke = el("path", d=f"M{number(at)} {number(y - 7)}v14", class_=f"curve p{colour}")
    return join([bar, stroke])


def _path(series: ChartSeries, points: Sequence[tuple[float, float]]) -> Raw:
    d = "M" + "L".join(f"{number(x)} {number(y)}" for x, y in points)
    return el("path", d=d, class_=f"curve {series.look} {_stroke(series)}")


def _symbol(series: ChartSeries, x: float, y: float, *, is_hollow: bool) -> Raw:
    colour, shape = colour_and_shape(series.colour or 0)
    fill = "hollow" if is_hollow else f"q{colour}"
    return el(
        "path",
        d=SHAPES[shape],
        class_=f"{fill} p{colour}",
        stroke_width="1.5",
        transform=f"translate({number(x)} {number(y)})",
    )


def _stroke(series: ChartSeries) -> str:
    return "guide" if series.colour is None else f"p{colour_and_shape(series.colour)[0]}"
