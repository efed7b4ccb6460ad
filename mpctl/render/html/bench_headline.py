"""The figures that a reader of a bench's page looks for first, by what its report holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mpctl.bench.documents import number_of, text_of
from mpctl.bench.report import BenchReport
from mpctl.units import plural, rate_text

MOST = 8
Row = Mapping[str, Any]


def headline(report: BenchReport) -> list[tuple[str, str]]:
    """Names with figures, at most eight."""
    rows: Sequence[Row] = report["results"]
    kinds = (_accuracies(report), _efficiencies(rows), _rates(rows))
    return [figure for kind in kinds for figure in kind][:MOST]


def _accuracies(report: BenchReport) -> Iterator[tuple[str, str]]:
    """How far plans were off, by group of layouts, or of those that a machine's presets met."""
    if (left_out := number_of(report, "findings", "errors", "left_out")) is not None:
        yield "step time, layout left out", f"{left_out:.1%} off"
    for group in ("within cores", "beyond cores"):
        own = ("findings", "groups", group)
        if (mape := number_of(report, *own, "mape")) is not None:
            yield f"step time, {group}", f"{mape:.1%} off"
        if (order := number_of(report, *own, "spearman")) is not None:
            yield f"rank correlation, {group}", f"{order:.2f}"
        if (coverage := number_of(report, *own, "coverage")) is not None:
            yield f"inside of the band, {group}", f"{coverage:.0%}"


def _efficiencies(rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    """The best efficiency of the most ranks that have a core each, by mode of scaling."""
    known = [row for row in rows if number_of(row, "efficiency") and number_of(row, "world_size")]
    for mode in dict.fromkeys(text_of(row, "mode") for row in known):
        of_mode = [row for row in known if text_of(row, "mode") == mode]
        own = [row for row in of_mode if row.get("is_rehearsal") is not True] or of_mode
        most = max(row["world_size"] for row in own)
        best = max(row["efficiency"] for row in own if row["world_size"] == most)
        yield f"{mode} scaling, {plural(int(most), 'rank')}", f"{best:.0%}"


def _rates(rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    """The fastest of what was measured."""
    busbw = max((number_of(row, "busbw") or 0.0 for row in rows), default=0.0)
    if busbw > 0:
        yield "largest bus bandwidth", f"{busbw / 1e9:.3g} GB/s"
    flops = max((number_of(row, "flops_per_second") or 0.0 for row in rows
                 if text_of(row, "kernel") == "matmul"), default=0.0)  # fmt: skip
    if flops > 0:
        yield "fastest product", rate_text(flops)
    stream = max((number_of(row, "bytes_per_second") or 0.0 for row in rows
                  if text_of(row, "kernel") == "triad"), default=0.0)  # fmt: skip
    if stream > 0:
        yield "triad of a rank", f"{stream / 1e9:.3g} GB/s"
