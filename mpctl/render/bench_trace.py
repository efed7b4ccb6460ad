"""Where the time of profiled steps goes, as a table: measured beside planned."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from mpctl.bench.trace import STEP, TraceReport, TraceRow
from mpctl.render.console import get_console, plain_table
from mpctl.units import plural, ranges_text, ranks_text, seconds_text

NOTE = (
    "Means of a stage's ranks, medians of the steps. Parts overlap: a pass contains the "
    "collectives of its layers; `in AXIS` is where a rank is in collectives along an axis and "
    "computes nothing."
)


def print_trace(report: TraceReport, *, foreign: int = 0) -> None:
    """The table, what it means, and where the trace is, on stdout. foreign: lines of the profile
    that could not be read."""
    console, findings = get_console(), report["findings"]
    steps = f"step{'s' * (len(findings['steps']) > 1)} {ranges_text(findings['steps'])}"
    title = f"{report['job']}: {steps} of {plural(findings['ranks'], 'rank')}"
    console.print(_table(title, report["results"]), "")
    console.print(Text(NOTE, style="dim"))
    for warning in _warnings(report, foreign):
        console.print(Text.assemble(("! ", "bold yellow"), warning))
    console.print(Text(f"wrote {findings['file']}: open it in ui.perfetto.dev"))


def _warnings(report: TraceReport, foreign: int) -> list[str]:
    findings, warnings = report["findings"], list[str]()
    if findings["missing"]:
        warnings.append(f"{ranks_text(findings['missing'])} recorded not every step, or none")
    if contention := findings["planned_contention"]:
        warnings.append(
            f"ranks share cores: {seconds_text(contention)} of the planned step are waiting for a "
            "core, which measured passes contain and planned ones do not"
        )
    if foreign:
        warnings.append(f"{plural(foreign, 'line')} of the profile could not be read")
    if len(findings["clock_offsets"]) > 1:
        warnings.append(
            f"clocks of {plural(len(findings['clock_offsets']), 'host')} are aligned by the end of "
            "each step: as exact as a small all-reduce is fast"
        )
    return warnings


def _table(title: str, rows: list[TraceRow]) -> Table:
    columns = ("stage", "part", "measured", "from", "to", "of the step", "planned", "planned / it")
    table = plain_table(title, columns, left=("part",))
    for row in rows:
        planned = row["predicted_seconds"]
        table.add_row(
            str(row["stage"]) if row["part"] == STEP else "", row["part"],
            seconds_text(row["seconds"]), seconds_text(row["seconds_min"]),
            seconds_text(row["seconds_max"]), f"{row['share']:.0%}",
            "" if planned is None else seconds_text(planned),
            "" if planned is None or not row["seconds"] else f"{planned / row['seconds']:.2f}",
        )  # fmt: skip
    return table
