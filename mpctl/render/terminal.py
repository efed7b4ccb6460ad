"""Parts of a document (parts.py) on a terminal.

Tables never break a number; prose is broken at the width of the terminal, commands and lists are not. An
empty line stands before each section, table and picture.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rich.console import RenderableType
from rich.text import Text

from mpctl.render.console import MARKS, Console, NamedRows, get_console, plain_table
from mpctl.render.parts import DataTable, Facts, Lines, Part, Picture, Section, Sentence, Style

STYLES: Mapping[Style, str] = {
    "title": "bold",
    "lead": "bold",
    "head": "bold",
    "passed": "bold green",
    "failed": "bold red",
    "note": "dim",
}
SIGNS: Mapping[Style, str] = {"passed": "✓", "failed": "✗", "refused": "✗", "warning": "!", "hint": "→"}


def print_parts(parts: Iterable[Part], *, full: bool = False, console: Console | None = None) -> None:
    """Print a document on stdout. full: with folded parts and wide columns."""
    console, is_first, gap, has_facts = console or get_console(), True, False, False
    for part in parts:
        if getattr(part, "on", "page") == "page" or (getattr(part, "fold", "no") != "no" and not full):
            continue
        gap = gap or isinstance(part, Section | DataTable | Picture) or bool(getattr(part, "title", ""))
        gap = gap or (isinstance(part, Facts) and has_facts)
        has_facts = has_facts or isinstance(part, Facts)
        if isinstance(part, Section):
            continue
        if gap and not is_first:
            console.print()
        is_first, gap = False, False
        for drawn in _drawn(part, full=full):
            _print(console, drawn, soft_wrap=isinstance(part, Lines))


def _print(console: Console, drawn: RenderableType, *, soft_wrap: bool) -> None:
    """Print; into a pipe or a file without the blanks with which rich fills lines."""
    if console.is_terminal or console.record:
        console.print(drawn, soft_wrap=soft_wrap)
        return
    with console.capture() as captured:
        console.print(drawn, soft_wrap=soft_wrap)
    lines = "".join(f"{line.rstrip()}\n" for line in captured.get().splitlines())
    console.print(lines, soft_wrap=True, markup=False, highlight=False, end="")


def _drawn(part: Part, *, full: bool) -> Iterable[RenderableType]:
    if isinstance(part, Sentence):
        return [sentence(part)]
    if isinstance(part, DataTable):
        title = [Text(part.title, "bold")] if part.title else []
        return [*title, drawn_table(part, full=full)]
    if isinstance(part, Facts):
        title = [Text(part.title, "bold")] if part.title else []
        return [*title, NamedRows(part.rows)]
    if isinstance(part, Lines):
        return [Text(part.title, "bold"), *(Text(f"  {line}") for line in part.lines)]
    return part.letters() if isinstance(part, Picture) and part.letters else []


def sentence(part: Sentence) -> Text:
    """The sentence after its mark; of what is wrong the place (`parallel.tp: ...`) is bold."""
    sign = SIGNS.get(part.style, "")
    place, colon, rest = part.text.partition(": ")
    text = Text.assemble((f"{sign} ", MARKS[sign]) if sign else "")
    if colon and part.style in ("warning", "refused"):
        return text.append(place, "bold").append(colon + rest)
    return text.append(part.text, STYLES.get(part.style, ""))


def drawn_table(part: DataTable, *, full: bool = True) -> RenderableType:
    """The table without its title, and without its wide columns unless full."""
    shown = [at for at, column in enumerate(part.columns) if full or not column.is_wide]
    columns = [part.columns[at] for at in shown]
    left = [column.title for column in columns if column.left]
    drawn = plain_table([column.title for column in columns], left=left, whole=part.whole)
    for cells in part.cells():
        if len(cells) < len(part.columns):
            drawn.add_row(Text(cells[0], "bold"))
        else:
            drawn.add_row(*(Text(cells[at]) for at in shown))
    if part.has_sum:
        drawn.rows[-1].style = "bold"
    return drawn
