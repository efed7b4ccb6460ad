"""The page of a bench's report: its pictures, every row, what follows from them, and where it was
measured. It has no script."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from mpctl.bench.report import BenchName, BenchReport, load_warnings
from mpctl.render.charts.chart import Chart
from mpctl.render.charts.svg import chart_svg
from mpctl.render.html.bench_cells import cell, findings_parts, rows_table, words
from mpctl.render.html.bench_headline import headline
from mpctl.render.html.frame import note, page_text, scrolling, section, table
from mpctl.render.markup import Raw, el
from mpctl.units import plural

LEAD: dict[BenchName, str] = {
    "scaling": "The same job at several world sizes and layouts, and how efficiently it scales.",
    "collectives": "Collectives along the axes of a layout, by size, as nccl-tests measures them.",
    "kernels": "The kernels of a model on this device, beside what the planner estimates for each.",
    "machine": "Kernels and collectives of this machine, and the presets made of them.",
    "verify": "The plan against the run: step time, memory and bytes of a set of layouts.",
    "tensor-modes": "One layer in every mode of tensor parallelism, beside its plan.",
    "trace": "Where the time of profiled steps of a run went, stage by stage, beside its plan.",
}


def bench_page(report: BenchReport, charts: Sequence[Chart], *, where: str) -> str:
    """The page as HTML. charts: the pictures of the report; where: host, versions and date in a
    line."""
    parts = [*_charts(charts), ("Results", _results(report))]
    findings = _findings_of(report)
    if findings:
        parts.append(("Findings", section("findings", "Findings", *findings_parts(findings))))
    parts.append(("Machine", _machine(report)))
    return page_text(
        _title(report), _header(report, where), parts, command=report["command"],
        of_command="Measured by:",
    )  # fmt: skip


def _title(report: BenchReport) -> str:
    return f"bench {report['bench']}" + (f": {report['job']}" if report["job"] else "")


def _header(report: BenchReport, where: str) -> Raw:
    tiles = [el("div", el("dt", name), el("dd", figure)) for name, figure in headline(report)]
    return el(
        "header", el("h1", "mpctl ", el("bdi", _title(report))),
        el("p", LEAD[report["bench"]]),
        el("p", f"{plural(len(report['results']), 'row')}, measured on {where}."),
        *(el("p", f"! {warning}.", class_="over") for warning in report_warnings(report)),
        el("dl", *tiles) if tiles else "",
    )  # fmt: skip


def report_warnings(report: BenchReport) -> Iterator[str]:
    """Why figures of a report are not what the machine alone would give."""
    if not report["is_complete"]:
        yield "Not complete: the bench was interrupted, or its budget ended before every round"
    rows: Sequence[Mapping[str, object]] = report["results"]
    rehearsed = sum(row.get("is_rehearsal") is True for row in rows)
    if rehearsed:
        cores = plural(report["environment"]["cores"], "core")
        many = f"{plural(rehearsed, 'row')} of {len(rows)}"
        yield f"{many}: a rehearsal, in which more ranks share {cores}"
    yield from load_warnings(report["environment"])


def _charts(charts: Sequence[Chart]) -> Iterator[tuple[str, Raw]]:
    for chart in charts:
        drawn = scrolling(el("figure", chart_svg(chart)), chart.title)
        yield chart.key.capitalize(), section(chart.key, chart.title, drawn, note(chart.note))


def _results(report: BenchReport) -> Raw:
    rows: Sequence[Mapping[str, object]] = report["results"]
    shown = rows_table("Every row of the report", rows) if rows else [note("No row was measured.")]
    return section("results", "Results", *shown)


def _findings_of(report: BenchReport) -> Mapping[str, object]:
    findings = dict(report).get("findings")
    return findings if isinstance(findings, dict) else {}


def _machine(report: BenchReport) -> Raw:
    rows = [(words(key), cell(key, value)) for key, value in report["environment"].items()]
    return section("machine", "Machine", table("Where it was measured", ("", ""), rows, left=2))
