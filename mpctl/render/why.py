"""Why a run takes as long as it does: the verdict, the step by cause, suspects, changes, memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from mpctl.core.units import bytes_text, plural, seconds_text
from mpctl.measure.why.changes import ChangeEntry
from mpctl.measure.why.document import PartEntry, WhyDocument
from mpctl.measure.why.series import Point
from mpctl.measure.why.suspects import SuspectEntry
from mpctl.render.charts import Chart, ChartAxis, ChartSeries, Mark, Panel
from mpctl.render.markup import write_text
from mpctl.render.page import page_text
from mpctl.render.parts import Bar, Bars, Column, DataTable, Facts, Figures, Lines, Part, Section, Sentence, Style
from mpctl.render.terminal import print_parts

STYLES: dict[str, Style] = {"inside": "passed", "slower": "failed", "faster": "head"}
SHOWN = 3
"""Suspects in full on a terminal without --full."""
LEAST = 0.001
"""Share of a step: smaller parts are left out."""
MOST_POINTS = 2_000
CLIPPED = 3.0
"""Of a median step: longer ones are left out of the chart."""


def print_why(document: WhyDocument, *, full: bool) -> None:
    """Print the answer on stdout; full: every suspect and change."""
    print_parts(why_parts(document, full=full), full=full)


def write_why_page(path: Path, document: WhyDocument, points: Sequence[Point], *, command: str) -> None:
    """Write the answer as a page, with the steps as a chart. Raises InputError where path cannot be
    written."""
    parts = [*why_parts(document, full=True), Section("steps", "Steps"), steps_chart(document, points)]
    write_text(path, page_text(parts, command=command), option="--html")


def why_parts(document: WhyDocument, *, full: bool) -> Iterator[Part]:
    """The parts of the answer."""
    verdict, measured, band = document["verdict"], document["measured"], document["band"]
    yield Sentence(f"{document['name']}: {document['layout']}", "title")
    yield Sentence(verdict["text"], STYLES[verdict["status"]])
    yield Figures(
        [
            ("measured", seconds_text(measured["step_seconds"])),
            ("planned", seconds_text(band["planned_seconds"])),
            ("MFU measured", f"{measured['planned_mfu']:.0%}"),
            *[(f"{row['kind']} memory", bytes_text(row["measured"])) for row in document["memory"]],
        ]
    )
    yield Facts(list(_facts(document, full=full)))
    for note in document["notes"] if full else ():
        yield Sentence(note, "warning")
    yield Section("parts", "The step by cause")
    yield _parts_bars(document)
    yield _parts_table(document["parts"], band["planned_seconds"], measured["step_seconds"])
    yield from _suspects(document, full=full)
    yield from _changes(document["changes"], measured["step_seconds"] / band["planned_seconds"], full=full)


def _facts(document: WhyDocument, *, full: bool) -> Iterator[tuple[str, str]]:
    measured = document["measured"]
    yield "log" if ":" in document["read"] else "run", f"{document['read']}; planned for {document['runtime']}"
    for row in document["memory"] if full else document["memory"][:1]:
        more = row["measured"] / row["planned"] - 1
        whole = f", of {bytes_text(document['device_bytes'])}" if document["device_bytes"] else ""
        yield (
            f"{row['kind']} memory",
            f"{bytes_text(row['measured'])} at most, planned {bytes_text(row['planned'])} ({more:+.0%}){whole}",
        )
    if (standing := document["standing"]) is not None:
        yield (
            "standing",
            f"above {standing['percentile']} % of {standing['among']} {standing['what']}"
            f" (median {standing['median_mfu']:.0%}, best {standing['best_mfu']:.0%})",
        )
    printed = [f"{measured['tflops']:.0f} TFLOP/s"] if measured["tflops"] else []
    printed += [f"MFU {measured['mfu']:.0%}"] if measured["mfu"] else []
    own = f"{measured['planned_mfu']:.0%}, {measured['planned_tflops']:.0f} TFLOP/s"
    yield "MFU", f"{own}, attention without its causal mask" + f" (the log: {', '.join(printed)})" * bool(printed)
    if (more := measured["mean_seconds"] / measured["step_seconds"] - 1) > 0.01:
        yield "mean step", f"{seconds_text(measured['mean_seconds'])}, {more:.0%} above the median"


def _parts_bars(document: WhyDocument) -> Bars:
    every = document["parts"]
    parts = [part for part in every if part["planned"] > 0 or part is every[-1]]
    planned, measured = document["band"]["planned_seconds"], document["measured"]["step_seconds"]
    sizes = [part["planned"] for part in parts[:-1]]
    bars = [
        Bar("planned", [*sizes, 0.0], seconds_text(planned)),
        Bar("measured", [*sizes, max(0.0, measured - planned)], seconds_text(measured)),
    ]
    if measured < planned:
        bars.pop()
    return Bars("", [part["name"] for part in parts], bars, seconds_text, max(planned, measured))


def _parts_table(parts: Sequence[PartEntry], planned: float, measured: float) -> DataTable:
    has_measured = any(part["measured"] is not None for part in parts[:-1])
    rows = [
        part
        for part in parts
        if max(part["planned"], part["hidden"], abs(part["measured"] or 0.0)) >= LEAST * planned or part is parts[-1]
    ]
    columns = [
        Column("part", "name", left=True),
        Column("planned", lambda row: seconds_text(row["planned"]) if row["name"] != "unexplained" else "-"),
        Column("share", lambda row: f"{row['planned'] / planned:.0%}" if row["name"] != "unexplained" else "-"),
        Column("hidden", lambda row: seconds_text(row["hidden"]) if row["hidden"] else ""),
        *[Column("measured", lambda row: "" if row["measured"] is None else _signed(row))] * has_measured,
        Column("what", "words", left=True),
    ]
    if not has_measured:
        columns[1] = Column(
            "seconds", lambda row: _signed(row) if row["measured"] is not None else seconds_text(row["planned"])
        )
        columns[2] = Column("share", lambda row: f"{(row['measured'] or row['planned']) / measured:.0%}")
    return DataTable("Seconds by part", columns, rows, whole=len(columns) - 1)


def _signed(row: PartEntry) -> str:
    seconds = row["measured"] or 0.0
    sign = "-" if seconds < 0 else "+" if row["name"] == "unexplained" else ""
    return f"{sign}{seconds_text(abs(seconds))}"


def _suspects(document: WhyDocument, *, full: bool) -> Iterator[Part]:
    suspects = document["suspects"]
    yield Section("suspects", "Suspects")
    if not suspects:
        largest = sorted(document["parts"][:-1], key=lambda part: -part["planned"])[:2]
        names = " and ".join(part["name"] for part in largest)
        yield Sentence(f"No suspect: the log shows nothing unusual. The largest parts are {names}.")
        return
    shown = suspects if full else suspects[:SHOWN]
    for number, suspect in enumerate(shown, 1):
        checks = suspect["check"] if full else suspect["check"][:1]
        yield Lines(f"{number}. {_suspect_text(suspect)}", [suspect["evidence"], *(f"→ {check}" for check in checks)])
    if len(suspects) > len(shown):
        rest = ", ".join(suspect["cause"] for suspect in suspects[len(shown) :])
        yield Sentence(f"less likely: {rest} (--full)", "note")


def _suspect_text(suspect: SuspectEntry) -> str:
    seconds = f" ({seconds_text(suspect['seconds'])})" if suspect["seconds"] else ""
    return f"{suspect['cause']}{seconds}: {suspect['words']}"


def _changes(changes: Sequence[ChangeEntry], ratio: float, *, full: bool) -> Iterator[Part]:
    """ratio: measured over planned, by which savings are scaled."""
    if not changes:
        return
    yield Section("changes", "What would save time")
    lines = []
    for change in changes if full else changes[:SHOWN]:
        flags = f": {'  '.join(change['flags'])}" if change["flags"] else ""
        saved = f"saves {seconds_text(change['seconds'])}, {bytes_text(change['memory_bytes'])}"
        lines.append(f"{change['words']}, {saved}{flags}")
    yield Lines("Change, by the plan" if ratio <= 1.2 else "Change, by the plan of the healthy run", lines)


def steps_chart(document: WhyDocument, points: Sequence[Point]) -> Chart:
    """Seconds of each step, with the plan's band."""
    band = document["band"]
    most = CLIPPED * document["measured"]["step_seconds"]
    shown = [point for point in points if point.seconds <= most]
    every = max(1, len(shown) // MOST_POINTS)
    first, last = points[0].step, points[-1].step
    lines = (
        ("planned", "dashed", band["planned_seconds"]),
        ("nine of ten runs", "dotted", band["low_seconds"]),
        ("", "dotted", band["high_seconds"]),
    )
    series = (
        ChartSeries("measured", tuple(Mark(p.step, p.seconds) for p in shown[::every]), "curve", 0),
        *(ChartSeries(name, (Mark(first, at), Mark(last, at)), look) for name, look, at in lines),  # type: ignore[arg-type]
    )
    left_out = f"; {plural(len(points) - len(shown), 'line')} above {CLIPPED:g} times the median left out"
    note = plural(len(shown), "line") + left_out * (len(shown) < len(points))
    axes = ChartAxis("step", "{:g}".format), ChartAxis("seconds of a step", seconds_text, from_zero=True)
    return Chart("steps", "Seconds of each step", note, *axes, (Panel("", series),))
