"""What every page is: one file without network, whose sections can be reached by links.

Its policy (Content-Security-Policy) allows no source but the one script by its hash, or none where
the page has no script, so that even a word that escaped escaping could load and run nothing.
"""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections.abc import Sequence
from importlib.resources import files

from mpctl.render.html.parts import section
from mpctl.render.markup import Raw, el
from mpctl.render.picture_style import picture_css


def page_text(
    title: str, header: Raw, parts: Sequence[tuple[str, Raw]], *, command: str,
    of_command: str = "This page again:", before: Raw | str = "", data: Raw | str = "",
    script: str = "",
) -> str:  # fmt: skip
    """A page as HTML. parts: the sections by their names, whose ids are the names in small letters;
    command: the line under the words `of_command`; before, data: markup above and below all else;
    script: what runs at the end."""
    body = el(
        "body", before, header, _links(parts),
        el("main", *(part for _, part in parts), _again(of_command, command)), data,
        el("script", Raw(script)) if script else "",
    )  # fmt: skip
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
        "head", el("meta", charset="utf-8"),
        Raw(f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("title", title),
        el("style", Raw(picture_css() + page_file("page.css"))),
    )  # fmt: skip


def _links(parts: Sequence[tuple[str, Raw]]) -> Raw:
    named = [*(name for name, _ in parts), "Command"]
    items = (el("li", el("a", name, href=f"#{name.lower()}")) for name in named)
    return el("nav", el("ul", *items), aria_label="Sections")


def _again(what: str, command: str) -> Raw:
    return section("command", "Command", el("p", what), el("pre", el("code", command)))
