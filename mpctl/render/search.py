"""What a search found: the best layouts, why the first is the first, what less memory costs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from mpctl.plan import make_plan
from mpctl.render.html.front import Point
from mpctl.render.html.page import plan_page
from mpctl.render.markup import write_text
from mpctl.search.answer import Answer
from mpctl.search.report import layout_text
from mpctl.units import bytes_text, count_text, seconds_text

AIMS = {
    "tokens": "most tokens a second",
    "memory": "least memory",
    "cost": "fewest GPU-hours a token",
}


def write_page(path: Path, answer: Answer, *, command: str) -> None:
    """The page of the best layout's plan, with what was estimated beside it."""
    plan = make_plan(answer.best[0].job)
    front = {choice.layout for choice in answer.front}
    points = [
        Point(f"no. {number}", p.seconds, p.bytes, p.layout in front, layout_text(p.layout))
        for number, p in enumerate(sorted(answer.seen), start=1)
    ]
    page = plan_page(plan, plan.require_legal(), command=command, points=points)
    write_text(path, page, option="--html")


def print_search(document: dict[str, Any]) -> None:
    """On stdout; what was not finished is said on stderr."""
    if not document["is_complete"]:
        note = Text("! stopped: the best that was found so far", "bold yellow")
        Console(stderr=True, highlight=False).print(note)
    Console(highlight=False, soft_wrap=True).print(*_parts(document), sep="\n")


def _parts(document: dict[str, Any]) -> Iterator[RenderableType]:
    name = document["model"] or document["job"] or "the model"
    gpus = document["best"][0]["gpus"] if document["best"] else document["gpus"]
    yield Text.assemble(
        (f"{name} on {gpus} GPUs", "bold"),
        f" of {document['device']}, as {document['runtime']} runs it: ",
        AIMS[document["objective"]],
        (f"   ({document['estimated']:,} layouts estimated, the others ruled out)", "dim"),
    )
    if document["best"]:
        yield _table("Best layouts", document["best"], first="#")
        yield _band(document["best"][0])
        yield from _why(document)
        yield from _commands(document)
    if len(document["front"]) > 1:
        yield _table("Less memory, the fastest that needs no more", document["front"])
    if document["by_gpus"]:
        yield _table("Best by number of GPUs", document["by_gpus"], first="gpus")


def _why(document: dict[str, Any]) -> Iterator[RenderableType]:
    own = document["own_reason"]
    lines = [*document["reasons"], *([f"the job as it stands, {own}"] if own else [])]
    if lines:
        yield Text("\nThe first beside others", "bold")
        yield from (Text(f"  {line}") for line in lines)


def _commands(document: dict[str, Any]) -> Iterator[RenderableType]:
    yield Text("\nReady to type", "bold")
    yield from (Text(f"  {entry['command']}") for entry in document["best"])


def _band(entry: dict[str, Any]) -> Text:
    """How far a measured step may lie from the first one's."""
    low, high = (seconds_text(entry[f"step_seconds_{end}"]) for end in ("low", "high"))
    note = f"nine of ten measured steps of the first would lie between {low} and {high}"
    return Text("; ".join([note, *entry["extrapolates"]]), style="dim")


def _table(title: str, entries: list[dict[str, Any]], *, first: str = "") -> Table:
    has_price = any("price_per_billion_tokens" in entry for entry in entries)
    has_cost = has_price or first == "gpus"
    numbers = ["step", "tokens/s", "MFU", "memory"] + ["GPU-h/Gtok"] * has_cost
    numbers = [*([first] if first else []), *numbers, *["price/Gtok"] * has_price]
    table = Table(title=f"\n{title}", title_justify="left", title_style="bold", box=None,
                  pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))  # fmt: skip
    for column in numbers:
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("layout", overflow="fold")
    for number, entry in enumerate(entries, start=1):
        lead = {"#": [str(number)], "gpus": [str(entry["gpus"])]}.get(first, [])
        if entry["settings"] is None:
            table.add_row(*lead, *[""] * (len(numbers) - len(lead)), "nothing fits")
        else:
            table.add_row(*lead, *_cells(entry, has_cost), entry["layout"])
    return table


def _cells(entry: dict[str, Any], has_cost: bool) -> list[str]:
    cells = [
        seconds_text(entry["step_seconds"]), count_text(entry["tokens_per_second"]),
        f"{entry['mfu']:.0%}", bytes_text(entry["peak_bytes"]),
    ]  # fmt: skip
    if has_cost:
        cells.append(count_text(entry["gpu_hours_per_billion_tokens"]))
    if "price_per_billion_tokens" in entry:
        cells.append(count_text(entry["price_per_billion_tokens"]))
    return cells
