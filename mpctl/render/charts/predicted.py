"""What was planned beside what was measured: one against the other, and row by row.

`predicted` has a point for each row at (measured, predicted) around the line where both are the
same. `layouts` has a line for each row: the plan's band as a pale bar with a stroke at the
prediction, and the measured median with its shortest and longest round.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mpctl.bench.documents import number_of, text_of
from mpctl.bench.report import BenchReport
from mpctl.render.charts.chart import (
    Chart,
    ChartAxis,
    ChartSeries,
    Look,
    Mark,
    Panel,
    Span,
    log_axis,
    numbered,
    rows_axis,
    short,
)
from mpctl.units import seconds_text

NOTE = (
    "On the line the plan says what was measured; the dotted lines are 10 % off it. Bars across go "
    "from the shortest round to the longest"
)
BAND_NOTE = ", upright ones over the plan's band, in which 9 of 10 runs are expected"
LAYOUTS_NOTE = (
    "Pale bars: the plan's band, in which 9 of 10 runs are expected, with a stroke at the "
    "prediction. Points: the median measured, from the shortest round to the longest."
)
TIMES_NOTE = "Points: the median measured, from the shortest round to the longest."
MOST_ROWS, MOST_POINTS = 40, 2000
Row = Mapping[str, Any]


def predicted_charts(report: BenchReport) -> Iterator[Chart]:
    """The chart `predicted`, where two rows or more have a prediction, and `layouts`, where rows
    have a band."""
    rows = [row for row in report["results"] if _predicted(row)]
    if len(rows) > 1:
        yield _scatter(rows[:MOST_POINTS])
    banded = [row for row in rows if _band(row)]
    if banded:
        yield _by_row("layouts", "Step time of each layout", LAYOUTS_NOTE, banded)


def times_charts(report: BenchReport) -> Iterator[Chart]:
    """The chart `times`: the seconds of each row, and its prediction where it has one."""
    if report["results"]:
        yield _by_row("times", "Measured times", TIMES_NOTE, report["results"])


def _predicted(row: Row) -> float:
    return max(number_of(row, "predicted_seconds") or 0.0, 0.0)


def _band(row: Row) -> Span | None:
    low, high = number_of(row, "low_seconds"), number_of(row, "high_seconds")
    return (low, high) if low is not None and high is not None and 0 < low <= high else None


def _scatter(rows: Sequence[Row]) -> Chart:
    groups: dict[str, list[Mark]] = {}
    for row in rows:
        groups.setdefault(_group(row), []).append(_point(row))
    colours = numbered(groups)
    series = [
        ChartSeries(name, tuple(own), "points", colours[name]) for name, own in groups.items()
    ]
    marks = [mark for own in groups.values() for mark in own]
    values = [v for m in marks for v in (m.x, m.y, *(m.x_span or ()), *(m.y_span or ()))]
    x, y = (log_axis(label, values, lambda s: short(seconds_text(s)))
            for label in ("measured", "predicted"))  # fmt: skip
    lines = [_line("predicted = measured", 1.0, "dashed", x),
             *(_line("10 % off", ratio, "dotted", x) for ratio in (0.9, 1.1))]  # fmt: skip
    note = NOTE + BAND_NOTE * any(mark.y_span for mark in marks) + "."
    return Chart("predicted", "Predicted against measured", note, x, y,
                 (Panel("", (*lines, *series)),))  # fmt: skip


def _line(name: str, ratio: float, look: Look, axis: ChartAxis) -> ChartSeries:
    """Predicted = ratio x measured, within a square of the axis."""
    ends = max(axis.low, axis.low / ratio), min(axis.high, axis.high / ratio)
    return ChartSeries(name, tuple(Mark(at, ratio * at) for at in ends), look)


def _group(row: Row) -> str:
    if kernel := text_of(row, "kernel"):
        return kernel.replace("_", " ")
    if kind := text_of(row, "kind"):
        return kind.replace("_", "-")
    return "more ranks than cores" if row.get("is_rehearsal") is True else "within the cores"


def _point(row: Row) -> Mark:
    measured, predicted = row["seconds"], _predicted(row)
    words = f"measured {seconds_text(measured)}, predicted {seconds_text(predicted)}"
    return Mark(measured, predicted, f"{row['name']}: {words}", _rounds(row), _band(row),
                row.get("is_rehearsal") is True)  # fmt: skip


def _rounds(row: Row) -> Span:
    return row["seconds_min"], row["seconds_max"]


def _by_row(key: str, title: str, note: str, rows: Sequence[Row]) -> Chart:
    """A line for each row, the fastest first; of many rows the first MOST_ROWS."""
    shown = sorted(rows, key=lambda row: row["seconds"])[:MOST_ROWS]
    measured = tuple(
        Mark(row["seconds"], -at, f"{row['name']}: {seconds_text(row['seconds'])}", _rounds(row),
             is_hollow=row.get("is_rehearsal") is True)
        for at, row in enumerate(shown)
    )  # fmt: skip
    planned = tuple(
        Mark(_predicted(row), -at, f"{row['name']}: predicted {seconds_text(_predicted(row))}",
             _band(row))
        for at, row in enumerate(shown) if _predicted(row)
    )  # fmt: skip
    values = [v for mark in (*measured, *planned) for v in (mark.x, *(mark.x_span or ()))]
    series = [ChartSeries("predicted, with its band", planned, "bar", 1)] if planned else []
    return Chart(
        key, title, note, log_axis("", values, lambda s: short(seconds_text(s))),
        rows_axis([row["name"] for row in shown]),
        (Panel("", (*series, ChartSeries("measured", measured, "points", 0))),),
    )  # fmt: skip
