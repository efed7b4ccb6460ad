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
    "ranks there are. Bars go from the slowest to the fastest round."
)
Row = Mapping[str, Any]
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
    panels = tuple(
        _panel(kind, [row for row in rows if text_of(row, "kind") == kind], told, colours)
        for kind in kinds
    )
    marks = [mark for panel in panels for series in panel.series for mark in series.marks]
    yield Chart(
        "busbw", "Bus bandwidth of collectives", NOTE,
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


def _panel(
    kind: str, rows: Sequence[Row], told: Sequence[str], colours: Mapping[str, int]
) -> Panel:
    lines: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: float(row["bytes"])):
        lines.setdefault(_name(row, told), []).append(row)
    return Panel(
        kind.replace("_", "-"),
        tuple(ChartSeries(name, tuple(map(_mark, own)), "line", colours[name])
              for name, own in lines.items()),
    )  # fmt: skip


def _mark(row: Row) -> Mark:
    rate, seconds = float(row["busbw"]), row["seconds"]
    return Mark(
        row["bytes"], rate, f"{row['name']}: {rate / 1e9:.3g} GB/s",
        y_span=(rate * seconds / row["seconds_max"], rate * seconds / row["seconds_min"]),
        is_hollow=row.get("is_rehearsal") is True,
    )  # fmt: skip
