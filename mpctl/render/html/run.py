"""The page of a run: how far it is, losses and step times, where its time went, plan and run."""

from __future__ import annotations

from collections.abc import Iterator

from mpctl.core.units import count_text, seconds_text
from mpctl.records.rundir.goodput import TimeSpent, time_spent
from mpctl.records.rundir.metrics import ordered, points
from mpctl.render.charts import chart_svg
from mpctl.render.curves import curves_chart
from mpctl.render.html.frame import Share, bar, legend, note, page_text, scrolling, section, table, tiles
from mpctl.render.markup import Raw, el
from mpctl.render.runs import failure_text, reached_text, run_rows
from mpctl.run.history.saved import SavedRun
from mpctl.run.history.show import ShownRun, X, find_series, show_run

CURVES = {
    "Loss": ("loss", "validation_loss"),
    "Speed": ("step_seconds",),
    "Communication": ("communication_seconds",),
    "Memory": ("memory_bytes", "reserved_memory_bytes"),
}
"""Pictures by name, with their metrics, those of further corpora and of single axes included."""
LISTED, LEAST_PAUSE = 8, 1.0
"""The longest pauses are listed: how many at most, and of how many seconds at least."""
VERDICTS = {"finished": "✓ ", "failed": "✗ "}
STYLES = {"finished": "verdict fits", "failed": "verdict over"}


def run_page(run: SavedRun, command: str, x: X = "step") -> str:
    """The page as HTML. run: with its records (`open_runs`); command: the line that makes it again;
    x: the horizontal axis of the curves."""
    document, spent = show_run(run), time_spent(run.records)
    verdict = f"{VERDICTS.get(run.status, '')}{run.status} after {reached_text(run)}."
    failed = [el("p", failure_text(document["failure"]))] if document["failure"] else []
    header = el(
        "header",
        el("h1", "mpctl ", el("bdi", f"run: {run.name}")),
        el("p", verdict, class_=STYLES.get(run.status, "verdict unknown")),
        *failed,
        tiles(_figures(document, spent)),
    )
    parts = list(_pictures(run, x))
    if spent is not None:
        parts.append(("Time", _time(spent)))
    facts = table("Job, results and how it ended", ("", ""), run_rows(run, document), left=2)
    return page_text(f"run: {run.name}", header, [*parts, ("Facts", section("facts", "Facts", facts))], command=command)


def _figures(document: ShownRun, spent: TimeSpent | None) -> Iterator[tuple[str, str]]:
    if document["final_loss"] is not None:
        yield "loss", f"{document['final_loss']:.4f}"
    if document["validation_loss"] is not None:
        yield "validation loss", f"{document['validation_loss']:.4f}"
    if document["step_seconds"] is not None:
        yield "a step", seconds_text(document["step_seconds"])
    if document["tokens_per_second"] is not None:
        yield "tokens/s", count_text(document["tokens_per_second"])
    if document["mfu"] is not None:
        yield "MFU", f"{document['mfu']:.1%}"
    if spent is not None:
        yield "goodput", f"{spent.steps / spent.wall:.1%}"
    if document["attempts"]:
        yield "attempts", str(document["attempts"])


def _pictures(run: SavedRun, x: X) -> Iterator[tuple[str, Raw]]:
    """The sections of the curves, each with the metrics that the run has numbers of."""
    present = ordered(name for record in run.records for point in points(record) for name in point.values)
    for title, bases in CURVES.items():
        names = [name for name in present if name.partition("/")[0] in bases]
        if not names:
            continue
        chart = curves_chart(find_series([run], names, x), x)
        figure = scrolling(el("figure", chart_svg(chart)), chart.title)
        words = note(chart.note) if chart.note else ""
        yield title, section(title.lower(), title, figure, words)


def _time(spent: TimeSpent) -> Raw:
    """Where the time went, and the longest pauses."""
    parts = {
        "steps that count": spent.steps,
        "saves that training waited for": spent.saves,
        "restarts, steps done again, validations": spent.paused,
    }
    shares = [
        Share(name, seconds, f"{seconds_text(seconds)} ({seconds / spent.wall:.1%})") for name, seconds in parts.items()
    ]
    longest = sorted(spent.pauses, key=lambda pause: pause.seconds, reverse=True)[:LISTED]
    rows = [
        (f"before step {pause.step:,}", seconds_text(pause.seconds))
        for pause in sorted(longest)
        if pause.seconds >= LEAST_PAUSE
    ]
    return section(
        "time",
        "Where the time went",
        el("div", bar(shares, spent.wall), class_="one"),
        legend(parts),
        table(
            "From the begin of the first step to the end of the last",
            ("", "took"),
            [(share.name, share.text) for share in shares],
        ),
        table("The longest pauses between two steps", ("", "lasted"), rows) if rows else "",
    )
