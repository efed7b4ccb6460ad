"""Code that all pictures share: the style sheet, stacking of parts, and the frame of a file.

A file needs nothing from the network. It follows the reader's light or dark scheme in a browser,
and is light in programs that know no CSS variables (`with_plain_colours`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.resources import files

from mpctl.render.markup import Raw, el, join, number

EDGE = 16  # around a file, in units of a picture
Part = tuple[Raw, float]  # a drawing and its height


def stacked(parts: Iterable[Part]) -> Part:
    """Parts below each other."""
    y, placed = 0.0, []
    for drawn, height in parts:
        placed.append(el("g", drawn, transform=f"translate(0 {number(y)})"))
        y += height
    return join(placed), y


def picture(label: str, part: Part, width: float, **attributes: object) -> Raw:
    """A drawing as a picture of a page. label: what it shows, for readers who do not see it."""
    drawn, height = part
    box = f"0 0 {number(width)} {number(height)}"
    return el("svg", el("title", label), drawn, viewBox=box, role="img", aria_label=label, **attributes)


def picture_file(label: str, part: Part, width: float, *, defs: Raw | str = "") -> str:
    """A drawing as an SVG file, with an edge around it."""
    drawn, height = part
    wide, high = number(width + 2 * EDGE), number(height + 2 * EDGE)
    svg = el(
        "svg",
        el("title", label),
        el("style", Raw(picture_css())),
        defs,
        el("rect", width="100%", height="100%", style="fill:var(--paper)"),
        el("g", drawn, transform=f"translate({EDGE} {EDGE})"),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {wide} {high}",
        width=wide,
        height=high,
        role="img",
        aria_label=label,
    )
    return with_plain_colours(svg) + "\n"


def picture_css() -> str:
    """The style sheet of a picture, for light and dark schemes."""
    return files("mpctl.render.html").joinpath("picture.css").read_text("utf-8")


def with_plain_colours(svg: str) -> str:
    """A picture with a light colour before each colour variable, for Inkscape, librsvg and others,
    which drop the variable and would otherwise fill with black.

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
