"""The page of the gallery: one file that is read without network or scripts, and sorted and filtered with one.

Drawn by mpctl's own drawer of pages (mpctl/render/page.py), which escapes every word of a row. gallery.css and
gallery.js lie beside this module.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mpctl.core.units import plural
from mpctl.render.markup import Raw, el, join
from mpctl.render.page import details, page_text
from mpctl.render.parts import Column, DataTable, Figures, Part, Section, Sentence

Row = dict[str, Any]
HERE = Path(__file__).parent
COMMAND = "make gallery"


def percent(value: float) -> str:
    """`+1.4`, in percent."""
    return f"{100 * value:+.1f}"


def seconds(value: float) -> str:
    """Seconds with four digits, as a plain number to sort by."""
    return f"{value:.4g}" if value < 1000 else f"{value:.0f}"


def run(row: Row) -> Raw:
    """Model, and below it the run's id."""
    return join([row["model"], el("br"), el("small", row["id"])])


def line(row: Row) -> Raw:
    """What opens to the line that plans the run, and its source."""
    far = "; ".join(row["extrapolates"])
    notes = el("p", f"Extrapolated: {far}.") if far else Raw()
    return details("line, source", el("pre", el("code", row["line"])), el("p", row["source"]), notes)


COLUMNS = (
    Column("run", run, form=lambda cell: cell, left=True),
    Column("GPUs", "gpus", "{:,}".format),
    Column("device", lambda row: row["device"].removeprefix("NVIDIA "), left=True),
    Column("software", "runtime", left=True),
    Column("dtype", "dtype", left=True),
    Column("layout", "layout", left=True),
    Column("measured s", "measured_seconds", seconds),
    Column("forecast s", "forecast_seconds", seconds),
    Column("error %", "error", percent),
    Column("kept back %", "kept_back_error", percent),
    Column("in band", "inside", lambda inside: "yes" if inside else "no", left=True),
    Column("fit", "fit", left=True),
    Column("source", "table", left=True),
    Column("line", line, form=lambda cell: cell, left=True),
)
SCORES = (
    Column("source", "source", left=True),
    Column("release", "release", left=True),
    Column("date", "date", left=True),
    Column("runs", "rows", "{:,}".format),
    Column("error %", "error", "{:.1f}".format),
    Column("bias %", "bias", "{:+.1f}".format),
    Column("in band %", "inside", "{:.0f}".format),
)


def parts(runs: Sequence[Row], scores: Sequence[Row]) -> Iterator[Part]:
    """The page: how to read it, the score by source and release, every run."""
    kept = [abs(row["kept_back_error"]) for row in runs if row["kept_back_error"] is not None]
    apart = [abs(row["error"]) for row in runs if row["fit"] == "kept back"]
    inside = sum(row["inside"] for row in runs) / len(runs)
    yield Sentence("Forecasts next to published runs", "title")
    yield Sentence(
        "Each row is a run that somebody measured and the plan of mpctl for it. Sorted by a click on a title."
    )
    figures = [
        ("runs", f"{len(runs):,}"),
        ("inside the 90 % band", f"{inside:.0%}"),
        ("error, fitted without the run", f"{sum(kept) / len(kept):.1%} ({len(kept):,} runs)"),
        ("error, system never fitted", f"{sum(apart) / len(apart):.1%} ({plural(len(apart), 'run')})"),
    ]
    yield Figures(figures)
    yield Section("runs", "Runs")
    yield Sentence(
        "error %: (forecast - measured) / measured. kept back %: the same by constants fitted without the run. "
        "fit: whether figures were fitted to the run. in band: whether the plan's 90 % band has the measured step. "
        "line: paste it into a shell. A click on a title sorts.",
        "note",
    )
    yield DataTable("Published runs", COLUMNS, runs)
    yield Section("score", "Score by source and release")
    yield Sentence("error %: mean of the absolute errors of forecasts under the presets of that release.", "note")
    yield DataTable("Scores", SCORES, sorted(scores, key=lambda row: (row["source"], row["date"] or "9")))


def page(runs: Sequence[Row], scores: Sequence[Row]) -> str:
    """The page as HTML."""
    css, script = ((HERE / f"gallery.{ending}").read_text("utf-8") for ending in ("css", "js"))
    return page_text(
        parts(runs, scores), command=COMMAND, of_command="Makes this page:", before=el("style", Raw(css)), script=script
    )
