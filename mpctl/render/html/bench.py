"""The page of a bench's report, and its pictures: what it measured, what follows from that, and
where it was measured. A page has no script, and needs nothing but itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from mpctl.core.units import plural, rate_text
from mpctl.measure.bench.report import BenchName, BenchReport
from mpctl.render.bench import report_parts, where_measured
from mpctl.render.bench_charts import report_charts
from mpctl.render.bench_parts import BenchLine, BenchTable, Part
from mpctl.render.bench_runs import machine_rows
from mpctl.render.charts import Chart, chart_svg, write_chart
from mpctl.render.html.frame import details, note, page_text, scrolling, section, table, tiles
from mpctl.render.markup import Raw, el, write_text

PAGE = "report.html"
LEAD: dict[BenchName, str] = {
    "scaling": "The same job at several world sizes and layouts, and how efficiently it scales.",
    "collectives": "Collectives along the axes of a layout, by size, as nccl-tests measures them.",
    "kernels": "The kernels of a model on this device, and what the planner estimates for each.",
    "machine": "Kernels and collectives of this machine, and the presets made of them.",
    "verify": "The plan against the run: step time, memory and bytes of a set of layouts.",
    "tensor-modes": "One layer in every mode of tensor parallelism, and its plan.",
    "trace": "Where the time of profiled steps of a run went, stage by stage, and its plan.",
}

HEADING: dict[str, tuple[str, str]] = {
    "head": ("", "verdict unknown"),
    "passed": ("✓ ", "verdict fits"),
    "failed": ("✗ ", "verdict over"),
    "warning": ("! ", "over"),
}
"""Lines that stand above everything else, with their mark and their class."""


def write_bench_files(folder: Path, report: BenchReport) -> Iterator[Path]:
    """Write the page and the pictures of a report, and yield each path when it is written. Raises
    InputError where one cannot be written."""
    source, charts = where_measured(report["environment"]), report_charts(report)
    write_text(folder / PAGE, bench_page(report, charts, folder), option="--out")
    yield folder / PAGE
    for chart in charts:
        for suffix in (".svg", ".png"):
            path = folder / f"{chart.key}{suffix}"
            write_chart(path, chart, source)
            yield path


def bench_page(report: BenchReport, charts: Sequence[Chart], folder: Path) -> str:
    """The page as HTML. charts: the pictures of the report; folder: where it is written."""
    heading, results = [], []
    for part in report_parts(report, folder):
        if isinstance(part, BenchTable) or part.style not in HEADING:
            results.append(_shown(part))
            continue
        mark, style = HEADING[part.style]
        stop = "." if part.style == "warning" else ""
        heading.append(el("p", f"{mark}{part.text}{stop}", class_=style))
    if report["bench"] == "machine":
        measured = map(_shown, machine_rows(cast(Any, report)))
        results.append(details("Kernels and collectives", *measured))
    title = f"bench {report['bench']}" + (f": {report['job']}" if report["job"] else "")
    header = el(
        "header",
        el("h1", "mpctl ", el("bdi", title)),
        el("p", LEAD[report["bench"]]),
        *heading,
        tiles(headline(report)),
    )
    sections = [
        (
            chart.key.capitalize(),
            section(chart.key, chart.title, scrolling(el("figure", chart_svg(chart)), chart.title), note(chart.note)),
        )
        for chart in charts
    ]
    facts = [(key.replace("_", " "), str(fact)) for key, fact in report["environment"].items()]
    machine = table("Where it was measured", ("", ""), facts, left=2)
    sections += [
        ("Results", section("results", "Results", *results)),
        ("Machine", section("machine", "Machine", machine)),
    ]
    return page_text(title, header, sections, command=report["command"], of_command="Measured by:")


def _shown(part: Part) -> Raw:
    if isinstance(part, BenchLine):
        return note(part.text)
    sides = ["l" if column.left else "r" for column in part.columns]
    names = [column.title for column in part.columns]
    rows = [(*cells, *[""] * (len(names) - len(cells))) for cells in part.cells()]
    caption = part.title or (f"By {names[0]}" if names[0] else "Accuracy")
    return table(caption, names, rows, sides=sides)


def headline(report: Any) -> list[tuple[str, str]]:
    """The figures that a reader looks for first, with their names."""
    figures = {
        "scaling": (_efficiencies,),
        "collectives": (_fastest_collective,),
        "kernels": (_fastest_kernels,),
        "verify": (_accuracies,),
        "machine": (_left_out, _fastest_collective, _fastest_kernels),
    }
    return [pair for kind in figures.get(report["bench"], ()) for pair in kind(report)]


def _efficiencies(report: Any) -> Iterator[tuple[str, str]]:
    """The best efficiency of the most ranks that have a core each, by mode of scaling."""
    for mode in dict.fromkeys(row["mode"] for row in report["results"]):
        of_mode = [row for row in report["results"] if row["mode"] == mode]
        own = [row for row in of_mode if not row["is_rehearsal"]] or of_mode
        most = max(row["world_size"] for row in own)
        best = max(row["efficiency"] for row in own if row["world_size"] == most)
        yield f"{mode} scaling, {plural(most, 'rank')}", f"{best:.0%}"


def _accuracies(report: Any) -> Iterator[tuple[str, str]]:
    """How far plans were off, by group of layouts."""
    for name, group in report["findings"]["groups"].items():
        if name == "all" or not group["layouts"]:
            continue
        yield f"step time, {name}", f"{group['mape']:.1%} off"
        if group["spearman"] is not None:
            yield f"rank correlation, {name}", f"{group['spearman']:.2f}"
        if group["coverage"] is not None:
            yield f"inside of the band, {name}", f"{group['coverage']:.0%}"


def _left_out(report: Any) -> Iterator[tuple[str, str]]:
    if "left_out" in (errors := report["findings"]["errors"]):
        yield "step time, layout left out", f"{errors['left_out']:.1%} off"


def _fastest_collective(report: Any) -> Iterator[tuple[str, str]]:
    if rates := [row["busbw"] for row in report["results"] if "busbw" in row]:
        yield "largest bus bandwidth", f"{max(rates) / 1e9:.3g} GB/s"


def _fastest_kernels(report: Any) -> Iterator[tuple[str, str]]:
    kernels = [row for row in report["results"] if "kernel" in row]
    if products := [row["flops_per_second"] for row in kernels if row["kernel"] == "matmul"]:
        yield "fastest product", rate_text(max(products))
    if streams := [row["bytes_per_second"] for row in kernels if row["kernel"] == "triad"]:
        yield "triad of a rank", f"{max(streams) / 1e9:.3g} GB/s"
