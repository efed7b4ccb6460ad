"""One list of parts a document: its terminal and its page have the same titles and figures."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from mpctl.plan.planning.plan import load_plan
from mpctl.render.bench import report_parts
from mpctl.render.charts import Chart
from mpctl.render.console import Console
from mpctl.render.page import page_text
from mpctl.render.parts import Bars, Column, DataTable, Facts, Lines, Part, Section, Sentence, table_of
from mpctl.render.plan import PlanView, plan_parts
from mpctl.render.terminal import print_parts
from tests.measure.bench.reports import MADE

LLAMA = {
    "model": "llama-3-70b",
    "cluster": "dgx-h100",
    "cluster.nodes": 8,
    "parallel.tp": 8,
    "parallel.pp": 4,
    "training.global_batch_size": 256,
    "training.runtime": "megatron-core",
}


def plan_of(settings: dict[str, Any], source: str | None = None) -> list[Part]:
    plan = load_plan(source, settings)
    return list(plan_parts(plan, plan.require_legal(), PlanView(is_page=True)))


DOCUMENTS = {
    "plan": lambda: plan_of(LLAMA),
    "plan of many stages": lambda: plan_of({"parallel.pp": 32, "parallel.dp": 4}, "gpt3-175b-1024"),
    "plan of experts": lambda: plan_of({"cluster.nodes": 4, "cluster.gpus_per_node": 8, "parallel.ep": 4}),
    **{f"bench {name}": lambda name=name: list(report_parts(MADE[name](), Path("out"), is_page=True)) for name in MADE},
}


def terminal_of(parts: Iterable[Part], *, full: bool = True, width: int = 500) -> str:
    console = Console(width=width, file=StringIO(), record=True)
    print_parts(parts, full=full, console=console)
    return console.export_text()


def words(text: str) -> str:
    return " ".join(html.unescape(re.sub("<[^>]*>", " ", text)).split())


def texts_of(part: Part) -> Iterable[str]:
    """Every title and figure of a part."""
    if isinstance(part, Sentence):
        yield part.text
    if isinstance(part, DataTable):
        yield part.title
        yield from (column.title for column in part.columns)
        yield from (cell for cells in part.cells() for cell in cells)
    if isinstance(part, Facts):
        yield from (text for row in part.rows for text in (part.title, *row))
    if isinstance(part, Lines):
        yield from (part.title, *part.lines)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_terminal_and_page_have_the_same_titles_and_figures(name: str) -> None:
    parts = DOCUMENTS[name]()
    terminal, page = words(terminal_of(parts)), words(page_text(parts, command="mpctl"))
    for part in parts:
        if isinstance(part, Chart | Section | Bars) or getattr(part, "on", "both") != "both":
            continue
        for text in texts_of(part):
            assert words(text) in terminal, (part, text)
            assert words(text) in page, (part, text)


def test_the_shares_of_a_bar_are_columns_of_its_table() -> None:
    """Temporary memory was 996.0 MiB in the terminal and 792.0 MiB on the page of this plan."""
    parts = plan_of(LLAMA)
    (table,) = (part for part in parts if isinstance(part, DataTable) and part.title.startswith("Memory"))
    bars = next(part for part in parts if isinstance(part, Bars) and len(part.bars) == 4)
    titles = [column.title for column in table.columns]
    for bar, cells in zip(bars.bars, table.cells(), strict=True):
        shown = dict(zip(titles, cells, strict=True))
        assert [shown[name] for name in bars.names] == [bars.form(size) for size in bar.sizes]
        assert shown["on device"] == bar.text.removesuffix(" ✗ over") == bars.form(sum(bar.sizes))
    assert "996.0 MiB" in terminal_of(parts) and "792.0 MiB" not in terminal_of(parts)


def test_what_is_folded_is_shown_by_full() -> None:
    wide = Column("b", 1, is_wide=True)
    folded = table_of("folded", ("c",), [("3",)], fold="terminal")
    table = DataTable("open", (Column("a", 0, left=True), wide), [("1", "2")])
    parts: list[Part] = [Sentence("head", "head"), table, folded]
    lines = [line.split() for line in terminal_of(parts, full=False).splitlines()]
    assert lines == [["head"], [], ["open"], ["a"], ["1"]]
    lines = [line.split() for line in terminal_of(parts).splitlines()]
    assert lines[2:] == [["open"], ["a", "b"], ["1", "2"], [], ["folded"], ["c"], ["3"]]
    page = page_text(parts, command="mpctl")
    assert "<details" not in page and all(title in page for title in ("open", "folded"))
    assert "<details" in page_text([*parts, Section("s", "S"), folded._replace(fold="both")], command="mpctl")


def test_verdicts_and_warnings_stand_above_the_sections() -> None:
    parts = [Section("a", "A"), Sentence("below"), Sentence("it fits", "passed"), Sentence("beware", "warning")]
    header, _, rest = page_text(parts, command="mpctl").partition("</header>")
    assert "✓ it fits" in header and "! beware" in header and "below" in rest
