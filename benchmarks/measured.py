"""Parts of pages that a benchmark writes, between two lines that mark each:
`<!-- measured: NAME -->` and `<!-- end -->`."""

from __future__ import annotations

import re
from pathlib import Path


def write_part(name: str, text: str, page: Path) -> None:
    """Replace the text between the marks of a name. Raises ValueError without them."""
    before = page.read_text("utf-8")
    begin, end = re.escape(f"<!-- measured: {name} -->"), re.escape("<!-- end -->")
    pattern = re.compile(rf"({begin}\n).*?(\n{end})", re.S)
    after, count = pattern.subn(lambda match: f"{match[1]}{text}{match[2]}", before)
    if count != 1:
        raise ValueError(f"{page} has {count} parts <!-- measured: {name} -->")
    page.write_text(after, "utf-8")
