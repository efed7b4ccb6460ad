"""What a search found: the best layouts, why the first is the first, what less memory costs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from mpctl.planning.layout_settings import layout_text
from mpctl.planning.plan import make_plan
from mpctl.render.console import get_console, plain_table
from mpctl.render.html.front import FrontPoint
from mpctl.render.html.page import plan_page
from mpctl.render.markup import Progress, unseen, write_text
from mpctl.render.search_words import asked_text, entry_cells, header_lines, notes, why_lines
from mpctl.search.result import SearchResult


def write_page(
    path: Path, answer: SearchResult, document: dict[str, Any], *, command: str,
    on_progress: Progress = unseen,
) -> None:  # fmt: skip
    """The page of what a search found, and of its best layout's plan. command: the search's own."""
    plan = make_plan(answer.best[0].job)
    front = {choice.layout for choice in answer.front}
    points = [
        FrontPoint(f"no. {number}", p.seconds, p.bytes, p.layout in front, layout_text(p.layout))
        for number, p in enumerate(sorted(answer.seen), start=1)
    ]
    page = plan_page(plan, plan.require_legal(), command=command, points=points, found=document,
                     on_progress=on_progress)  # fmt: skip
    write_text(path, page, option="--html")


def print_search(document: dict[str, Any]) -> None:
    """On stdout; what was not finished is said on stderr."""
    if not document["is_complete"]:
        note = Text("! stopped: the best that was found so far", "bold yellow")
        get_console(stderr=True).print(note)
    get_console(soft_wrap=True).print(*_parts(document), sep="\n")


def _parts(document: dict[str, Any]) -> Iterator[RenderableType]:
    yield Text(asked_text(document), "bold")
    yield from (Text(line) for line in header_lines(document))
    if document["best"]:
        yield _table("Best layouts", document["best"], first="#")
        yield from (Text(line, "dim") for line in notes(document))
        yield from _why(document)
        yield from _commands(document)
    if len(document["front"]) > 1:
        yield _table("Less memory: the fastest layout that needs no more", document["front"])
    if document["by_gpus"]:
        yield _table("Best by number of GPUs", document["by_gpus"], first="GPUs")


def _why(document: dict[str, Any]) -> Iterator[RenderableType]:
    lines = why_lines(document)
    if lines:
        yield Text("\nCompared with no. 1", "bold")
        yield from (Text(f"  {line}") for line in lines)


def _commands(document: dict[str, Any]) -> Iterator[RenderableType]:
    yield Text("\nReady to type", "bold")
    yield from (Text(f"  {entry['command']}") for entry in document["best"])


def _table(title: str, entries: list[dict[str, Any]], *, first: str = "") -> Table:
    has_price = any("price_per_billion_tokens" in entry for entry in entries)
    has_cost = has_price or first == "GPUs"
    numbers = ["step", "tokens/s", "MFU", "memory"] + ["GPU-h/Gtok"] * has_cost
    numbers = [*([first] if first else []), *numbers, *["price/Gtok"] * has_price]
    table = plain_table(f"\n{title}", (*numbers, "layout"), left=("layout",))
    for column in table.columns[:-1]:
        column.no_wrap = True
    for number, entry in enumerate(entries, start=1):
        lead = {"#": [str(number)], "GPUs": [f"{entry['gpus']:,}"]}.get(first, [])
        if entry["settings"] is None:
            table.add_row(*lead, *[""] * (len(numbers) - len(lead)), entry["reason"])
        else:
            table.add_row(*lead, *entry_cells(entry, has_cost=has_cost), entry["layout"])
    return table
