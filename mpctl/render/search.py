"""The answer of a search: the best layouts, why no. 1 is the best, and what less memory costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from mpctl.planning.layout_settings import layout_text
from mpctl.planning.plan import make_plan
from mpctl.render.console import get_console, plain_table
from mpctl.render.html.front import FrontPoint
from mpctl.render.html.page import plan_page
from mpctl.render.markup import Progress, no_progress, write_text
from mpctl.render.search_words import (
    comparison_lines,
    figure_cells,
    has_price,
    header_lines,
    headline,
    notes,
    row_text,
)
from mpctl.search.document import LayoutEntry, NoLayoutEntry, SearchDocument
from mpctl.search.result import SearchResult
from mpctl.units import plural


def write_page(
    path: Path, result: SearchResult, document: SearchDocument, *, command: str,
    on_progress: Progress = no_progress,
) -> None:  # fmt: skip
    """Write the page of a search's answer and of its best layout's plan.

    command: the line that makes the search again. Raises InputError where path cannot be written.
    """
    plan = make_plan(result.best[0].job)
    front = {choice.layout for choice in result.front}
    points = [
        FrontPoint(f"no. {number}", p.seconds, p.bytes, p.layout in front, layout_text(p.layout))
        for number, p in enumerate(sorted(result.seen), start=1)
    ]
    page = plan_page(plan, plan.require_legal(), command=command, points=points, search=document,
                     on_progress=on_progress)  # fmt: skip
    write_text(path, page, option="--html")


def print_search(document: SearchDocument) -> None:
    """Print a search's answer on stdout; that it was stopped before its end, on stderr."""
    if not document["is_complete"]:
        note = Text("! stopped: the best that was found so far", "bold yellow")
        get_console(stderr=True).print(note)
    get_console(soft_wrap=True).print(*_paragraphs(document), sep="\n")


def _paragraphs(document: SearchDocument) -> Iterator[RenderableType]:
    yield Text(headline(document), "bold")
    yield from (Text(line) for line in header_lines(document))
    if document["best"]:
        yield _table("Best layouts", document["best"], first="#")
        yield from (Text(line, "dim") for line in notes(document))
        yield from _comparison(document)
        yield from _commands(document)
    if len(document["front"]) > 1:
        yield _table("Less memory: the fastest layout that needs no more", document["front"])
    if document["by_gpus"]:
        yield _table("Best by number of GPUs", document["by_gpus"], first="GPUs")
        yield from _commands_by_gpus(document)


def _comparison(document: SearchDocument) -> Iterator[RenderableType]:
    lines = comparison_lines(document)
    if lines:
        yield Text("\nCompared with no. 1", "bold")
        yield from (Text(f"  {line}") for line in lines)


def _commands(document: SearchDocument) -> Iterator[RenderableType]:
    yield Text("\nReady to type", "bold")
    yield from (Text(f"  {entry['command']}") for entry in document["best"])


def _commands_by_gpus(document: SearchDocument) -> Iterator[RenderableType]:
    """A line to type for each other number of GPUs, its number behind it as a shell's comment."""
    shown = document["best"][0]["gpus"] if document["best"] else None
    entries = [e for e in document["by_gpus"] if "command" in e and e["gpus"] != shown]
    if entries:
        yield Text("\nReady to type, by number of GPUs", "bold")
        yield from (Text(f"  {e['command']}  # {plural(e['gpus'], 'GPU')}") for e in entries)


def _table(
    title: str, entries: Sequence[LayoutEntry | NoLayoutEntry], *, first: str = ""
) -> Table:  # fmt: skip
    """A row for each layout; first: the first column, `#` its place or `GPUs` their number."""
    is_priced = any(has_price(entry) for entry in entries)
    has_cost = is_priced or first == "GPUs"
    figures = ["step", "tokens/s", "MFU", "memory"] + ["GPU-h/Gtok"] * has_cost
    figures = [*([first] if first else []), *figures, *["price/Gtok"] * is_priced]
    table = plain_table(f"\n{title}", (*figures, "layout"), left=("layout",))
    for column in table.columns[:-1]:
        column.no_wrap = True
    for number, entry in enumerate(entries, start=1):
        lead = {"#": [str(number)], "GPUs": [f"{entry['gpus']:,}"]}.get(first, [])
        if "reason" in entry:
            table.add_row(*lead, *[""] * (len(figures) - len(lead)), entry["reason"])
        else:
            table.add_row(*lead, *figure_cells(entry, has_cost=has_cost), row_text(entry))
    return table
