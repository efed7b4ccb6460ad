"""Efficiency over ranks: a panel for each mode of scaling, a line for each kind of layout.

Layouts are of one kind where the same axes are larger than 1: tp2 and tp4 lie on the line `tp`,
which begins at the smallest world. Where a kind has several layouts of one world, the line goes
through the best of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mpctl.bench.documents import number_of, text_of
from mpctl.bench.report import BenchReport
from mpctl.render.charts.chart import (
    Chart,
    ChartSeries,
    Mark,
    Panel,
    counts_axis,
    linear_axis,
    numbered,
)

NOTE = (
    "Efficiency: throughput of a rank against that of a rank of the smallest world; bars go from "
    "the slowest to the fastest round. Dashed: what a perfect machine of this many cores or GPUs "
    "could reach. Hollow: a rehearsal, more ranks than cores."
)
PERFECT = "perfect machine"
Row = Mapping[str, Any]


def efficiency_charts(report: BenchReport) -> Iterator[Chart]:
    """The chart `efficiency`, where rows of more than one world size have one."""
    every: Sequence[Row] = report["results"]
    rows = [row for row in every if _is_drawn(row)]
    worlds = {row["world_size"] for row in rows}
    if len(worlds) < 2:
        return
    modes = list(dict.fromkeys(text_of(row, "mode") for row in rows))
    colours = numbered(_kind(row) for row in rows if row["world_size"] > min(worlds))
    panels = tuple(
        _panel(mode, [row for row in rows if text_of(row, "mode") == mode], colours)
        for mode in modes
    )
    highs = [mark.y_span[1] if mark.y_span else mark.y for panel in panels
             for series in panel.series for mark in series.marks]  # fmt: skip
    yield Chart(
        "efficiency", "Scaling efficiency", NOTE, counts_axis("ranks", worlds),
        linear_axis("efficiency", [1.0, *highs], lambda share: f"{share:.0%}"), panels,
    )  # fmt: skip


def _is_drawn(row: Row) -> bool:
    world, efficiency = number_of(row, "world_size"), number_of(row, "efficiency")
    return world is not None and world >= 1 and efficiency is not None and efficiency > 0


def _kind(row: Row) -> str:
    """`tp dp`: the axes that are larger than 1."""
    sizes = row.get("sizes")
    axes = (
        [axis for axis in sizes if (number_of(sizes, axis) or 1) > 1]
        if isinstance(sizes, Mapping)
        else []
    )
    return " ".join(axes) or text_of(row, "layout") or "1 rank"


def _panel(mode: str, rows: Sequence[Row], colours: Mapping[str, int]) -> Panel:
    smallest = min(row["world_size"] for row in rows)
    base = [row for row in rows if row["world_size"] == smallest]
    kinds: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row["world_size"] > smallest:
            kinds[_kind(row)].append(row)
    series = [_perfect(rows)] if any(number_of(row, "perfect_efficiency") for row in rows) else []
    for kind, own in kinds.items():
        series += _lines(kind, [*base, *own], colours[kind])
    return Panel(f"{mode} scaling".strip(), tuple(series))


def _lines(kind: str, rows: Sequence[Row], colour: int) -> Iterator[ChartSeries]:
    best: dict[float, Row] = {}
    for row in sorted(rows, key=lambda row: row["efficiency"]):
        best[row["world_size"]] = row
    joined = [best[world] for world in sorted(best)]
    yield ChartSeries(kind, tuple(map(_mark, joined)), "line", colour)
    if others := [row for row in rows if row not in joined]:
        yield ChartSeries(kind, tuple(map(_mark, others)), "points", colour)


def _perfect(rows: Sequence[Row]) -> ChartSeries:
    reach: dict[float, float] = {}
    for row in rows:
        if (perfect := number_of(row, "perfect_efficiency")) is not None:
            reach[row["world_size"]] = max(perfect, reach.get(row["world_size"], 0.0))
    return ChartSeries(
        PERFECT, tuple(Mark(world, reach[world]) for world in sorted(reach)), "dashed"
    )


def _mark(row: Row) -> Mark:
    """Efficiency is as 1 / seconds, so that the longest round has the least."""
    efficiency, seconds = row["efficiency"], row["seconds"]
    return Mark(
        row["world_size"], efficiency, f"{row['name']}: {efficiency:.0%}",
        y_span=(efficiency * seconds / row["seconds_max"],
                efficiency * seconds / row["seconds_min"]),
        is_hollow=row.get("is_rehearsal") is True,
    )  # fmt: skip
