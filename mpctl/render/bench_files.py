"""The page and the pictures of a report, beside it in its folder.

Without the package matplotlib the PNG pictures are left out; pages and SVG need nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mpctl.bench.report import BenchEnvironment, BenchReport
from mpctl.render.charts.chart import Chart
from mpctl.render.charts.png import has_matplotlib
from mpctl.render.charts.reports import report_charts
from mpctl.render.charts.svg import chart_file
from mpctl.render.html.bench import bench_page
from mpctl.render.markup import write_text
from mpctl.units import plural

PAGE = "report.html"
NO_PNG = "no PNG pictures: the package matplotlib is not installed (pip install 'mpctl[plot]')"


def write_bench_files(folder: Path, report: BenchReport) -> Iterator[Path]:
    """Write the page and the pictures of a report, and yield each path when it is written. Raises
    InputError where one cannot be written."""
    source, charts = where_measured(report["environment"]), report_charts(report)
    write_text(folder / PAGE, bench_page(report, charts, where=source), option="--out")
    yield folder / PAGE
    for chart in charts:
        path = folder / f"{chart.key}.svg"
        write_text(path, chart_file(chart, source), option="--out")
        yield path
        if _wrote_png(path.with_suffix(".png"), chart, source):
            yield path.with_suffix(".png")


def _wrote_png(path: Path, chart: Chart, source: str) -> bool:
    """Whether there was a matplotlib to write it with: it may be absent, or installed and broken,
    and no picture is worth the figures."""
    if not has_matplotlib():
        return False
    from mpctl.render.charts.png import write_png

    try:
        write_png(path, chart, source)
    except ImportError:
        return False
    return True


def where_measured(where: BenchEnvironment) -> str:
    """`laptop, AMD EPYC, 2 cores, torch 2.11, mpctl 0.9, 2026-01-02`."""
    hardware = [where["host"], where["machine"], plural(where["cores"], "core")]
    if where["gpus"]:
        hardware.append(plural(where["gpus"], "GPU"))
    versions = [f"torch {where['torch']}", f"mpctl {where['mpctl']}", where["date"][:10]]
    return ", ".join([*hardware, *versions])
