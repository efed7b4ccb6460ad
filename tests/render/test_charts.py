"""Charts: axes and series by hand, the same in SVG and PNG, of any report and of hostile ones."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from mpctl.measure.bench.report import BenchReport
from mpctl.render.bench_charts import charts_of, short
from mpctl.render.charts import (
    COLOURS,
    MARKERS,
    Chart,
    ChartAxis,
    ChartSeries,
    Mark,
    Panel,
    chart_svg,
    colour_and_shape,
    write_chart,
)
from mpctl.render.svg import light_colours, picture_css
from tests.measure.bench.reports import (
    MADE,
    collectives_report,
    kernels_report,
    machine_report,
    made_report,
    row,
    scaling_report,
    verify_report,
)

EVIL = "</text><script>x()</script>&\u202e\x1b[31m"


def charts(report: Any) -> dict[str, Chart]:
    made: BenchReport = report
    return {chart.key: chart for chart in charts_of(made)}


def of(chart: Chart, panel: int, name: str) -> list[tuple[float, float]]:
    """The points of a series."""
    return [(mark.x, mark.y) for series in chart.panels[panel].series if series.name == name for mark in series.marks]


# ---------------------------------------------------------------- what is drawn of a report


def test_each_report_has_its_charts() -> None:
    assert {name: list(charts(make())) for name, make in MADE.items()} == {
        "scaling": ["efficiency", "predicted"],
        "collectives": ["busbw"],
        "kernels": ["roofline", "predicted"],
        "verify": ["predicted", "layouts"],
        "machine": ["checks", "busbw", "roofline", "predicted"],
    }
    assert list(charts(made_report("tensor-modes", [row("1d", 0.1), row("2d", 0.2)]))) == ["times"]
    assert charts(made_report("tensor-modes", [])) == {}


def test_efficiency_has_a_line_for_each_kind_of_layout() -> None:
    chart = charts(scaling_report())["efficiency"]
    assert [panel.title for panel in chart.panels] == ["strong scaling", "weak scaling"]
    assert of(chart, 0, "tp") == [(1, 1.0), (2, pytest.approx(0.96)), (4, pytest.approx(0.44))]
    assert of(chart, 1, "tp dp") == [(1, 1.0), (4, pytest.approx(0.4))]
    assert of(chart, 0, "perfect machine") == [(1, 1.0), (2, 1.0), (4, 0.5)]
    (line,) = [series for series in chart.panels[0].series if series.name == "tp"]
    assert [mark.is_hollow for mark in line.marks] == [False, False, True]
    assert line.marks[0].y_span == (pytest.approx(1 / 1.05), pytest.approx(1 / 0.95))


def test_busbw_names_what_differs() -> None:
    chart = charts(collectives_report())["busbw"]
    assert [panel.title for panel in chart.panels] == ["all-reduce", "all-gather", "reduce-scatter", "broadcast"]
    assert [series.name for series in chart.legend] == ["gloo", "shared"]
    size, rate = of(chart, 0, "shared")[-1]
    assert rate == pytest.approx(2**24 / (2e-5 + 2**24 / 6e9)) and size == 2**24


def test_a_fit_is_drawn_under_its_line() -> None:
    """The made rows lie on it: latency + bytes / bandwidth; only all-reduce has a fit."""
    chart = charts(collectives_report())["busbw"]
    line, fit = (series for series in chart.panels[0].series if series.name == "gloo")
    assert (line.look, fit.look, fit.colour) == ("line", "dotted", line.colour)
    for measured, fitted in ((line.marks[0], fit.marks[0]), (line.marks[-1], fit.marks[-1])):
        assert (fitted.x, fitted.y) == (pytest.approx(measured.x), pytest.approx(measured.y))
    assert {series.look for series in chart.panels[1].series} == {"line"}
    assert [series.look for series in chart.legend] == ["line", "line"]
    without = charts(collectives_report() | {"findings": {"fits": []}})["busbw"]
    assert "dotted" in chart.note and "dotted" not in without.note


def test_the_roof_has_its_ridge_at_peak_over_bandwidth() -> None:
    """10 GB/s and 40 GFLOP/s meet at 4 FLOP a byte; no kernel of the report lies above."""
    chart = charts(kernels_report())["roofline"]
    assert chart.panels[0].title == "1 rank, fp32: 10 GB/s, 40 GFLOP/s"
    low, ridge, high = of(chart, 0, "roof")
    assert ridge == (pytest.approx(4.0), pytest.approx(40e9))
    assert low[1] == pytest.approx(low[0] * 10e9) and high[1] == pytest.approx(40e9)
    for name in ("matmul", "attention", "optimizer", "triad", "layer"):
        assert all(y <= 1.0001 * min(10e9 * x, 40e9) for x, y in of(chart, 0, name))
    assert of(chart, 0, "copy") == []  # no FLOP
    report = kernels_report() | {"findings": {"peak_flops": {}}}  # then the fastest product's
    assert "32 GFLOP/s" in charts(report)["roofline"].panels[0].title


def test_layouts_have_their_bands() -> None:
    chart = charts(verify_report())["layouts"]
    assert chart.y.names[:2] == ("1 rank", "tp2")
    bands, measured = chart.panels[0].series
    assert bands.marks[0].x_span == (pytest.approx(0.09 / 1.15), pytest.approx(0.09 * 1.15))
    assert measured.marks[0].x == pytest.approx(0.1)
    assert [series.name for series in charts(verify_report())["predicted"].legend] == [
        "predicted = measured",
        "10 % off",
        "within the cores",
        "more ranks than cores",
    ]


def test_a_machine_is_held_against_its_runs() -> None:
    """A spread of 0.1 is a band from 0.848 to 1.179 of the plan; the fastest layout is first."""
    chart = charts(machine_report())["checks"]
    assert chart.y.names == ("tp2", "1 rank")
    bands, left_out, measured = chart.panels[0].series
    assert bands.marks[0].x_span == (pytest.approx(0.315 * 0.8483, rel=1e-3), pytest.approx(0.315 * 1.1788, rel=1e-3))
    assert [mark.x for mark in left_out.marks] == [pytest.approx(0.33), pytest.approx(0.44)]
    assert [mark.x for mark in measured.marks] == [0.3, 0.4]
    report = machine_report()
    report["findings"]["checks"] = []
    assert "checks" not in charts(report)


# ---------------------------------------------------------------- SVG and PNG


def drawn(chart: Chart, path: Path, source: str = "") -> str:
    write_chart(path, chart, source)
    return path.read_text("utf-8")


@pytest.mark.parametrize("name", MADE)
@pytest.mark.quick(2)
def test_a_file_is_whole_and_has_every_mark(name: str, tmp_path: Path) -> None:
    for chart in charts(MADE[name]()).values():
        text = drawn(chart, tmp_path / "a.svg", "laptop")
        root = ElementTree.fromstring(text)
        assert root.get("role") == "img" and root.get("aria-label") == chart.title
        assert not re.search(r"https?://(?!www.w3.org)|<script|nan|inf\b", text)
        looks = ("line", "points", "bar")
        series = [one for panel in chart.panels for one in panel.series if one.look in looks]
        assert text.count("<title>") == sum(len(one.marks) for one in series)
        assert "laptop" in text and chart.title in text and "laptop" not in chart_svg(chart)
        assert drawn(chart, tmp_path / "b.svg", "laptop") == text  # the same bytes


def test_a_page_gives_a_chart_its_colours() -> None:
    """One colour of the light scheme stays: a variable would do in a page, but not in a file."""
    text = chart_svg(charts(scaling_report())["efficiency"])
    assert "var(--l0)" in text and "var(--ink)" not in re.findall("#[0-9a-f]{6}", text)
    assert not re.search("#(0067a8|b84a00|57606a)|xmlns|<metadata|font-family|<style", text)


def test_a_mark_without_a_place_is_not_drawn() -> None:
    """What overflowed stays on the axis; NaN, and 0 on a logarithmic axis, have no place."""
    marks = tuple(Mark(x, 1.0, f"mark {x}") for x in (1.0, 10.0, float("inf"), float("nan"), 0.0))
    panels = (Panel("", (ChartSeries("a", marks),)),)
    text = chart_svg(Chart("a", "a", "", ChartAxis("x", base=10), ChartAxis("y"), panels))
    assert re.findall("<title>mark (.*?)</title>", text) == ["1.0", "10.0", "inf"]


def test_series_differ_in_colour_and_shape() -> None:
    names = {f"--l{at}" for at in range(COLOURS)}
    assert names <= light_colours().keys() and len(set(MARKERS)) == COLOURS
    assert all(picture_css().count(f"{name}:") == 3 for name in names)  # light, dark, print
    assert len({colour_and_shape(number) for number in range(COLOURS**2)}) == COLOURS**2
    assert (short("10.0 ms"), short("1.00 s"), short("1.5 KiB")) == ("10 ms", "1 s", "1.5 KiB")


@pytest.mark.slow
def test_pngs_are_written(tmp_path: Path) -> None:
    for chart in {**charts(scaling_report()), **charts(verify_report())}.values():
        path = tmp_path / f"{chart.key}.png"
        write_chart(path, chart, f"laptop $\\frac$ {EVIL}")
        assert path.read_bytes().startswith(b"\x89PNG")


# ---------------------------------------------------------------- reports of others


@pytest.mark.parametrize("name", MADE)
def test_rows_of_no_time_are_not_drawn(name: str) -> None:
    report = MADE[name]()
    none = {"seconds": 0.0, "seconds_min": 0.0, "seconds_max": 0.0, "name": "none"}
    report["results"].append(report["results"][-1] | none)
    assert charts(report) == charts(MADE[name]())


def test_words_of_a_report_stay_words(tmp_path: Path) -> None:
    report = verify_report()
    report["results"][0]["name"] = EVIL
    for chart in charts(report).values():
        text = drawn(chart, tmp_path / "a.svg", EVIL)
        ElementTree.fromstring(text)
        assert "<script" not in text
