"""Bus bandwidth over the size of messages: a panel for each collective, a line for each transport
and axis.

Small messages take the latency, whatever their size, so that their line climbs; large ones reach
the bandwidth of the links, where it is level.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mpctl.bench.documents import number_of, text_of
from mpctl.bench.report import BenchReport
from mpctl.render.charts.chart import Chart, ChartSeries, Mark, Panel, log_axis, numbered, short
from mpctl.units import bytes_text, plural

NOTE = (
    "Bus bandwidth as nccl-tests defines it: comparable with the bandwidth of a link, however many "
    "ranks there are. Bars go from the slowest to the fastest round"
)
FIT_NOTE = "; dotted: the fitted latency + bus bytes / bandwidth"
Row = Mapping[str, Any]
CURVE = 32  # steps of a fitted line
PARTS = ("transport", "axis", "ranks", "dtype")


def busbw_charts(report: BenchReport) -> Iterator[Chart]:
    """The chart `busbw`, where rows have a bus bandwidth and bytes."""
    every: Sequence[Row] = report["results"]
    rows = [row for row in every if _positive(row, "busbw") and _positive(row, "bytes")]
    kinds = list(dict.fromkeys(text_of(row, "kind") for row in rows))
    if not rows:
        return
    told = [part for part in PARTS if len({str(row.get(part)) for row in rows}) > 1]
    colours = numbered(_name(row, told) for row in rows)
    fits = _fits(report)
    panels = tuple(
        _panel([row for row in rows if text_of(row, "kind") == kind], fits, told, colours)
        for kind in kinds
    )
    marks = [mark for panel in panels for series in panel.series for mark in series.marks]
    yield Chart(
        "busbw", "Bus bandwidth of collectives", NOTE + FIT_NOTE * bool(fits) + ".",
        log_axis("bytes", [mark.x for mark in marks], lambda n: short(bytes_text(n)), base=4),
        log_axis("bus bandwidth, GB/s", [y for mark in marks for y in mark.y_span or (mark.y,)],
                 lambda rate: f"{rate / 1e9:g}"),
        panels,
    )  # fmt: skip


def _positive(row: Row, key: str) -> bool:
    return (number_of(row, key) or 0) > 0


def _name(row: Row, told: Sequence[str]) -> str:
    """The series of a row, by what differs among rows: `shared tp, 2 ranks`."""
    words = " ".join(text_of(row, part) for part in told if part != "ranks")
    ranks = plural(int(number_of(row, "ranks") or 0), "rank")
    return ", ".join(filter(None, (words, ranks if "ranks" in told or not words else "")))


def _fits(report: BenchReport) -> list[Row]:
    found = dict(report).get("findings")
    fits = found.get("fits") if isinstance(found, dict) else None
    return [fit for fit in fits if isinstance(fit, dict)] if isinstance(fits, list) else []


def _panel(
    rows: Sequence[Row], fits: Sequence[Row], told: Sequence[str], colours: Mapping[str, int]
) -> Panel:
    lines: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: float(row["bytes"])):
        lines.setdefault(_name(row, told), []).append(row)
    series = []
    for name, own in lines.items():
        series.append(ChartSeries(name, tuple(map(_mark, own)), "line", colours[name]))
        fit = next((fit for fit in fits if _is_of(fit, own[0])), None)
        if fit is not None and (curve := _curve(fit, own)):
            series.append(ChartSeries(name, curve, "dotted", colours[name]))
    return Panel(text_of(rows[0], "kind").replace("_", "-"), tuple(series))


def _is_of(fit: Row, row: Row) -> bool:
    return all(fit.get(key) == row.get(key) for key in ("kind", *PARTS))


def _curve(fit: Row, rows: Sequence[Row]) -> tuple[Mark, ...]:
    """Bus bytes over latency + bus bytes / bandwidth, from the smallest size to the largest."""
    latency, bandwidth = number_of(fit, "latency"), number_of(fit, "bandwidth")
    algbw = number_of(rows[0], "algbw") or 0.0
    if latency is None or latency < 0 or not bandwidth or bandwidth <= 0 or algbw <= 0:
        return ()
    first, last, factor = rows[0]["bytes"], rows[-1]["bytes"], rows[0]["busbw"] / algbw
    sizes = [first * (last / first) ** (at / CURVE) for at in range(CURVE + 1)]
    rates = [factor * size / (latency + factor * size / bandwidth) for size in sizes]
    return tuple(Mark(size, rate) for size, rate in zip(sizes, rates, strict=True))


def _mark(row: Row) -> Mark:
    rate, seconds = float(row["busbw"]), row["seconds"]
    return Mark(
        row["bytes"], rate, f"{row['name']}: {rate / 1e9:.3g} GB/s",
        y_span=(rate * seconds / row["seconds_max"], rate * seconds / row["seconds_min"]),
        is_hollow=row.get("is_rehearsal") is True,
    )  # fmt: skip
