"""The frame of every page: one file without network, with links to its sections.

Its policy (Content-Security-Policy) allows no source but the one script by its hash, or none where
the page has no script, so that even a word that escaped escaping could load and run nothing. A
section has a heading; a table scrolls; a bar stacks its parts.
"""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections.abc import Iterable, Sequence
from importlib.resources import files
from typing import NamedTuple

from mpctl.render.markup import Raw, el, join, number
from mpctl.render.svg import picture_css


def section(key: str, title: str, *content: object) -> Raw:
    """A section with its heading. key: its id, which links lead to."""
    return el("section", el("h2", title, id=f"h-{key}"), *content, id=key, aria_labelledby=f"h-{key}")


def table(
    caption: str, columns: Sequence[str], rows: Iterable[Sequence[object]], *, left: int = 1, sides: Sequence[str] = ()
) -> Raw:
    """A table with a caption. left: how many of the first columns are words; the others are
    numbers; or sides: "l" or "r" for each column. The first cell of a row is its heading.
    """
    sides = sides or ["l" if at < left else "r" for at in range(len(columns))]
    head = join(el("th", name, scope="col", class_=side) for name, side in zip(columns, sides, strict=True))
    body = join(
        el(
            "tr",
            el("th", row[0], scope="row"),
            *(el("td", cell, class_=side) for cell, side in zip(row[1:], sides[1:], strict=True)),
        )
        for row in rows
    )
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


class Share(NamedTuple):
    """A part of a bar: its name, its size and the size in words."""

    name: str
    size: float
    text: str


def bar(shares: Sequence[Share], whole: float, *, limit: float | None = None) -> Raw:
    """Parts side by side. whole: the size that fills the width; limit: the size at which a line
    stands."""
    parts, names = [], []
    for at, share in enumerate(shares):
        if share.size > 0:
            names.append(f"{share.name} {share.text}")
            width = f"width:{number(100 * share.size / (whole or 1))}%"
            parts.append(el("i", class_=f"f f{at}", style=width, title=names[-1]))
    if limit is not None:
        parts.append(el("b", class_="limit", style=f"left:{number(100 * limit / (whole or 1))}%"))
    return el("span", *parts, class_="bar", role="img", aria_label=", ".join(names))


def legend(names: Iterable[str]) -> Raw:
    """A swatch and a name for each part of a bar, in order."""
    items = (el("li", el("i", class_=f"f f{at}"), name) for at, name in enumerate(names))
    return el("ul", *items, class_="legend", aria_label="Legend")


def tiles(figures: Iterable[tuple[str, str]]) -> Raw | str:
    """Figures with their names, side by side; nothing without figures."""
    shown = [el("div", el("dt", name), el("dd", figure)) for name, figure in figures]
    return el("dl", *shown) if shown else ""


def page_text(
    title: str,
    header: Raw,
    parts: Sequence[tuple[str, Raw]],
    *,
    command: str,
    of_command: str = "This page again:",
    before: Raw | str = "",
    data: Raw | str = "",
    script: str = "",
) -> str:
    """A page as HTML. parts: the sections by their names, whose ids are the names in small letters;
    command: the line under the words `of_command`; before, data: markup above and below all else;
    script: what runs at the end."""
    body = el(
        "body",
        before,
        header,
        _links(parts),
        el("main", *(part for _, part in parts), _again(of_command, command)),
        data,
        el("script", Raw(script)) if script else "",
    )
    return f"<!doctype html>\n{el('html', _head(title, script), body, lang='en')}\n"


def page_file(name: str) -> str:
    """The text of a file that pages are made with, such as `page.css`."""
    return files("mpctl.render.html").joinpath(name).read_text("utf-8")


def _head(title: str, script: str) -> Raw:
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    if script:
        digest = b64encode(hashlib.sha256(script.encode()).digest()).decode()
        policy += f"; script-src 'sha256-{digest}'"
    return el(
        "head",
        el("meta", charset="utf-8"),
        Raw(f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("title", title),
        el("style", Raw(picture_css() + page_file("page.css"))),
    )


def _links(parts: Sequence[tuple[str, Raw]]) -> Raw:
    named = [*(name for name, _ in parts), "Command"]
    items = (el("li", el("a", name, href=f"#{name.lower()}")) for name in named)
    return el("nav", el("ul", *items), aria_label="Sections")


def _again(what: str, command: str) -> Raw:
    return section("command", "Command", el("p", what), el("pre", el("code", command)))
