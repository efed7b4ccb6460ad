"""The charts of a bench's report.

- `efficiency`: a panel for each mode of scaling, a line for each kind of layout. Layouts are of one
  kind where the same axes are larger than 1: tp2 and tp4 lie on the line `tp`, which begins at the
  smallest world and goes through the best layout of each.
- `busbw`: bus bandwidth over the size of messages, a panel for each collective.
- `roofline` (Williams, Waterman and Patterson 2009): FLOP/s of kernels over FLOP per byte. A kernel
  that needs b bytes and f operations takes at least max(b / bandwidth, f / peak) seconds, so that
  no point is above min(intensity x bandwidth, peak), unless its data stay in a cache.
- `checks`: the layouts that a machine's presets were held against.
- `predicted`, `layouts`: planned against measured, as points and row by row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import exp
from typing import Any, cast

from mpctl.core.units import bytes_text, plural, rate_text, seconds_text
from mpctl.measure.bench.collectives import CollectiveFit, CollectiveRow
from mpctl.measure.bench.kernels import KernelRow
from mpctl.measure.bench.machine import MachineCheck
from mpctl.measure.bench.report import BenchReport, BenchRow
from mpctl.measure.bench.scaling import ScalingRow
from mpctl.plan.estimate.step import QUANTILE
from mpctl.render.charts import Chart, ChartAxis, ChartSeries, Look, Mark, Panel, Span, numbered

MOST_ROWS, MOST_POINTS = 40, 2000
Row = Mapping[str, Any]  # of any bench


def charts_of(report: BenchReport) -> list[Chart]:
    """The charts of a report, that of its bench first; the times of its rows where none other can
    be drawn. Rows of no time at all are left out: they have no place on a logarithmic axis."""
    rows: list[Any] = [row for row in report["results"] if row["seconds_min"] > 0]
    charts = [*_own_charts(report, rows), *predicted_charts(rows)]
    if charts or not rows:
        return charts
    return [_by_row("times", "Measured times", TIMES_NOTE, rows)]


def _points(groups: Mapping[str, Sequence[Mark]], colours: Mapping[str, int]) -> list[ChartSeries]:
    return [ChartSeries(name, tuple(own), "points", colours[name]) for name, own in groups.items()]


def _own_charts(report: BenchReport, rows: list[Any]) -> Iterator[Chart]:
    findings = cast(Mapping[str, Any], report["findings"])
    if report["bench"] == "scaling":
        yield from efficiency_charts(rows)
    if report["bench"] == "machine" and findings["checks"]:
        yield checks_chart(findings["checks"], findings["spread"] or 0.0)
    if sent := [row for row in rows if "busbw" in row]:
        yield busbw_chart(sent, findings.get("fits", ()))
    yield from roofline_charts(
        [row for row in rows if "kernel" in row],
        findings.get("peak_flops") or findings.get("device", {}).get("peak_flops", {}),
    )


# ---------------------------------------------------------------- scaling

EFFICIENCY_NOTE = (
    "Efficiency: throughput of a rank against that of a rank of the smallest world; bars go from "
    "the slowest to the fastest round. Dashed: what a perfect machine of this many cores or GPUs "
    "could reach. Hollow: a rehearsal, more ranks than cores."
)


def efficiency_charts(rows: Sequence[ScalingRow]) -> Iterator[Chart]:
    """The chart, where there is more than one world size."""
    worlds = {row["world_size"] for row in rows}
    if len(worlds) < 2:
        return
    colours = numbered(_axes(row) for row in rows if row["world_size"] > min(worlds))
    panels = tuple(
        _scaling_panel(mode, [row for row in rows if row["mode"] == mode], colours)
        for mode in dict.fromkeys(row["mode"] for row in rows)
    )
    y = ChartAxis("efficiency", "{:.0%}".format, from_zero=True)
    x = ChartAxis("ranks", base=2, ticks=tuple(sorted(worlds)))
    yield Chart("efficiency", "Scaling efficiency", EFFICIENCY_NOTE, x, y, panels)


def _axes(row: ScalingRow) -> str:
    """`tp dp`: the axes that are larger than 1."""
    return " ".join(axis for axis, size in row["sizes"].items() if size > 1) or "1 rank"


def _scaling_panel(mode: str, rows: Sequence[ScalingRow], colours: Mapping[str, int]) -> Panel:
    smallest = min(row["world_size"] for row in rows)
    base = [row for row in rows if row["world_size"] == smallest]
    kinds: dict[str, list[ScalingRow]] = {}
    for row in rows:
        if row["world_size"] > smallest:
            kinds.setdefault(_axes(row), []).append(row)
    reach: dict[int, float] = {}
    for row in sorted(rows, key=lambda row: row["world_size"]):
        reach[row["world_size"]] = max(row["perfect_efficiency"], reach.get(row["world_size"], 0.0))
    perfect = tuple(Mark(world, share) for world, share in reach.items())
    series = [ChartSeries("perfect machine", perfect, "dashed")]
    for kind, own in kinds.items():
        series += _scaling_lines(kind, [*base, *own], colours[kind])
    return Panel(f"{mode} scaling", tuple(series))


def _scaling_lines(kind: str, rows: Sequence[ScalingRow], colour: int) -> Iterator[ChartSeries]:
    best = {row["world_size"]: row for row in sorted(rows, key=lambda row: row["efficiency"])}
    joined = [best[world] for world in sorted(best)]
    yield ChartSeries(kind, tuple(map(_efficiency_mark, joined)), "line", colour)
    if others := [row for row in rows if row not in joined]:
        yield ChartSeries(kind, tuple(map(_efficiency_mark, others)), "points", colour)


def _efficiency_mark(row: ScalingRow) -> Mark:
    """Efficiency is as 1 / seconds, so that the longest round has the least."""
    return Mark(
        row["world_size"],
        row["efficiency"],
        f"{row['name']}: {row['efficiency']:.0%}",
        y_span=_inverse_span(row["efficiency"], row),
        is_hollow=row["is_rehearsal"],
    )


def _inverse_span(value: float, row: BenchRow) -> Span:
    """Span from the slowest to the fastest round, for a value proportional to 1 / seconds."""
    work = value * row["seconds"]
    return work / row["seconds_max"], work / row["seconds_min"]


# ---------------------------------------------------------------- collectives

BUSBW_NOTE = (
    "Bus bandwidth as nccl-tests defines it: comparable with the bandwidth of a link, however many "
    "ranks there are. Bars go from the slowest to the fastest round"
)
FIT_NOTE = "; dotted: the fitted latency + bus bytes / bandwidth"
CURVE = 32  # steps of a fitted line


def busbw_chart(rows: Sequence[CollectiveRow], fits: Sequence[CollectiveFit]) -> Chart:
    """A line for each way to send, axis, number of ranks and data type."""
    names = _way_names(rows)
    colours = numbered(names[_way(row)] for row in rows)
    fitted = {(fit["kind"], *_way(fit)): fit for fit in fits}
    panels = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        series: list[ChartSeries] = []
        for way, name in names.items():
            own = sorted(
                (row for row in rows if row["kind"] == kind and _way(row) == way), key=lambda row: row["bytes"]
            )
            if not own:
                continue
            series.append(ChartSeries(name, tuple(map(_busbw_mark, own)), "line", colours[name]))
            if (fit := fitted.get((kind, *way))) and fit["bandwidth"]:
                curve = _fitted_curve(fit["latency"], fit["bandwidth"], own)
                series.append(ChartSeries(name, curve, "dotted", colours[name]))
        panels.append(Panel(kind.replace("_", "-"), tuple(series)))
    return Chart(
        "busbw",
        "Bus bandwidth of collectives",
        BUSBW_NOTE + FIT_NOTE * bool(fits) + ".",
        ChartAxis("bytes", lambda n: short(bytes_text(n)), base=4),
        ChartAxis("bus bandwidth, GB/s", lambda rate: f"{rate / 1e9:g}", base=10),
        tuple(panels),
    )


def _way(entry: CollectiveRow | CollectiveFit) -> tuple[str, str, int, str]:
    return entry["transport"], entry["axis"], entry["ranks"], entry["dtype"]


def _way_names(rows: Sequence[CollectiveRow]) -> dict[tuple[str, str, int, str], str]:
    """A name for each way to send, by what differs among rows: `shared tp, 2 ranks`."""
    ways = list(dict.fromkeys(map(_way, rows)))
    differ = [len({way[at] for way in ways}) > 1 for at in range(4)]

    def name(way: tuple[str, str, int, str]) -> str:
        words = " ".join(str(way[at]) for at in (0, 1, 3) if differ[at])
        ranks = plural(way[2], "rank") if differ[2] or not words else ""
        return ", ".join(filter(None, (words, ranks)))

    return {way: name(way) for way in ways}


def _busbw_mark(row: CollectiveRow) -> Mark:
    rate = row["busbw"]
    return Mark(
        row["bytes"],
        rate,
        f"{row['name']}: {rate / 1e9:.3g} GB/s",
        y_span=_inverse_span(rate, row),
        is_hollow=row["is_rehearsal"],
    )


def _fitted_curve(latency: float, bandwidth: float, rows: Sequence[CollectiveRow]) -> tuple[Mark, ...]:
    """Bus bytes over latency + bus bytes / bandwidth, from the smallest size to the largest."""
    first, last, factor = rows[0]["bytes"], rows[-1]["bytes"], rows[0]["busbw"] / rows[0]["algbw"]
    sizes = [first * (last / first) ** (at / CURVE) for at in range(CURVE + 1)]
    return tuple(Mark(n, factor * n / (latency + factor * n / bandwidth)) for n in sizes)


# ---------------------------------------------------------------- kernels

ROOF_NOTE = (
    "Dashed: the roof, with the measured memory bandwidth as its slope and the device's peak where "
    "it is level. Points above the slope find their data in a cache. Each figure is of one of "
    "so many ranks that run at once."
)
STREAMS = ("triad", "copy")


def roofline_charts(rows: Sequence[KernelRow], peaks: Mapping[str, float]) -> Iterator[Chart]:
    """The chart, where rows have FLOP: a panel for each number of ranks at once and each data type.
    peaks: FLOP/s of the device by data type."""
    drawn = [row for row in rows if row["flops"] > 0 and row["bytes"] > 0]
    if not drawn:
        return
    reach = _reach([row["flops"] / row["bytes"] for row in drawn])
    colours = numbered(_kernel(row) for row in drawn)
    panels = []
    for ranks, dtype in sorted({(row["ranks"], row["dtype"]) for row in drawn}):
        own = [row for row in drawn if (row["ranks"], row["dtype"]) == (ranks, dtype)]
        kernels: dict[str, list[Mark]] = {}
        for row in own:
            reached, at = row["flops_per_second"], row["flops"] / row["bytes"]
            title = f"{row['name']}: {rate_text(reached)}"
            mark = Mark(at, reached, title, is_hollow=row["is_rehearsal"])
            kernels.setdefault(_kernel(row), []).append(mark)
        points = _points(kernels, colours)
        title, roof = _roof(rows, own, peaks.get(dtype), reach)
        panels.append(Panel(f"{plural(ranks, 'rank')}, {dtype}{title}", (*roof, *points)))

    def rate(value: float) -> str:
        return short(rate_text(value)).removesuffix("FLOP/s").strip()

    x, y = ChartAxis("FLOP per byte", base=10), ChartAxis("FLOP/s", rate, base=10)
    yield Chart("roofline", "Roofline", ROOF_NOTE, x, y, tuple(panels))


def _reach(values: Sequence[float]) -> Span:
    """Span from somewhat below the least value to somewhat above the largest."""
    return min(values) / 1.2, max(values) * 1.2


def _kernel(row: KernelRow) -> str:
    return row["kernel"].replace("_", " ")


def _roof(
    rows: Sequence[KernelRow], own: Sequence[KernelRow], peak: float | None, reach: Span
) -> tuple[str, list[ChartSeries]]:
    """Return the roof's text for the panel's title, and its series. The bandwidth is that of the fastest
    triad or copy of as many ranks; the peak is the device's, else the fastest product's."""
    ranks = own[0]["ranks"]
    streams = [row["bytes_per_second"] for row in rows if row["kernel"] in STREAMS and row["ranks"] == ranks]
    products = [row["flops_per_second"] for row in own if row["kernel"] == "matmul"]
    peak = peak or max(products, default=0.0)
    if not streams or not peak:
        return "", []
    bandwidth, (low, high) = max(streams), reach
    ridge = [peak / bandwidth] if low < peak / bandwidth < high else []
    corners = tuple(Mark(at, min(at * bandwidth, peak)) for at in (low, *ridge, high))
    title = f": {bandwidth / 1e9:.3g} GB/s, {short(rate_text(peak))}"
    return title, [ChartSeries("roof", corners, "dashed")]


# ---------------------------------------------------------------- machine

CHECKS_NOTE = (
    "Step times. Pale bars: the band of the written preset, in which 9 of 10 runs are expected, "
    "with a stroke at its plan. Diamonds: planned by a fit that did not see this layout."
)
MOST_SPREAD = 5.0


def checks_chart(checks: Sequence[MachineCheck], spread: float) -> Chart:
    """A line for each layout that was trained: what the written preset plans, with the band of the
    cluster's own spread, exp(+-1.645 spread); and what a fit planned without the layout."""
    rows = sorted(checks, key=lambda row: row["seconds"])[:MOST_ROWS]
    factor = exp(QUANTILE * min(spread, MOST_SPREAD))

    def mark(at: int, seconds: float, span: Span | None = None) -> Mark:
        return Mark(seconds, -at, f"{rows[at]['layout']}: {seconds_text(seconds)}", span)

    bands, left_out, measured = [], [], []
    for at, row in enumerate(rows):
        planned = row["fitted_seconds"]
        bands.append(mark(at, planned, (planned / factor, planned * factor)))
        measured.append(mark(at, row["seconds"]))
        if row["left_out_seconds"] is not None:
            left_out.append(mark(at, row["left_out_seconds"]))
    series = [ChartSeries("planned, with its band", tuple(bands), "bar", 1)]
    if left_out:
        series.append(ChartSeries("planned, layout left out", tuple(left_out), "points", 2))
    series.append(ChartSeries("measured", tuple(measured), "points", 0))
    names = [row["layout"] for row in rows]
    return _row_chart("checks", "The presets against runs", CHECKS_NOTE, names, series)


# ---------------------------------------------------------------- predicted against measured

PREDICTED_NOTE = (
    "On the line the plan says what was measured; the dotted lines are 10 % off it. Bars across go "
    "from the shortest round to the longest"
)
BAND_NOTE = ", upright ones over the plan's band, in which 9 of 10 runs are expected"
LAYOUTS_NOTE = (
    "Pale bars: the plan's band, in which 9 of 10 runs are expected, with a stroke at the "
    "prediction. Points: the median measured, from the shortest round to the longest."
)
TIMES_NOTE = "Points: the median measured, from the shortest round to the longest."


def predicted_charts(rows: Sequence[Row]) -> Iterator[Chart]:
    """The chart `predicted`, where two rows or more have a prediction, and `layouts`, where rows
    have a band."""
    rows = [row for row in rows if _predicted(row)]
    if len(rows) > 1:
        yield _scatter(rows[:MOST_POINTS])
    if banded := [row for row in rows if _band(row)]:
        yield _by_row("layouts", "Step time of each layout", LAYOUTS_NOTE, banded)


def _predicted(row: Row) -> float:
    return row.get("predicted_seconds") or 0.0


def _band(row: Row) -> Span | None:
    low, high = row.get("low_seconds"), row.get("high_seconds")
    return (low, high) if low and high else None


def _rounds(row: Row) -> Span:
    return row["seconds_min"], row["seconds_max"]


def _scatter(rows: Sequence[Row]) -> Chart:
    groups: dict[str, list[Mark]] = {}
    for row in rows:
        groups.setdefault(_group(row), []).append(_point(row))
    colours = numbered(groups)
    points = _points(groups, colours)
    marks = [mark for own in groups.values() for mark in own]
    values = [v for m in marks for v in (m.x, m.y, *(m.x_span or ()), *(m.y_span or ()))]
    x, y = (ChartAxis(label, _seconds, base=10) for label in ("measured", "predicted"))
    lines = [
        _line("predicted = measured", 1.0, "dashed", _reach(values)),
        *(_line("10 % off", ratio, "dotted", _reach(values)) for ratio in (0.9, 1.1)),
    ]
    note = PREDICTED_NOTE + BAND_NOTE * any(mark.y_span for mark in marks) + "."
    panels = (Panel("", (*lines, *points)),)
    return Chart("predicted", "Predicted against measured", note, x, y, panels)


def _seconds(value: float) -> str:
    return short(seconds_text(value))


def short(text: str) -> str:
    """A figure for a tick: `10.0 ms` -> `10 ms`."""
    return text.replace(".00 ", " ").replace(".0 ", " ")


def _line(name: str, ratio: float, look: Look, reach: Span) -> ChartSeries:
    """Predicted = ratio x measured, within a square."""
    ends = max(reach[0], reach[0] / ratio), min(reach[1], reach[1] / ratio)
    return ChartSeries(name, tuple(Mark(at, ratio * at) for at in ends), look)


def _group(row: Row) -> str:
    if "kernel" in row:
        return str(row["kernel"]).replace("_", " ")
    if "kind" in row:
        return str(row["kind"]).replace("_", "-")
    return "more ranks than cores" if row.get("is_rehearsal") else "within the cores"


def _point(row: Row) -> Mark:
    measured, predicted = row["seconds"], _predicted(row)
    words = f"measured {seconds_text(measured)}, predicted {seconds_text(predicted)}"
    name, is_hollow = f"{row['name']}: {words}", row.get("is_rehearsal", False)
    return Mark(measured, predicted, name, _rounds(row), _band(row), is_hollow)


def _by_row(key: str, title: str, note: str, rows: Sequence[Row]) -> Chart:
    """A line for each row, the fastest first; of many rows the first MOST_ROWS."""
    shown = sorted(rows, key=lambda row: float(row["seconds"]))[:MOST_ROWS]
    measured, planned = [], []
    for at, row in enumerate(shown):
        name, is_hollow = f"{row['name']}: {seconds_text(row['seconds'])}", row.get("is_rehearsal")
        measured.append(Mark(row["seconds"], -at, name, _rounds(row), None, bool(is_hollow)))
        if predicted := _predicted(row):
            name = f"{row['name']}: predicted {seconds_text(predicted)}"
            planned.append(Mark(predicted, -at, name, _band(row)))
    bars = [ChartSeries("predicted, with its band", tuple(planned), "bar", 1)] if planned else []
    series = [*bars, ChartSeries("measured", tuple(measured), "points", 0)]
    return _row_chart(key, title, note, [row["name"] for row in shown], series)


def _row_chart(key: str, title: str, note: str, names: Sequence[str], series: Sequence[ChartSeries]) -> Chart:
    rows = ChartAxis("", names=tuple(names))
    return Chart(key, title, note, ChartAxis("", _seconds, base=10), rows, (Panel("", tuple(series)),))
