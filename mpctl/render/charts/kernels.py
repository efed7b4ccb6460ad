"""The roofline (Williams, Waterman and Patterson 2009): FLOP/s of kernels over FLOP per byte.

A kernel that needs b bytes and f operations takes at least max(b / bandwidth, f / peak) seconds, so
that no point lies above min(intensity x bandwidth, peak), unless its data stay in a cache. The
bandwidth is that of the fastest triad or copy of as many ranks; the peak is the one of the data
type that the findings name, else the fastest product's.
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
    Mark,
    Panel,
    log_axis,
    numbered,
    short,
)
from mpctl.units import plural, rate_text

NOTE = (
    "Dashed: the roof, with the measured memory bandwidth as its slope and the device's peak where "
    "it is level. Points above the slope find their data in a cache. Each figure is of one of "
    "so many ranks that run at once."
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
    colours = numbered(_name(row) for row in drawn)
    panels = tuple(
        _panel([row for row in drawn if _group(row) == group], rows, report, x, colours)
        for group in sorted({_group(row) for row in drawn})
    )
    highs = [mark.y for panel in panels for series in panel.series for mark in series.marks]
    y = log_axis(
        "FLOP/s", highs, lambda rate: short(rate_text(rate)).removesuffix("FLOP/s").strip()
    )
    yield Chart("roofline", "Roofline", NOTE, x, y, panels)


def _intensity(row: Row) -> float:
    flops, size = number_of(row, "flops") or 0.0, number_of(row, "bytes") or 0.0
    return flops / size if flops > 0 and size > 0 else 0.0


def _name(row: Row) -> str:
    return text_of(row, "kernel").replace("_", " ")


def _group(row: Row) -> tuple[int, str]:
    return int(number_of(row, "ranks") or 1), text_of(row, "dtype")


def _panel(
    own: Sequence[Row], rows: Sequence[Row], report: BenchReport, x: ChartAxis,
    colours: Mapping[str, int],
) -> Panel:  # fmt: skip
    """own: the rows of the panel, all of one group; rows: all of the report."""
    kernels: dict[str, list[Mark]] = {}
    for row in own:
        rate = float(row["flops_per_second"])
        mark = Mark(_intensity(row), rate, f"{row['name']}: {rate_text(rate)}",
                    is_hollow=row.get("is_rehearsal") is True)  # fmt: skip
        kernels.setdefault(_name(row), []).append(mark)
    series = [
        ChartSeries(name, tuple(marks), "points", colours[name]) for name, marks in kernels.items()
    ]
    ranks, dtype = _group(own[0])
    title = ", ".join(filter(None, (plural(ranks, "rank"), dtype)))
    bandwidth, peak = _bandwidth(rows, ranks), _peak(report, own)
    if bandwidth is None or peak is None:
        return Panel(title, tuple(series))
    title += f": {bandwidth / 1e9:.3g} GB/s, {short(rate_text(peak))}"
    return Panel(title, (_roof(bandwidth, peak, x), *series))


def _roof(bandwidth: float, peak: float, x: ChartAxis) -> ChartSeries:
    corners = [x.low, *([ridge] if x.low < (ridge := peak / bandwidth) < x.high else []), x.high]
    return ChartSeries(
        "roof", tuple(Mark(at, min(at * bandwidth, peak)) for at in corners), "dashed"
    )


def _bandwidth(rows: Sequence[Row], ranks: int) -> float | None:
    """Bytes per second of the fastest pass over memory, by so many ranks at once."""
    rates = [number_of(row, "bytes_per_second") or 0.0 for row in rows
             if text_of(row, "kernel") in STREAMS and _group(row)[0] == ranks]  # fmt: skip
    return max(rates, default=0.0) or None


def _peak(report: BenchReport, rows: Sequence[Row]) -> float | None:
    """FLOP/s of a device for the data type of the rows."""
    told = number_of(report, "findings", "peak_flops", text_of(rows[0], "dtype")) or 0.0
    if told > 0:
        return told
    rates = (number_of(row, "flops_per_second") or 0.0 for row in rows
             if text_of(row, "kernel") in PRODUCTS)  # fmt: skip
    return max(rates, default=0.0) or None
