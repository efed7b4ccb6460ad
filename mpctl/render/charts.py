"""Charts: lines, points and bars in panels that share their axes, drawn by matplotlib.

A page has a chart as SVG in the colours of the reader's scheme, where a mark tells its name when it is
pointed at. A file is SVG or PNG by its suffix. The same chart always gives the same bytes. matplotlib
is imported when a chart is drawn.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import ceil, log2
from pathlib import Path
from textwrap import shorten, wrap
from typing import Any, Literal
from warnings import catch_warnings, simplefilter
from xml.etree import ElementTree

from mpctl.render.markup import UNFIT, Raw, cannot_write
from mpctl.render.svg import light_colours

Look = Literal["line", "steps", "points", "curve", "faint", "dashed", "dotted", "bar"]
Span = tuple[float, float]
COLOURS, MARKERS = 7, ("o", "s", "D", "^", "v", "h", "P")
MOST = 1e200  # of what an axis shows
INCHES, LINE = 10.5, 150  # across, in inches and in characters of a note
SETTINGS: Any = {
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.parse_math": False,  # no word is taken for a formula
    "svg.fonttype": "none",  # text stays text
}


@dataclass(frozen=True, slots=True)
class ChartAxis:
    """text: writes a tick. base: of the powers that a logarithmic axis has ticks at, 0 if it is linear.
    ticks: the only ticks; names: of rows from top to bottom, row n at -n; from_zero: begins at 0."""

    label: str
    text: Callable[[float], str] = field(default="{:g}".format, compare=False)
    base: int = 0
    ticks: tuple[float, ...] = ()
    names: tuple[str, ...] = ()
    from_zero: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """A measured or computed point. x_span, y_span: from least to most, drawn as a bar through it;
    name: what it is, shown when it is pointed at; is_hollow: a rehearsal, not a measurement."""

    x: float
    y: float
    name: str = ""
    x_span: Span | None = None
    y_span: Span | None = None
    is_hollow: bool = False


@dataclass(frozen=True, slots=True)
class ChartSeries:
    """Marks of one name in the legend, or without a name of none. look: `line` joins them, `steps` by a
    staircase, `points` does not, `curve` is a line without symbols and `faint` a pale one, `dashed` and
    `dotted` are lines to compare with, `bar` is a pale bar of x_span with a stroke at x. colour: a number
    that stands for a colour and a shape (colour_and_shape); None for dim ink."""

    name: str
    marks: tuple[Mark, ...]
    look: Look = "points"
    colour: int | None = None


@dataclass(frozen=True, slots=True)
class Panel:
    """One field of a chart with its own title, on the chart's axes."""

    title: str
    series: tuple[ChartSeries, ...]


@dataclass(frozen=True, slots=True)
class Chart:
    """One picture. key: the name of its file; note: how it is read, in a sentence or two."""

    key: str
    title: str
    note: str
    x: ChartAxis
    y: ChartAxis
    panels: tuple[Panel, ...]

    @property
    def columns(self) -> int:
        """The number of panels side by side: at most three; two if there are four."""
        return min(len(self.panels), 2 if len(self.panels) == 4 else 3)

    @property
    def legend(self) -> list[ChartSeries]:
        """The first series of each name, in order of appearance."""
        series = [series for panel in self.panels for series in panel.series if series.name]
        return list({each.name: each for each in reversed(series)}.values())[::-1]


def numbered(names: Iterable[str]) -> dict[str, int]:
    """A look for each name, in order of appearance."""
    return {name: at for at, name in enumerate(dict.fromkeys(names))}


def colour_and_shape(number: int) -> tuple[int, int]:
    """Both below COLOURS, and no two alike for as many as COLOURS squared series."""
    return number % COLOURS, (number + number // COLOURS) % COLOURS


def chart_svg(chart: Chart) -> Raw:
    """The chart as an element of a page, without its title and note, which a page has as text."""
    root = _svg(chart, "", has_words=False)
    root.attrib |= {"class": "chart"}
    names = {light: f"var({name})" for name, light in reversed(light_colours().items())}
    text = ElementTree.tostring(root, encoding="unicode")
    return Raw(re.sub("#[0-9a-f]{6}", lambda found: names.get(found[0], found[0]), text))


def write_chart(path: Path, chart: Chart, source: str = "") -> None:
    """Write the chart as PNG or SVG, by the suffix of path. source: a line on where the figures are
    from. Raises InputError where the file cannot be written."""
    try:
        if path.suffix.lower() == ".png":
            with _drawn(chart, source, has_words=True) as (figure, _):
                figure.savefig(path, dpi=150)
        else:
            root = _svg(chart, source, has_words=True)
            root.attrib |= {"xmlns": "http://www.w3.org/2000/svg", "width": root.attrib["viewBox"].split()[2]}
            path.write_text(ElementTree.tostring(root, encoding="unicode") + "\n", "utf-8")
    except OSError as error:
        raise cannot_write(path, error, "--out") from None


def _svg(chart: Chart, source: str, *, has_words: bool) -> ElementTree.Element:
    """The SVG of matplotlib with the marks' names, without metadata, ids that nothing refers to, and
    names of fonts: text has the font of its page."""
    file, space = io.BytesIO(), "{http://www.w3.org/2000/svg}"
    with _drawn(chart, source, has_words=has_words) as (figure, names):
        figure.savefig(file, format="svg", metadata={"Date": None}, transparent=not has_words)
    text = file.getvalue().decode()
    root = ElementTree.fromstring(text)
    for element in root.findall(f"{space}metadata") + root.findall(f"{space}defs")[:1]:
        root.remove(element)
    used = set(re.findall(r"(?:url\(|href=\")#(\w+)", text))
    for element in root.iter():
        element.tag = element.tag.removeprefix(space)
        marks = names.get(element.get("id", ""), [])
        for mark, name in zip(element.iter(f"{space}use"), marks, strict=False):
            ElementTree.SubElement(mark, f"{space}title").text = _fit(name)
        element.attrib = {
            key.rpartition("}")[2]: NEEDLESS.sub("", value)
            for key, value in element.items()
            if key != "id" or value in used
        }
    root.attrib = {"viewBox": root.attrib["viewBox"], "role": "img", "aria-label": _fit(chart.title)}
    return root


NEEDLESS = re.compile(r"font-family: [^;]*;?|(?<=\.\d\d)\d+|\n")


def _fit(text: str) -> str:
    """A text without what XML cannot hold."""
    return UNFIT.sub("\ufffd", text)


@contextmanager
def _drawn(chart: Chart, source: str, *, has_words: bool) -> Iterator[tuple[Any, dict[str, list[str]]]]:
    """A figure of matplotlib, and the names of the marks of its groups. has_words: with title, note and
    source."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    rows, names = -(-len(chart.panels) // chart.columns), dict[str, list[str]]()
    high = 0.6 + 0.26 * len(chart.y.names) if chart.y.names else {1: 3.9, 2: 3.1}.get(chart.columns, 2.6)
    with rc_context({**SETTINGS, "svg.hashsalt": chart.key}), catch_warnings():
        simplefilter("ignore", UserWarning)  # a letter that the font lacks is drawn as a box
        figure = Figure(figsize=(INCHES, rows * high + 0.5 + has_words), layout="constrained")
        fields = list(figure.subplots(rows, chart.columns, squeeze=False, sharex=True, sharey=True).flat)
        for plot, panel in zip(fields, chart.panels, strict=False):
            plot.set_title(_fit(panel.title), loc="left", fontsize=10)
            plot.grid(color=light_colours()["--line"], linewidth=0.6)
            plot.set_axisbelow(True)
            plot.use_sticky_edges = False  # room beside bars
            plot.tick_params(labelbottom=True)
            for series in panel.series:
                _draw_series(plot, chart, series, names)
        for plot in fields[len(chart.panels) :]:
            plot.set_axis_off()
        for plot in fields[: len(chart.panels)]:
            _set_axis(plot, "x", chart.x, {1: 9, 2: 5}.get(chart.columns, 4))
            _set_axis(plot, "y", chart.y, 7)
        _add_legend(figure, chart, _fit(chart.title) if has_words else None)
        if has_words:
            words = "\n".join(map(_fit, [*wrap(chart.note, LINE), *([source] if source else [])]))
            figure.supxlabel(words, x=0.01, ha="left", fontsize=7.5, color=light_colours()["--dim"])
        yield figure, names


def _set_axis(plot: Any, side: str, axis: ChartAxis, most: int) -> None:
    from matplotlib import ticker

    ruler = getattr(plot, f"{side}axis")
    if side == "x" or plot.get_subplotspec().is_first_col():
        ruler.set_label_text(_fit(axis.label))
    if axis.names:
        ruler.set_ticks([-n for n in range(len(axis.names))], [_fit(shorten(n, 48)) for n in axis.names])
        plot.set_ylim(0.6 - len(axis.names), 0.6)
        return
    getattr(plot, f"set_{side}scale")(**({"value": "log", "base": axis.base} if axis.base else {"value": "linear"}))
    if axis.from_zero:
        plot.set_ylim(bottom=0)
    low, high = getattr(plot, f"get_{side}lim")()
    if axis.ticks:
        ruler.set_major_locator(ticker.FixedLocator(axis.ticks[:: -(-len(axis.ticks) // most)]))
    elif axis.base and high > low * axis.base**2:
        ruler.set_major_locator(ticker.LogLocator(axis.base, numticks=most))
    elif axis.base == 2 and high > low:  # of bytes: 48, 56, 64 GiB
        ruler.set_major_locator(ticker.MultipleLocator(2.0 ** ceil(log2((high - low) / (most - 1)))))
    elif axis.base and high > 8 * low:
        ruler.set_major_locator(ticker.LogLocator(10, subs=(1, 2, 5), numticks=most))
    else:
        ruler.set_major_locator(ticker.MaxNLocator(most - 1))
    ruler.set_major_formatter(ticker.FuncFormatter(lambda value, _: axis.text(value)))
    ruler.set_minor_locator(ticker.NullLocator())


STYLES: dict[str, dict[str, Any]] = {
    "steps": {"linewidth": 1.5, "drawstyle": "steps-post"},
    "faint": {"linewidth": 0.6, "alpha": 0.35},
    "dashed": {"linewidth": 1.5, "linestyle": (0, (5, 3))},
    "dotted": {"linewidth": 1.0, "linestyle": (0, (1.5, 2.5))},
}
SYMBOL: dict[str, Any] = {"linestyle": "", "markersize": 4.8, "markeredgewidth": 1.2}


def _draw_series(plot: Any, chart: Chart, series: ChartSeries, names: dict[str, list[str]]) -> None:
    """names: where those of the marks are added, by their group."""
    colour, shape = _look(series)
    marks = [(mark, _clamped(mark.x), _clamped(mark.y)) for mark in series.marks if _has_place(mark, chart)]
    if not marks:
        return
    if series.look == "bar":
        lows, highs = zip(*(map(_clamped, m.x_span or (x, x)) for m, x, _ in marks), strict=True)
        wide = [high - low for low, high in zip(lows, highs, strict=True)]
        plot.barh([y for _, _, y in marks], wide, 0.6, lows, color=colour, alpha=0.28)
        shape = "|"
    elif series.look != "points":
        xs, ys = [x for _, x, _ in marks], [y for _, _, y in marks]
        plot.plot(xs, ys, color=colour, **STYLES.get(series.look, {"linewidth": 1.5}))
    if series.look not in ("line", "steps", "points", "bar"):
        return
    for mark, x, y in marks if series.look != "bar" else ():
        if mark.x_span:
            plot.hlines(y, *map(_clamped, mark.x_span), color=colour, alpha=0.65, linewidth=0.9)
        if mark.y_span:
            plot.vlines(x, *map(_clamped, mark.y_span), color=colour, alpha=0.65, linewidth=0.9)
    for face in (colour, light_colours()["--paper"]):
        if own := [one for one in marks if one[0].is_hollow == (face != colour)]:
            group = f"marks-{len(names)}"
            names[group] = [mark.name for mark, _, _ in own]
            xs, ys = [x for _, x, _ in own], [y for _, _, y in own]
            plot.plot(xs, ys, gid=group, marker=shape, color=colour, markerfacecolor=face, **SYMBOL)


def _has_place(mark: Mark, chart: Chart) -> bool:
    """Whether the mark is a point on the axes: NaN is none, and 0 is none on a logarithmic axis."""
    axes = ((mark.x, chart.x), (mark.y, chart.y))
    return all(value > 0 or (not axis.base and value <= 0) for value, axis in axes)


def _clamped(value: float) -> float:
    """Within what matplotlib can draw, also of figures that overflowed."""
    return min(max(-MOST, value), MOST)


def _add_legend(figure: Any, chart: Chart, title: str | None) -> None:
    """The names of the series, below the title of the chart."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = []
    for series in chart.legend:
        colour, shape = _look(series)
        if series.look == "bar":
            handles.append(Patch(color=colour, alpha=0.28, label=_fit(series.name)))
            continue
        style = SYMBOL if series.look == "points" else STYLES.get(series.look, {})
        marker = shape if series.look in ("line", "steps", "points") else None
        handles.append(Line2D([], [], color=colour, marker=marker, label=_fit(series.name), **style))
    longest = max((len(series.name) for series in chart.legend), default=0)
    figure.legend(
        handles=handles,
        loc="outside upper left",
        ncols=max(1, int(INCHES / (0.075 * longest + 0.75))),
        frameon=False,
        borderpad=0.1,
        title=title,
        alignment="left",
        title_fontproperties={"size": 13, "weight": "bold"},
    )


def _look(series: ChartSeries) -> tuple[str, str]:
    """Its colour and the sign of its marks."""
    colour, shape = colour_and_shape(series.colour or 0)
    return light_colours()["--dim" if series.colour is None else f"--l{colour}"], MARKERS[shape]
