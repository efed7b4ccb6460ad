"""The style of all pictures: one sheet for pages and files, for light and dark schemes."""

from __future__ import annotations

import re
from importlib.resources import files


def picture_css() -> str:
    """The style sheet of a picture, for light and dark schemes."""
    return files("mpctl.render.html").joinpath("picture.css").read_text("utf-8")


def with_plain_colours(svg: str) -> str:
    """A picture whose colours of the reader's scheme each stand behind the same colour in light,
    which Inkscape, librsvg and others take: they drop the variable, and would fill with black.

    >>> with_plain_colours('<rect style="fill:var(--paper)"/>')
    '<rect style="fill:#ffffff;fill:var(--paper)"/>'
    """
    light = light_colours()

    def both(found: re.Match[str]) -> str:
        return f"{found[1]}:{light[found[2]]};{found[0]}" if found[2] in light else found[0]

    return re.sub(r"\b(fill|stroke): ?var\((--\w+)\)", both, svg)


def light_colours() -> dict[str, str]:
    """The colours of the light scheme by their names in the sheet: `--ink` -> `#1b1f24`."""
    css = picture_css()
    return dict(re.findall(r"(--\w+): (#\w+)", css[: css.index("@media")]))
