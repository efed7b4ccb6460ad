"""What sections are made of: a titled section, a table that scrolls, a bar of stacked parts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mpctl.render.markup import Raw, el, join, number


def section(key: str, title: str, *content: object) -> Raw:
    """A section with its heading. key: its id, which links lead to."""
    return el("section", el("h2", title, id=f"h-{key}"), *content, id=key,
              aria_labelledby=f"h-{key}")  # fmt: skip


def table(
    caption: str, columns: Sequence[str], rows: Iterable[Sequence[object]], *, left: int = 1
) -> Raw:
    """A table with a caption. left: how many of the first columns are words; the others are
    numbers. The first cell of a row is its heading.
    """
    sides = ["l" if at < left else "r" for at in range(len(columns))]
    head = join(
        el("th", name, scope="col", class_=side) for name, side in zip(columns, sides, strict=True)
    )
    body = join(
        el("tr", el("th", row[0], scope="row"), *(
            el("td", cell, class_=side) for cell, side in zip(row[1:], sides[1:], strict=True)
        ))
        for row in rows
    )  # fmt: skip
    whole = el("table", el("caption", caption), el("thead", el("tr", head)), el("tbody", body))
    return scrolling(whole, caption)


def scrolling(content: Raw, label: str) -> Raw:
    """A region that scrolls by itself where its content is wider than the page, by keyboard too."""
    return el("div", content, class_="scroll", tabindex=0, role="region", aria_label=label)


def details(summary: str, *content: object) -> Raw:
    """A summary that opens what is below it."""
    return el("details", el("summary", summary), *content)


def note(*content: object) -> Raw:
    """A paragraph in small print."""
    return el("p", *content, class_="note")


@dataclass(frozen=True, slots=True)
class Share:
    """A part of a bar: its name, its size and the size in words."""

    name: str
    size: float
    text: str


def bar(shares: Sequence[Share], whole: float, *, limit: float | None = None) -> Raw:
    """Parts side by side. whole: the size that fills the width; limit: the size at which a line
    stands."""
    parts = [
        el(
            "i",
            class_=f"f f{at}",
            style=f"width:{number(100 * share.size / (whole or 1))}%",
            title=f"{share.name} {share.text}",
        )
        for at, share in enumerate(shares)
        if share.size > 0
    ]
    line = [] if limit is None else [
        el("b", class_="limit", style=f"left:{number(100 * limit / (whole or 1))}%")
    ]  # fmt: skip
    label = ", ".join(f"{share.name} {share.text}" for share in shares if share.size > 0)
    return el("span", *parts, *line, class_="bar", role="img", aria_label=label)


def legend(names: Iterable[str]) -> Raw:
    """A swatch and a name for each part of a bar, in order."""
    items = (el("li", el("i", class_=f"f f{at}"), name) for at, name in enumerate(names))
    return el("ul", *items, class_="legend", aria_label="Legend")
