"""A chart as data: panels that share two axes, with series of marks; how it is drawn is elsewhere.

SVG (charts/svg.py) and PNG (charts/png.py) draw the same axes, ticks and marks, so that a page and
a picture never differ. An axis maps a value to a share of its length, 0 at the low end.

On a logarithmic axis from 1 to 100 share(10) is 0.5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, floor, log, log10
from typing import Literal, TypeVar

Look = Literal["line", "points", "curve", "faint", "dashed", "dotted", "bar"]
MARKED: tuple[Look, ...] = ("line", "points")
Span = tuple[float, float]
Tick = TypeVar("Tick")
MOST_TICKS = 7
COLOURS = 7
LARGEST = 200.0  # as a power of ten, of what an axis shows


@dataclass(frozen=True, slots=True)
class ChartAxis:
    """From low to high; ticks: values with their texts."""

    label: str
    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    is_log: bool = False

    def share(self, value: float) -> float:
        """The position of a value: 0 at the low end, 1 at the high end, clipped to them."""
        low, high, at = self.low, self.high, min(max(self.low, value), self.high)
        if self.is_log:
            low, high, at = log10(low), log10(high), log10(at)
        return (at - low) / (high - low)


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
    """Marks of one name in the legend, or without a name of none. look: `line` joins them, `points`
    does not, `curve` is a line without symbols and `faint` a pale one, `dashed` and `dotted` are
    lines to compare with, `bar` is a pale bar of x_span with a stroke at x. colour: a number that
    stands for a colour and a shape (colour_and_shape); None for dim ink."""

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
    def x_ticks(self) -> Sequence[tuple[float, str]]:
        """The ticks of the horizontal axis that have room below one panel."""
        return _thinned(self.x.ticks, {1: MOST_TICKS, 2: 5}.get(self.columns, 4))

    @property
    def legend(self) -> list[ChartSeries]:
        """The first series of each name, in order of appearance."""
        found: dict[str, ChartSeries] = {}
        for panel in self.panels:
            for series in panel.series:
                if series.name:
                    found.setdefault(series.name, series)
        return list(found.values())


def log_axis(label: str, values: Iterable[float], text: Callable[[float], str], *, base: int = 10) -> ChartAxis:
    """A logarithmic axis over positive values with some room at both ends."""
    logs = [log10(min(max(10**-LARGEST, value), 10**LARGEST)) for value in values]
    room = 0.05 * (max(logs) - min(logs)) + 0.06
    low, high = 10 ** (min(logs) - room), 10 ** (max(logs) + room)
    ticks = _powers(low, high, base)
    if len(ticks) < 3:
        ticks = [tick for tick in _multiples(low, high) if low <= tick <= high]
    if len(ticks) < 3:
        ticks = round_ticks(low, high, 5)
    return ChartAxis(label, low, high, tuple((t, text(t)) for t in _thinned(ticks)), is_log=True)


def linear_axis(label: str, values: Sequence[float], text: Callable[[float], str]) -> ChartAxis:
    """An axis from 0 to somewhat above the largest value."""
    high = min(max(*values, 1e-12), 10**LARGEST) * 1.08
    ticks = round_ticks(0.0, high, MOST_TICKS)
    return ChartAxis(label, 0.0, high, tuple((t, text(t)) for t in ticks))


def span_axis(label: str, values: Iterable[float]) -> ChartAxis:
    """A linear axis over the values with some room at both ends."""
    found = list(values)
    low, high = min(found), max(found)
    room = 0.04 * (high - low) or 0.04 * abs(high) or 1.0
    ticks = round_ticks(low - room, high + room, MOST_TICKS)
    return ChartAxis(label, low - room, high + room, tuple((t, f"{t:g}") for t in ticks))


def counts_axis(label: str, values: Iterable[float]) -> ChartAxis:
    """A logarithmic axis whose ticks are the values themselves, such as numbers of ranks."""
    found = sorted(set(values))
    low, high = found[0] / 1.25, found[-1] * 1.25
    return ChartAxis(label, low, high, tuple((v, f"{v:g}") for v in _thinned(found)), is_log=True)


def rows_axis(names: Sequence[str]) -> ChartAxis:
    """An axis of names from top to bottom; the row of names[n] is at -n."""
    ticks = tuple((-float(n), name) for n, name in enumerate(names))
    return ChartAxis("", -len(names) + 0.4, 0.6, ticks)


def _powers(low: float, high: float, base: int) -> list[float]:
    first, last = ceil(log(low, base) - 1e-9), floor(log(high, base) + 1e-9)
    return [float(base) ** n for n in range(first, last + 1)]


def _multiples(low: float, high: float) -> Iterator[float]:
    """1, 2 and 5 times each power of ten."""
    for n in range(floor(log10(low)), ceil(log10(high)) + 1):
        yield from (times * 10.0**n for times in (1, 2, 5))


def round_ticks(low: float, high: float, most: int) -> list[float]:
    """Multiples of a round step from low to high, both of which they do not exceed: about `most`.

    >>> round_ticks(0.3, 2.4, 5)
    [0.5, 1.0, 1.5, 2.0]
    """
    if not high > low:
        return [low]
    step = next(step for step in _steps(high - low) if (high - low) / step <= most)
    return [n * step for n in range(ceil(low / step - 1e-9), floor(high / step + 1e-9) + 1)]


def _thinned(ticks: Sequence[Tick], most: int = MOST_TICKS) -> Sequence[Tick]:
    return ticks[:: ceil(len(ticks) / most)] if ticks else ticks


def _steps(high: float) -> Iterator[float]:
    first = floor(log10(high)) - 2
    for n in range(first, first + 5):
        yield from (m * 10.0**n for m in (1, 2, 2.5, 5))


def short(text: str) -> str:
    """A figure for a tick: `10.0 ms` -> `10 ms`."""
    return text.replace(".00 ", " ").replace(".0 ", " ")


def numbered(names: Iterable[str]) -> dict[str, int]:
    """A look for each name, in order of appearance."""
    return {name: at for at, name in enumerate(dict.fromkeys(names))}


def colour_and_shape(number: int) -> tuple[int, int]:
    """Both below COLOURS, and no two alike for as many as COLOURS squared series."""
    return number % COLOURS, (number + number // COLOURS) % COLOURS
