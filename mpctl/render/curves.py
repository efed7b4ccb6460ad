"""Curves of runs: words and units of their axes, legends, plots in a terminal, pictures.

Plots are drawn with plotext, as wide as the terminal, in ASCII if that is its encoding.

>>> axis_of("tokens", [0, 327_680])
PlotAxis(name='tokens', unit='thousands', size=1000.0)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import ceil, floor, log10
from pathlib import Path
from typing import Any, NamedTuple

from rich.text import Text

from mpctl.core.errors import InputError
from mpctl.core.units import MFU_CONVENTION
from mpctl.render.charts import Chart, ChartAxis, ChartSeries, Look, Mark, Panel, write_chart
from mpctl.render.console import get_console, visible
from mpctl.run.history.show import Series

LABELS = {
    "step": "step",
    "tokens": "tokens",
    "time": "time of training",
    "loss": "loss",
    "validation_loss": "validation loss",
    "learning_rate": "learning rate",
    "grad_norm": "gradient norm",
    "tokens_per_second": "tokens/s",
    "step_seconds": "step time",
    "communication_seconds": "time in collectives, rank 0",
    "cpu_seconds": "CPU time of a step, rank 0",
    "memory_bytes": "peak memory of the fullest rank",
    "loss_scale": "loss scale",
    "mfu": f"MFU, {MFU_CONVENTION}",
    "hfu": "HFU",
    "aux_loss": "auxiliary loss of experts",
    "expert_load": "load of the fullest expert",
    "rank_load": "load of the fullest rank of ep",
    "near_ties": "near ties of routing",
    "reserved_memory_bytes": "memory reserved by the allocator, rank 0",
}
# The least value at which a unit is used, its name, and its size.
SECONDS = ((7200.0, "h", 3600.0), (120.0, "min", 60.0), (1.0, "s", 1.0), (0.0, "ms", 1e-3))
BYTES = ((2.0**40, "TiB", 2.0**40), (2.0**30, "GiB", 2.0**30), (0.0, "MiB", 2.0**20))
COUNTS = (
    (1e12, "trillions", 1e12),
    (1e9, "billions", 1e9),
    (1e6, "millions", 1e6),
    (1e4, "thousands", 1e3),
    (0.0, "", 1.0),
)
SHORT = 400  # points, beyond which the noise of single steps would hide a curve


class PlotAxis(NamedTuple):
    """An axis: what it shows, its unit in words (empty for plain numbers) and the unit's size."""

    name: str
    unit: str = ""
    size: float = 1.0

    @property
    def label(self) -> str:
        """The name and, in parentheses, the unit."""
        return f"{self.name} ({self.unit})" if self.unit else self.name

    def scaled(self, values: Iterable[float]) -> list[float]:
        """The values in the axis's unit."""
        return [value / self.size for value in values]


def axis_of(metric: str, values: Iterable[float]) -> PlotAxis:
    """The axis of a metric, in the unit that suits the largest of the values."""
    most = max(map(abs, values), default=0.0)
    unit, size = next((unit, size) for bound, unit, size in _units(metric) if most >= bound)
    return PlotAxis(words(metric), unit, size)


def _units(metric: str) -> tuple[tuple[float, str, float], ...]:
    metric = metric.partition("/")[0]
    if metric == "time" or metric.endswith("_seconds"):
        return SECONDS
    if metric.endswith("_bytes"):
        return BYTES
    return COUNTS if metric in ("tokens", "tokens_per_second") else ((0.0, "", 1.0),)


def words(metric: str) -> str:
    """A metric in words: `validation_loss/old` -> `validation loss of old`. A metric without such
    words keeps its name.
    """
    base, slash, corpus = metric.partition("/")
    name = LABELS.get(base, base)
    return visible(f"{name} of {corpus}" if slash else name)


def y_axis(series: Sequence[Series]) -> PlotAxis:
    """The axis of several curves: the names of all metrics, and their unit where they share one."""
    metrics = list(dict.fromkeys(s.metric for s in series))
    names = list(dict.fromkeys(words(metric.partition("/")[0]) for metric in metrics))
    name = words(metrics[0]) if len(metrics) == 1 else ", ".join(names)
    if len({_units(metric) for metric in metrics}) > 1:
        return PlotAxis(name)
    axis = axis_of(metrics[0], (value for s in series for value in s.y))
    return PlotAxis(name, axis.unit, axis.size)


def legend(series: Sequence[Series]) -> list[str]:
    """A name for each curve: the run, the metric, or both, as needed to distinguish the curves."""
    runs, metrics = {s.run for s in series}, {s.metric for s in series}
    if len(metrics) == 1:
        return [visible(s.run) for s in series]
    names = (words(s.metric) if len(runs) == 1 else f"{s.run}: {words(s.metric)}" for s in series)
    return [visible(name) for name in names]


def whose(series: Sequence[Series]) -> str:
    """The runs of the curves: `demo`, or `3 runs`."""
    runs = list(dict.fromkeys(s.run for s in series))
    return visible(runs[0]) if len(runs) == 1 else f"{len(runs)} runs"


def window(points: int) -> int:
    """The number of points to average: 1, or for long curves a hundredth of them."""
    return 1 if points <= SHORT else points // 100


def mean(values: Sequence[float], count: int) -> list[float]:
    """Running mean of `count` neighbours, fewer at the ends.

    >>> mean([1, 2, 6], 3)
    [1.5, 3.0, 4.0]
    """
    sums, before, after = [0.0, *accumulate(values)], count // 2, (count + 1) // 2
    spans = ((max(0, i - before), min(len(values), i + after)) for i in range(len(values)))
    return [(sums[stop] - sums[start]) / (stop - start) for start, stop in spans]


COLOURS = ("blue+", "orange+", "green+", "magenta+", "cyan+", "red+")
RICH = ("bright_blue", "bright_yellow", "bright_green", "bright_magenta", "bright_cyan", "bright_red")
SIGNS = "*o+x#@%&"
LINES = str.maketrans("┌┐└┘┬┴├┤┼─│", "+++++++++-|")
POINTS = 1000  # of a curve at most: more than a terminal is wide
FEW = 40  # points, up to which a picture marks each
SUFFIXES = (".png", ".svg")
HEIGHT, LEAST = 22, (30, 8)


def print_plot(series: Sequence[Series], x: str) -> None:
    """Print curves on stdout, as wide as the terminal."""
    console = get_console()
    shown = console.is_terminal
    width = max(LEAST[0], console.width)
    height = max(LEAST[1], min(HEIGHT, console.height - 4) if shown else HEIGHT)
    coloured = console.color_system is not None and not console.no_color
    text = plot_text(series, x, width=width, height=height, coloured=coloured, ascii_only=console.options.ascii_only)
    console.width = width
    console.print(text, no_wrap=True, overflow="crop")


def plot_text(series: Sequence[Series], x: str, *, width: int, height: int, coloured: bool, ascii_only: bool) -> Text:
    """The curves in letters, and below them a line for each with its name. Curves differ by colour
    or, without colours, by their signs. width, height: in characters."""
    chart = curves_chart(series, x)
    curves = [curve for curve in chart.panels[0].series if curve.look != "faint"]
    fine = not ascii_only and (coloured or len(curves) == 1)
    signs = ["braille" if fine else SIGNS[n % len(SIGNS)] for n in range(len(curves))]
    drawn = _draw(curves, signs, chart.x.label, (width, height)).string(colorless=not coloured)
    drawn = drawn.translate(LINES) if ascii_only else drawn
    title = (f"{chart.y.label} of {whose(series)}", "bold")
    parts: list[Any] = [title, "\n", Text.from_ansi(drawn.rstrip("\n"))]
    for number, curve in enumerate(curves):
        mark = "-" if ascii_only and fine else "──" if fine else signs[number] * 2
        style = RICH[number % len(RICH)] if coloured else ""
        parts += ["\n  ", (mark, style), f" {curve.name}"]
    if text := difference_text(series):
        parts.append(f"\n{text}")
    return Text.assemble(*parts)


ALIKE = 0.01  # of the range of the values: a difference that no plot shows


def difference_text(series: Sequence[Series]) -> str:
    """`3 curves, largest difference 1.2e-07`, for curves of one metric that a plot shows as one; else empty. They are
    compared where all have a value."""
    if len(series) < 2 or len({one.metric for one in series}) > 1:
        return ""
    points = [dict(zip(one.x, one.y, strict=True)) for one in series]
    shared = set(points[0]).intersection(*points[1:])
    spreads = [max(values) - min(values) for x in shared if (values := [one[x] for one in points])]
    every = [value for one in series for value in one.y]
    if not spreads or max(spreads) > ALIKE * (max(every) - min(every)):
        return ""
    return f"{len(series)} curves, largest difference {max(spreads):.2g}"


def _draw(curves: Sequence[ChartSeries], signs: Sequence[str], across: str, size: tuple[int, int]) -> Any:
    """A plotext matrix."""
    import plotext as untyped

    plotext: Any = untyped
    plotext.terminal.limit(False, False)  # this module chooses the size
    figure: Any = type(plotext.figure)(plotext.terminal)
    figure.plot_size(*size).theme("colorless").legend(False).label(across, axis="x")
    marks = [mark for curve in curves for mark in curve.marks]
    for number, (curve, sign) in enumerate(zip(curves, signs, strict=True)):
        colour = plotext.pixel(foreground=COLOURS[number % len(COLOURS)])
        xs, ys = [mark.x for mark in curve.marks], [mark.y for mark in curve.marks]
        line = figure.signal(xs, ys, marker=plotext.marker(sign, colour))
        figure.draw(line.lines(True))
    _set_ticks(figure, "x", [mark.x for mark in marks], size[0] // 12)
    _set_ticks(figure, "y", [mark.y for mark in marks], size[1] // 3)
    return figure.build()


def _set_ticks(figure: Any, axis: str, values: list[float], count: int) -> None:
    """Round numbers instead of plotext's ticks."""
    positions = round_ticks(min(values), max(values), max(1, count))
    side = "lower" if axis == "x" else "left"
    figure.ruler(axis, side).ticks(positions, labels=[f"{position:g}" for position in positions])


def round_ticks(low: float, high: float, most: int) -> list[float]:
    """Multiples of a round step from low to high, both of which they do not exceed: about `most`.

    >>> round_ticks(0.3, 2.4, 5)
    [0.5, 1.0, 1.5, 2.0]
    """
    if not high > low:
        return [low]
    first = floor(log10(high - low)) - 2
    steps = (times * 10.0**n for n in range(first, first + 5) for times in (1, 2, 2.5, 5))
    step = next(step for step in steps if (high - low) / step <= most)
    return [n * step for n in range(ceil(low / step - 1e-9), floor(high / step + 1e-9) + 1)]


def check_picture(path: Path) -> None:
    """Raises InputError unless a picture can be written there."""
    if path.suffix.lower() not in SUFFIXES:
        message, hint = f"{path} is neither PNG nor SVG", f"end its name in {' or '.join(SUFFIXES)}"
        raise InputError.of("bad-suffix", "--out", message, hint)


def write_picture(path: Path, series: Sequence[Series], x: str) -> None:
    """Write the curves as PNG or SVG, by the suffix of path. x: the metric of the horizontal axis.
    Raises InputError where the file cannot be written."""
    write_chart(path, curves_chart(series, x))


def curves_chart(series: Sequence[Series], x: str) -> Chart:
    """The curves as a chart; of a long one the running mean over a pale curve of its points."""
    across, up = axis_of(x, (v for s in series for v in s.x)), y_axis(series)
    drawn: list[ChartSeries] = []
    for colour, (one, name) in enumerate(zip(series, legend(series), strict=True)):
        xs, ys, count = across.scaled(one.x), up.scaled(one.y), window(len(one.x))
        if count > 1:
            drawn.append(ChartSeries("", _marks(xs, ys), "faint", colour))
        look: Look = "line" if len(xs) <= FEW else "curve"
        drawn.append(ChartSeries(name, _marks(xs, mean(ys, count)), look, colour))
    averaged = max(window(len(s.x)) for s in series)
    return Chart(
        series[0].metric.partition("/")[0],
        f"{up.name} of {whose(series)}",
        f"Bold: mean of {averaged} points." if averaged > 1 else "",
        ChartAxis(across.label),
        ChartAxis(up.label),
        (Panel("", tuple(drawn)),),
    )


def _marks(xs: Sequence[float], ys: Sequence[float]) -> tuple[Mark, ...]:
    every = max(1, len(xs) // POINTS)
    points = zip(xs[::every], ys[::every], strict=True)
    return tuple(Mark(x, y, f"{x:g}: {y:.6g}") for x, y in points)
