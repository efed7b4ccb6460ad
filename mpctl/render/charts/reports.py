"""Which charts a report has: by what its rows hold, whichever bench wrote them."""

from __future__ import annotations

from mpctl.bench.report import BenchReport
from mpctl.render.charts.chart import Chart
from mpctl.render.charts.collectives import busbw_charts
from mpctl.render.charts.kernels import roofline_charts
from mpctl.render.charts.machine import checks_charts
from mpctl.render.charts.predicted import predicted_charts, times_charts
from mpctl.render.charts.scaling import efficiency_charts


def report_charts(report: BenchReport) -> list[Chart]:
    """The charts of a report, that of its bench first; the times of its rows where none other can
    be drawn. Rows of no time at all are left out: they have no place on a logarithmic axis."""
    report = {**report, "results": [row for row in report["results"] if row["seconds_min"] > 0]}
    kinds = (checks_charts, efficiency_charts, busbw_charts, roofline_charts, predicted_charts)
    charts = [chart for kind in kinds for chart in kind(report)]
    return charts or list(times_charts(report))
