"""What a terminal shows, as one SVG file that needs nothing from the network."""

from __future__ import annotations

import re
from collections.abc import Sequence
from io import StringIO
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console, RenderableType
from rich.terminal_theme import SVG_EXPORT_THEME

from mpctl.errors import InputError

WIDTH = 108
FONT_FACES = re.compile(r"@font-face \{\{.*?\}\}", re.S)


def write_svg(path: Path, parts: Sequence[RenderableType], *, title: str) -> None:
    """Draw the renderables under each other, 108 columns wide.

    rich's own format names web fonts by address; they are left out, and the reader's own monospace
    font is used. Raises InputError when the file cannot be written.
    """
    canvas = Console(record=True, width=WIDTH, highlight=False, file=StringIO())
    canvas.print(*parts, sep="\n")
    format_ = FONT_FACES.sub("", CONSOLE_SVG_FORMAT).replace("Fira Code", "DejaVu Sans Mono")
    text = canvas.export_svg(title=title, code_format=format_, theme=SVG_EXPORT_THEME)
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise InputError.of("unwritable", "--svg", f"{path}: {error.strerror}") from None
