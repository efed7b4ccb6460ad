"""A verify report as text: the verdict first, then predicted beside measured for every layout."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from mpctl.bench.report import load_warnings
from mpctl.bench.verify import ALL, BUSY, GROUPS, Accuracy, VerifyReport, VerifyRow, disturbed
from mpctl.render.console import get_console, plain_table
from mpctl.units import bytes_text, plural, seconds_span_text, seconds_text

LEGEND = (
    "error = predicted / measured - 1; band: where the plan puts nine of ten runs, ✓ if it holds "
    "the measured step; memory: of the fullest rank in one step; sent: by a rank in a step, ✓ if "
    "parameters, states and messages of every rank equal the plan"
)
MARKS = {True: "✓", False: "✗"}
REHEARSAL = "* rehearsal: more ranks than the {cores} that they share"
PASSED = {True: ("✓ ", "bold green"), False: ("✗ ", "bold red"), None: ("", "")}


def print_verify(report: VerifyReport) -> None:
    """The verdict, a row for each group of layouts, a row for each layout, and where it was
    measured, on stdout."""
    console, rows = get_console(), report["results"]
    console.print(_verdict(report), "")
    if rows:
        console.print(_groups(report), "", _layouts(rows))
    if any(row["is_rehearsal"] for row in rows):
        cores = plural(report["environment"]["cores"], "core")
        console.print(Text(REHEARSAL.format(cores=cores), style="dim"))
    console.print(Text(LEGEND, style="dim"))
    where = report["environment"]
    rounds = max((row["rounds"] for row in rows), default=0)
    note = f"medians of {plural(rounds, 'round')}; {plural(where['cores'], 'core')}, " \
           f"{plural(where['gpus'], 'GPU')}, torch {where['torch']}, {where['date']}"  # fmt: skip
    console.print(Text(note, style="dim"))
    for warning in _warnings(report):
        console.print(Text.assemble(("! ", "bold yellow"), warning))


def _verdict(report: VerifyReport) -> Text:
    """`✓ step time: 6.1 % mean error over 9 layouts within cores (at most 10 % wanted), ...`."""
    findings = report["findings"]
    judged = findings["groups"][findings["judged"]]
    if judged["mape"] is None:
        return Text("nothing was measured", style="bold")
    group = "" if findings["judged"] == ALL else f" {findings['judged']}"
    wanted = f" (at most {findings['within']:.0%} wanted)" if findings["within"] is not None else ""
    parts = [
        f"step time {judged['mape']:.1%} off on average over "
        f"{plural(judged['layouts'], 'layout')}{group}{wanted}",
        f"worst {judged['worst_name']} {judged['worst']:+.1%}",
        f"rank correlation {_number(judged['spearman'])}",
        f"{_percent(judged['coverage'])} inside the band",
    ]
    return Text.assemble(PASSED[findings["passed"]], (", ".join(parts), "bold"))


def _groups(report: VerifyReport) -> Table:
    columns = ("", "layouts", "mean error", "bias", "worst", "at", "rank correlation", "in band")
    table = plain_table("", columns, left=("", "at"))
    findings = report["findings"]
    groups = findings["groups"]
    for name in GROUPS:
        is_other = name == findings["judged"] or groups[name] != groups[findings["judged"]]
        if groups[name]["layouts"] and is_other:
            table.add_row(f"step time, {name}", *_figures(groups[name]))
    if findings["memory"]["layouts"]:
        table.add_row("memory", *_figures(findings["memory"]))
    return table


def _figures(found: Accuracy) -> Iterator[str]:
    yield f"{found['layouts']}"
    yield _percent(found["mape"], ".1%")
    yield _percent(found["bias"], "+.1%")
    yield _percent(found["worst"], "+.1%")
    yield found["worst_name"] or ""
    yield _number(found["spearman"])
    yield _percent(found["coverage"])


def _layouts(rows: list[VerifyRow]) -> Table:
    columns = ("layout", "measured", "predicted", "error", "band", "memory", "error", "sent")
    table = plain_table("", columns, left=("layout", "band"))
    for row in rows:
        table.add_row(*_cells(row), style="" if row["is_inside"] and row["agrees"] else "yellow")
    return table


def _cells(row: VerifyRow) -> Iterator[str]:
    yield row["name"] + "*" * row["is_rehearsal"]
    yield seconds_text(row["seconds"])
    yield seconds_text(row["predicted_seconds"])
    yield f"{row['error']:+.1%}"
    yield f"{MARKS[row['is_inside']]} {seconds_span_text(row['low_seconds'], row['high_seconds'])}"
    yield _memory(row)
    yield _percent(row["memory_error"], "+.1%")
    yield f"{bytes_text(row['sent_bytes'])} {MARKS[row['agrees']]}"


def _memory(row: VerifyRow) -> str:
    """`61.2 GiB`, of GPUs `61.2 GiB of 64.0 GiB reserved`."""
    if row["memory_bytes"] is None:
        return ""
    reserved = row.get("reserved_bytes")
    return bytes_text(row["memory_bytes"]) + (
        f" of {bytes_text(reserved)} reserved" if reserved else ""
    )


def _warnings(report: VerifyReport) -> Iterator[str]:
    if not report["is_complete"]:
        yield "not complete: of some layouts fewer rounds, or none, were run"
    for row in report["results"]:
        if row["differs"]:
            yield f"{row['name']} did not run as planned: {row['differs']}"
    left_out = report["findings"]["left_out"]
    for reason in dict.fromkeys(left_out.values()):
        layouts = ", ".join(name for name, why in left_out.items() if why == reason)
        yield f"left out {layouts}: {reason}"
    if busy := disturbed(report["results"]):
        yield (f"the rank of layout {', '.join(busy)} had a core for less than {BUSY:.0%} of a "
               "step: other programs ran, and these errors are theirs too")  # fmt: skip
    yield from load_warnings(report["environment"])


def _percent(share: float | None, form: str = ".0%") -> str:
    return "" if share is None else format(share, form)


def _number(value: float | None) -> str:
    return "not known" if value is None else f"{value:.2f}"
