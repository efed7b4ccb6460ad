"""Parts of a document (parts.py) as a page: one file without network, with links to its sections.

Its policy (Content-Security-Policy) allows no source but the one script by its hash, or none where
the page has no script, so that even a word that escaped escaping could load and run nothing. Above
the first section stand title, verdict, warnings and figures, wherever they come in the document.
"""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files

from mpctl.render.charts import Chart, chart_svg
from mpctl.render.markup import Progress, Raw, el, join, no_progress, number
from mpctl.render.parts import Bar, Bars, DataTable, Facts, Figures, Lines, Part, Picture, Section, Sentence, Style
from mpctl.render.svg import picture_css

VERDICTS: Mapping[Style, str] = {
    "head": "verdict unknown",
    "passed": "verdict fits",
    "failed": "verdict over",
    "warning": "over",
}
SIGNS: Mapping[Style, str] = {"passed": "✓ ", "failed": "✗ ", "refused": "✗ ", "warning": "! ", "hint": "→ "}


def page_text(
    parts: Iterable[Part],
    *,
    command: str,
    of_command: str = "This page again:",
    before: Raw | str = "",
    data: Raw | str = "",
    script: str = "",
    sections: int = 0,
    on_progress: Progress = no_progress,
) -> str:
    """A document as a page. command: the line under the words `of_command`; before, data: markup above
    and below all else; script: what runs at the end; on_progress: called with ("page", sections drawn,
    sections)."""
    title, header = "mpctl", list[Raw]()
    drawn: list[tuple[Section, list[Raw]]] = []
    for part in parts:
        if getattr(part, "on", "both") == "terminal":
            continue
        if isinstance(part, Section):
            drawn.append((part, []))
            on_progress("page", len(drawn), sections)
        elif isinstance(part, Sentence) and part.style == "title":
            title = part.text
            header.insert(0, el("h1", el("bdi", title)))
        elif isinstance(part, Figures) or (isinstance(part, Sentence) and part.style in VERDICTS) or not drawn:
            header.append(_drawn(part))
        else:
            drawn[-1][1].append(_drawn(part))
    again = (Section("command", "Command"), [el("p", of_command), el("pre", el("code", command))])
    shown = [(section, content) for section, content in [*drawn, again] if content]
    body = el(
        "body",
        before,
        el("header", *header),
        _links(section for section, _ in shown),
        el("main", *(_section(section, content) for section, content in shown)),
        data,
        el("script", Raw(script)) if script else "",
    )
    return f"<!doctype html>\n{el('html', _head(title, script), body, lang='en')}\n"


def fragment(parts: Iterable[Part]) -> Raw:
    """A document's parts as a page has them, to stand inside of another page."""
    drawn = [part for part in parts if getattr(part, "on", "both") != "terminal"]
    return join(el("h2", part.title) if isinstance(part, Section) else _drawn(part) for part in drawn)


def _section(part: Section, content: Sequence[Raw]) -> Raw:
    key = f"h-{part.key}"
    below = [details(part.folded, *content)] if part.folded else content
    return el("section", el("h2", part.title, id=key), *below, id=part.key, aria_labelledby=key)


def _drawn(part: Part) -> Raw:
    if isinstance(part, Sentence):
        text = f"{SIGNS.get(part.style, '')}{part.text}"
        return el("p", text, class_=VERDICTS.get(part.style, "note" if part.style == "note" else None))
    if isinstance(part, DataTable):
        return details(part.title, table(part)) if part.fold == "both" else table(part)
    if isinstance(part, Facts | Figures):
        pairs = [el("div", el("dt", name), el("dd", value)) for name, value in part.rows]
        kind, title = ("facts", part.title) if isinstance(part, Facts) else ("tiles", "")
        return _titled(title, el("dl", *pairs, class_=kind)) if pairs else Raw()
    if isinstance(part, Lines):
        return _lines(part)
    if isinstance(part, Bars):
        return _bars(part)
    if isinstance(part, Picture):
        return join(part.drawn() if part.drawn else ())
    assert isinstance(part, Chart)
    note = el("p", part.note, class_="note") if part.note else Raw()
    return join([scrolling(el("figure", chart_svg(part)), part.title), note])


def _titled(title: str, *content: Raw) -> Raw:
    return join([el("h3", title), *content] if title else content)


def table(part: DataTable) -> Raw:
    """The table with its title as caption. The first cell of a row is its heading."""
    sides = ["l" if column.left else "r" for column in part.columns]
    heads = (el("th", c.title, scope="col", class_=side) for c, side in zip(part.columns, sides, strict=True))
    rows = [
        el(
            "tr",
            el("th", cells[0], scope="row", class_=sides[0]),
            *(el("td", cell, class_=side) for cell, side in zip(cells[1:], sides[1:], strict=False)),
            *(el("td") for _ in sides[len(cells) :]),
        )
        for cells in part.cells()
    ]
    stacked = {"class_": "stacked", "style": f"--figures:{len(sides) - 1}"} if part.is_stacked else {}
    whole = el("table", el("caption", part.title), el("thead", el("tr", *heads)), el("tbody", *rows), **stacked)
    return scrolling(whole, part.title)


def scrolling(content: Raw, label: str) -> Raw:
    """A region that scrolls by itself where its content is wider than the page, by keyboard too."""
    return el("div", content, class_="scroll", tabindex=0, role="region", aria_label=label)


def details(summary: str, *content: object) -> Raw:
    """A summary that opens what is below it."""
    return el("details", el("summary", summary), *content)


def _lines(part: Lines) -> Raw:
    if part.are_commands:
        return details(part.title, el("pre", el("code", "\n".join(part.lines))))
    return _titled(part.title, el("ul", *(el("li", line) for line in part.lines)))


def _bars(part: Bars) -> Raw:
    """A legend, and the bars; a bar without a name is as wide as the page."""
    if len(part.bars) == 1 and not part.bars[0].name:
        return _titled(part.title, legend(part.names), el("div", _bar(part, part.bars[0]), class_="one"))
    rows = (el("li", el("span", bar.name), _bar(part, bar), el("span", bar.text)) for bar in part.bars)
    return _titled(part.title, legend(part.names), el("ul", *rows, class_="bars"))


def legend(names: Iterable[str]) -> Raw:
    """A swatch and a name for each part of a bar, in order."""
    items = (el("li", el("i", class_=f"f f{at}"), name) for at, name in enumerate(names))
    return el("ul", *items, class_="legend", aria_label="Legend")


def _bar(part: Bars, bar: Bar) -> Raw:
    names, drawn = [], []
    for at, (name, size) in enumerate(zip(part.names, bar.sizes, strict=True)):
        if size > 0:
            names.append(f"{name} {part.form(size)}")
            width = f"width:{number(100 * size / (part.whole or 1))}%"
            drawn.append(el("i", class_=f"f f{at}", style=width, title=names[-1]))
    if part.limit is not None:
        drawn.append(el("b", class_="limit", style=f"left:{number(100 * part.limit / (part.whole or 1))}%"))
    return el("span", *drawn, class_="bar", role="img", aria_label=", ".join(names))


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


def _links(sections: Iterable[Section]) -> Raw:
    items = (el("li", el("a", part.title, href=f"#{part.key}")) for part in sections)
    return el("nav", el("ul", *items), aria_label="Sections")
