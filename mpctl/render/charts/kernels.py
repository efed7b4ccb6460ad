"""The roofline (Williams, Waterman and Patterson 2009): FLOP/s of kernels over FLOP per byte.

A kernel that needs b bytes and f operations takes at least max(b / bandwidth, f / peak) seconds, so
that no point lies above min(intensity x bandwidth, peak), unless its data stay in a cache. The
bandwidth is that of the fastest triad or copy of the report; the peak is that of which products
state a share, else the fastest kernel's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from mpctl.bench.documents import number_of, text_of
from mpctl.bench.report import BenchReport
from mpctl.render.charts.chart import (
    Chart,
    ChartAxis,
    ChartSeries,
    Mark,
    Panel,
    log_axis,
    numbered,
    short,
)
from mpctl.units import plural, rate_text

NOTE = (
    "Dashed: the roof, with the measured memory bandwidth as its slope and the device's peak where "
    "it is level. Points above the slope find their data in a cache."
)
STREAMS, PRODUCTS = ("triad", "copy"), ("matmul",)
Row = Mapping[str, Any]


def roofline_charts(report: BenchReport) -> Iterator[Chart]:
    """The chart `roofline`, where rows have FLOP/s and FLOP per byte: a panel for each number of
    ranks at once and each data type."""
    rows = [row for row in report["results"] if text_of(row, "kernel")]
    drawn = [
        row for row in rows if _intensity(row) and (number_of(row, "flops_per_second") or 0) > 0
    ]
    if not drawn:
        return
    x = log_axis("FLOP per byte", [_intensity(row) for row in drawn], lambda n: f"{n:g}")
    colours = numbered(text_of(row, "kernel") for row in drawn)
    groups = sorted({_group(row) for row in drawn})
    panels = tuple(
        _panel(group, [row for row in rows if _group(row) == group], x, colours) for group in groups
    )
    highs = [mark.y for panel in panels for series in panel.series for mark in series.marks]
    y = log_axis(
        "FLOP/s", highs, lambda rate: short(rate_text(rate)).removesuffix("FLOP/s").strip()
    )
    yield Chart("roofline", "Roofline", NOTE, x, y, panels)


def _intensity(row: Row) -> float:
    flops, size = number_of(row, "flops") or 0.0, number_of(row, "bytes") or 0.0
    return flops / size if flops > 0 and size > 0 else 0.0


def _group(row: Row) -> tuple[int, str]:
    return int(number_of(row, "ranks") or 1), text_of(row, "dtype")


def _panel(
    group: tuple[int, str], rows: Sequence[Row], x: ChartAxis, colours: Mapping[str, int]
) -> Panel:
    kernels: dict[str, list[Mark]] = {}
    for row in rows:
        rate = number_of(row, "flops_per_second") or 0.0
        if _intensity(row) and rate > 0:
            mark = Mark(_intensity(row), rate, f"{row['name']}: {rate_text(rate)}")
            kernels.setdefault(text_of(row, "kernel"), []).append(mark)
    series = [
        ChartSeries(name, tuple(own), "points", colours[name]) for name, own in kernels.items()
    ]
    ranks, dtype = group
    title = ", ".join(filter(None, (plural(ranks, "rank") + " at once" * (ranks > 1), dtype)))
    bandwidth, peak = _bandwidth(rows), _peak(rows)
    if bandwidth is None or peak is None:
        return Panel(title, tuple(series))
    title += f": {bandwidth / 1e9:.3g} GB/s, {rate_text(peak)}"
    return Panel(title, (_roof(bandwidth, peak, x), *series))


def _roof(bandwidth: float, peak: float, x: ChartAxis) -> ChartSeries:
    corners = [x.low, *([ridge] if x.low < (ridge := peak / bandwidth) < x.high else []), x.high]
    return ChartSeries(
        "roof", tuple(Mark(at, min(at * bandwidth, peak)) for at in corners), "dashed"
    )


def _bandwidth(rows: Sequence[Row]) -> float | None:
    """Bytes per second of the fastest pass over memory."""
    rates = [number_of(row, "bytes_per_second") or 0.0 for row in rows
             if text_of(row, "kernel") in STREAMS]  # fmt: skip
    return max(rates, default=0.0) or None


def _peak(rows: Sequence[Row]) -> float | None:
    """FLOP/s of which products state their share; the fastest kernel's where none does."""
    products = [row for row in rows if text_of(row, "kernel") in PRODUCTS]
    shares = [(number_of(row, "flops_per_second") or 0.0, number_of(row, "share_of_peak") or 0.0)
              for row in products]  # fmt: skip
    peaks = [rate / share for rate, share in shares if rate > 0 and share > 0]
    return median(peaks) if peaks else max((rate for rate, _ in shares), default=0.0) or None
