"""The runs that `mpctl bench machine` held its presets against: planned beside measured.

A line for each layout that was trained: what the written preset plans with the band of the
cluster's own spread, exp(+-1.645 spread), and what a fit planned that did not see the layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import exp
from typing import Any

from mpctl.bench.documents import number_of, text_of
from mpctl.bench.report import BenchReport
from mpctl.estimate.band import QUANTILE
from mpctl.render.charts.chart import (
    Chart,
    ChartSeries,
    Mark,
    Panel,
    log_axis,
    rows_axis,
    short,
)
from mpctl.units import seconds_text

NOTE = (
    "Step times. Pale bars: the band of the written preset, in which 9 of 10 runs are expected, "
    "with a stroke at its plan. Diamonds: planned by a fit that did not see this layout."
)
MOST_ROWS, MOST_SPREAD = 40, 5.0
LEFT_OUT, MEASURED = "planned, layout left out", "measured"
Row = Mapping[str, Any]


def checks_charts(report: BenchReport) -> Iterator[Chart]:
    """The chart `checks`, where the findings have layouts that were trained."""
    found = dict(report).get("findings")
    checks = found.get("checks") if isinstance(found, dict) else None
    if not isinstance(checks, list):
        return
    rows = [row for row in checks if _above(row, "seconds") and _above(row, "fitted_seconds")]
    if rows:
        yield _chart(sorted(rows, key=lambda row: float(row["seconds"]))[:MOST_ROWS],
                     number_of(found, "spread") or 0.0)  # fmt: skip


def _above(row: object, key: str) -> bool:
    return (number_of(row, key) or 0.0) > 0


def _chart(rows: Sequence[Row], spread: float) -> Chart:
    factor = exp(QUANTILE * min(max(spread, 0.0), MOST_SPREAD))
    bands = tuple(
        Mark(at.x, at.y, at.name, (at.x / factor, at.x * factor))
        for at in _marks(rows, "fitted_seconds")
    )
    left_out = tuple(_marks(rows, "left_out_seconds"))
    series = [
        ChartSeries("planned, with its band", bands, "bar", 1),
        *([ChartSeries(LEFT_OUT, left_out, "points", 2)] if left_out else []),
        ChartSeries(MEASURED, tuple(_marks(rows, "seconds")), "points", 0),
    ]
    values = [v for one in series for mark in one.marks for v in (mark.x, *(mark.x_span or ()))]
    return Chart(
        "checks", "The presets against runs", NOTE,
        log_axis("", values, lambda seconds: short(seconds_text(seconds))),
        rows_axis([text_of(row, "layout") for row in rows]), (Panel("", tuple(series)),),
    )  # fmt: skip


def _marks(rows: Sequence[Row], key: str) -> Iterator[Mark]:
    """A mark for each row that has a figure under the key."""
    for at, row in enumerate(rows):
        if _above(row, key):
            seconds = float(row[key])
            yield Mark(seconds, -at, f"{text_of(row, 'layout')}: {seconds_text(seconds)}")
