"""Rows for the gallery next to their forecasts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mpctl.core.units import plural, seconds_text
from mpctl.render.parts import Column, DataTable, Facts, Part, Sentence
from mpctl.render.terminal import print_parts

if TYPE_CHECKING:
    from mpctl.measure.calibrate.gallery import ScoreDocument

COLUMNS = (
    Column("run", "name", left=True),
    Column("measured", "measured_seconds", seconds_text),
    Column("forecast", "forecast_seconds", seconds_text),
    Column("error", "error", "{:+.1%}".format),
    Column("in band", "inside", lambda inside: "yes" if inside else "no"),
)
SEND = "To send it: add it to the list in docs/gallery/added.json, and open a pull request."


def print_score(document: ScoreDocument) -> None:
    """Print the forecasts on stdout."""
    print_parts(score_parts(document))


def score_parts(document: ScoreDocument) -> Iterator[Part]:
    """Forecast and error of each row; of a single one also what the forecast rests on."""
    rows = document["rows"]
    title = f"{plural(len(rows), 'row')} checked, mean error {document['mean_error']:.1%}"
    yield Sentence(title, "passed")
    yield DataTable("", COLUMNS, rows)
    for row in rows if len(rows) == 1 else ():
        low, high = seconds_text(row["low_seconds"]), seconds_text(row["high_seconds"])
        fits = {True: "fits", False: "does not fit, though it ran", None: "unknown"}[row["fits"]]
        facts = [
            ("model", f"{row['model']}, {row['dtype']}, {row['runtime']}"),
            ("GPUs", f"{row['gpus']:,} x {row['device']}"),
            ("layout", row["layout"]),
            ("band", f"{low} to {high}: 9 of 10 steps"),
            ("memory", fits),
        ]
        yield Facts(facts)
        if row["extrapolates"]:
            yield Sentence(f"extrapolated: {'; '.join(row['extrapolates'])}", "note")
    yield Sentence(SEND, "hint")
