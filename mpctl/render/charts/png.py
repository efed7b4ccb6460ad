"""A chart as PNG by matplotlib, with the axes, ticks, colours and marks of its SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from textwrap import wrap
from typing import Any
from warnings import catch_warnings, simplefilter

from mpctl.render.charts.chart import MARKED, Chart, ChartAxis, ChartSeries, Mark, Panel, colour_and_shape
from mpctl.render.markup import cannot_write
from mpctl.render.svg import light_colours

MARKERS = ("o", "s", "D", "^", "v", "h", "P")
WIDTHS = {"dotted": 1.0, "faint": 0.6}
DASHES: dict[str, Any] = {"dashed": (0, (5, 3)), "dotted": (0, (1.5, 2.5))}
SETTINGS: Any = {"font.size": 9.0, "axes.spines.top": False, "axes.spines.right": False, "text.parse_math": False}
"""How matplotlib draws: no word is taken for a formula."""
INCHES, LINE = 9.6, 160  # across, in inches and in characters of a note


def has_matplotlib() -> bool:
    """Whether the package matplotlib can be imported; it is not imported here."""
    try:
        return find_spec("matplotlib") is not None
    except ValueError:
        return False


def write_png(path: Path, chart: Chart, source: str = "") -> None:
    """Write the chart, always with the same bytes; source: a line on where the figures are from.
    Raises InputError where the file cannot be written."""
    from matplotlib import rc_context

    with rc_context(SETTINGS), catch_warnings():
        simplefilter("ignore", UserWarning)  # a letter that the font lacks is drawn as a box
        try:
            _figure(chart, source).savefig(path)
        except OSError as error:
            raise cannot_write(path, error, "--out") from None


def _figure(chart: Chart, source: str) -> Any:
    from matplotlib.figure import Figure

    rows = -(-len(chart.panels) // chart.columns)
    high = {1: 3.9, 2: 3.1}.get(chart.columns, 2.6) if chart.y.label else 0.6 + 0.26 * len(chart.y.ticks)
    figure = Figure(figsize=(INCHES, rows * high + 1.5), dpi=150, layout="constrained")
    fields = list(figure.subplots(rows, chart.columns, squeeze=False).flat)
    for field, panel in zip(fields, chart.panels, strict=False):
        _draw(field, panel, chart)
    for field in fields[len(chart.panels) :]:
        field.set_axis_off()
    handles = list(_handles(chart))
    longest = max(len(series.name) for series in chart.legend)
    columns = int(INCHES / (0.075 * longest + 0.75))
    figure.legend(
        handles=handles,
        loc="outside upper left",
        ncols=min(len(handles), columns),
        frameon=False,
        title=chart.title,
        alignment="left",
        borderpad=0.1,
        title_fontproperties={"size": 13, "weight": "bold"},
    )
    words = "\n".join([*wrap(chart.note, LINE), *([source] if source else [])])
    figure.supxlabel(words, x=0.01, ha="left", fontsize=7.5, color=light_colours()["--dim"])
    return figure


def _draw(field: Any, panel: Panel, chart: Chart) -> None:
    _set_axis(field, "x", chart.x, chart.x_ticks)
    _set_axis(field, "y", chart.y, chart.y.ticks)
    field.set_title(panel.title, loc="left", fontsize=10)
    field.grid(color=light_colours()["--line"], linewidth=0.6)
    field.set_axisbelow(True)
    for series in panel.series:
        _draw_series(field, series)


def _set_axis(field: Any, side: str, axis: ChartAxis, ticks: Sequence[tuple[float, str]]) -> None:
    from matplotlib.ticker import NullLocator

    settings = {f"{side}scale": "log" if axis.is_log else "linear", f"{side}label": axis.label}
    field.set(**settings, **{f"{side}lim": (axis.low, axis.high)})
    getattr(field, f"set_{side}ticks")([value for value, _ in ticks], [text for _, text in ticks])
    getattr(field, f"{side}axis").set_minor_locator(NullLocator())


def _draw_series(field: Any, series: ChartSeries) -> None:
    colour = _colour(series)
    xs, ys = [mark.x for mark in series.marks], [mark.y for mark in series.marks]
    if series.look == "bar":
        for mark in series.marks:
            _draw_bar(field, mark, colour)
        return
    if series.look != "points":
        field.plot(
            xs,
            ys,
            color=colour,
            linestyle=DASHES.get(series.look, "-"),
            linewidth=WIDTHS.get(series.look, 1.5),
            alpha=0.35 if series.look == "faint" else None,
        )
    if series.look in MARKED:
        for mark in series.marks:
            _draw_mark(field, series, mark, colour)


def _draw_bar(field: Any, mark: Mark, colour: str) -> None:
    low, high = mark.x_span or (mark.x, mark.x)
    field.plot([low, high], [mark.y, mark.y], color=colour, alpha=0.28, linewidth=9, solid_capstyle="butt")
    field.plot([mark.x], [mark.y], color=colour, marker="|", markersize=9, markeredgewidth=1.8)


def _draw_mark(field: Any, series: ChartSeries, mark: Mark, colour: str) -> None:
    for span, along in ((mark.x_span, "x"), (mark.y_span, "y")):
        if span:
            xs, ys = (span, (mark.y, mark.y)) if along == "x" else ((mark.x, mark.x), span)
            field.plot(xs, ys, color=colour, alpha=0.65, linewidth=0.9)
    face = light_colours()["--paper"] if mark.is_hollow else colour
    field.plot(
        [mark.x],
        [mark.y],
        marker=_marker(series),
        color=colour,
        markerfacecolor=face,
        markersize=4.8,
        markeredgewidth=1.2,
    )


def _handles(chart: Chart) -> Iterator[Any]:
    from matplotlib.lines import Line2D

    for series in chart.legend:
        is_marked = series.look in MARKED
        yield Line2D(
            [],
            [],
            label=series.name,
            color=_colour(series),
            linestyle="" if series.look == "points" else DASHES.get(series.look, "-"),
            linewidth=9 if series.look == "bar" else 1.5,
            alpha=0.28 if series.look == "bar" else None,
            marker=_marker(series) if is_marked else None,
            markersize=4.8,
            solid_capstyle="butt",
        )


def _colour(series: ChartSeries) -> str:
    colours = light_colours()
    if series.colour is None:
        return colours["--dim"]
    return colours[f"--l{colour_and_shape(series.colour)[0]}"]


def _marker(series: ChartSeries) -> str:
    return MARKERS[colour_and_shape(series.colour or 0)[1]]
