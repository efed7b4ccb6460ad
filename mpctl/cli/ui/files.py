"""The files of the page, as the server sends them and as a static copy has them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files

from mpctl.cli.ui.answers import NAMES

FILES = {"ui.js": "text/javascript", "page.js": "text/javascript", "ui.css": "text/css"}
SOURCES = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'"
)
POLICY = f"{SOURCES}; frame-ancestors 'none'"


def page(first: Mapping[str, str], *, token: str = "", loading: str = "") -> str:
    """The page with the controls that it begins with. token: of the server that it asks; loading: what it says while
    the planner of a static copy loads."""
    from mpctl.render.markup import Raw, el
    from mpctl.render.plan_svg import textures

    about = {"token": token, "loading": loading, "first": dict(first), "names": NAMES}
    defs = el("svg", textures(), width=0, height=0, aria_hidden="true", class_="defs")
    policy = Raw(f'<meta http-equiv="Content-Security-Policy" content="{SOURCES}; worker-src \'self\'">')
    text = _file("ui.html").replace("{{policy}}", "" if token else policy).replace("{{defs}}", str(defs))
    return text.replace("{{first}}", json.dumps(about).replace("<", "\\u003c"))


def content(name: str) -> str:
    """A file of the page; its styles are those of `plan --html` and its own."""
    from mpctl.render.page import page_file
    from mpctl.render.svg import picture_css

    if name == "page.js":
        return page_file(name)
    return picture_css() + page_file("page.css") + _file(name) if name == "ui.css" else _file(name)


def _file(name: str) -> str:
    return files("mpctl.cli.ui").joinpath(name).read_text("utf-8")
