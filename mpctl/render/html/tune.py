"""The page of a tuning: the best layout and its lead, plans beside measurements before and after
the fit, every trial, and the command that goes on."""

from __future__ import annotations

from collections.abc import Iterator

from mpctl.core.units import count_text, seconds_text
from mpctl.measure.tune.document import TrialEntry, TuneDocument
from mpctl.render.html.frame import note, page_text, section, table, tiles
from mpctl.render.markup import Raw, el
from mpctl.render.progress import clock
from mpctl.render.tune import (
    LAYOUT_COLUMNS,
    best_lines,
    command_lines,
    headline,
    layout_cells,
    lead_text,
    learnt_line,
    verdict,
)

TRIAL_COLUMNS = ("#", "planned", "expected", "measured", "steps", "queued", "took", "layout", "why")


def tune_page(document: TuneDocument) -> str:
    """The page as HTML."""
    best, name = document["best"], document["job"].partition(":")[0]
    style = "verdict fits" if best and best["is_settled"] else "verdict unknown"
    mark = "✓ " if best and best["is_settled"] else ""
    heading = [el("p", line) for line in best_lines(best)] if best else []
    header = el(
        "header",
        el("h1", "mpctl ", el("bdi", f"tune: {name}")),
        el("p", headline(document)),
        *heading,
        el("p", f"{mark}{verdict(document)}.", class_=style),
        tiles(_figures(document)),
    )
    parts = [("Layouts", _layouts(document)), ("Trials", _trials(document))]
    if best is not None:
        lines = "\n".join(command_lines(document, best))
        parts.append(("Launch", section("launch", "Launch it", el("pre", el("code", lines)))))
    return page_text(
        f"tune: {name}", header, parts, command=document["command"], of_command="Goes on with it, where time is left:"
    )


def _figures(document: TuneDocument) -> Iterator[tuple[str, str]]:
    best = document["best"]
    if best is not None:
        yield "a step", seconds_text(best["step_seconds"])
        yield "tokens/s", count_text(best["tokens_per_second"])
        if best["lead"] is not None:
            yield "lead", lead_text(best["lead"])
    yield "noise of a trial", f"{100 * document['noise']:.1f} %"
    yield "layouts planned", f"{document['candidates']:,}"


def _layouts(document: TuneDocument) -> Raw:
    layouts = document["layouts"]
    if not layouts:
        return section("layouts", "Measured layouts", el("p", "None yet."))
    figures = table(
        "Seconds of a step by the presets at the beginning (planned), by those fitted to all "
        "trials (fitted), each with its error, and as measured, the mean of its trials",
        _layout_first(LAYOUT_COLUMNS),
        (_layout_first(layout_cells(one)) for one in layouts),
    )
    learnt = learnt_line(document)
    return section("layouts", "Measured layouts", figures, note(learnt) if learnt else "")


def _layout_first(cells: tuple[str, ...]) -> tuple[str, ...]:
    return (cells[-1], *cells[:-1])


def _trials(document: TuneDocument) -> Raw:
    rows = map(_trial_cells, document["trials"])
    whole = table("Every trial, in order", TRIAL_COLUMNS, rows, sides="rrrrrrrll")
    words = (
        "Planned: by the presets at the beginning; expected: after the trials before it. Queued: "
        "in a scheduler's queue, no part of the budget. Why: the reason for which the layout was "
        "chosen."
    )
    return section("trials", "Trials", whole, note(words))


def _trial_cells(trial: TrialEntry) -> tuple[str, ...]:
    seconds = trial["step_seconds"]
    outcome = trial["status"].replace("-", " ") if seconds is None else seconds_text(seconds)
    error = f" ({trial['error']})" if trial["error"] else ""
    return (
        str(trial["number"]),
        seconds_text(trial["planned_seconds"]),
        seconds_text(trial["expected_seconds"]),
        outcome,
        str(trial["steps"]),
        clock(waited) if (waited := trial.get("waited_seconds")) else "",
        seconds_text(trial["wall_seconds"]),
        trial["layout"],
        f"{trial['why']}{error}",
    )
