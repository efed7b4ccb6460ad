"""Elements of HTML and SVG as text in which every word of a job is escaped.

A `Raw` is markup; any other text is words and is escaped where it enters an element, so that a
model called `</script><b>` is shown as such. What XML cannot hold (control characters) becomes
U+FFFD.

>>> el("b", "1 < 2", class_="x")
'<b class="x">1 &lt; 2</b>'
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from pathlib import Path

from mpctl.core.errors import InputError

EMPTY = frozenset({"meta", "input", "br"})  # elements of HTML without an end
UNFIT = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")

Progress = Callable[[str, int, int], None]  # (what is drawn, parts done, parts)


def no_progress(what: str, done: int, parts: int) -> None:
    """Ignore what is reported: the default where nobody watches the progress."""


class Raw(str):
    """Markup, which is escaped already."""


def words(text: object) -> Raw:
    """A text as markup: escaped, without characters that XML cannot hold. Markup stays as it is."""
    return text if isinstance(text, Raw) else Raw(html.escape(UNFIT.sub("\ufffd", str(text))))


def el(tag: str, *children: object, **attributes: object) -> Raw:
    """An element. `class_` is the attribute class, `aria_label` aria-label; None leaves an
    attribute out, True gives it no value.
    """
    named = "".join(_attribute(name, value) for name, value in attributes.items())
    inside = "".join(map(words, children))
    return Raw(f"<{tag}{named}>" if tag in EMPTY else f"<{tag}{named}>{inside}</{tag}>")


def join(parts: object) -> Raw:
    """Markup, one after the other."""
    assert not isinstance(parts, str)
    return Raw("".join(map(words, parts)))  # type: ignore[call-overload]


def _attribute(name: str, value: object) -> str:
    if value is None or value is False:
        return ""
    key = name.rstrip("_").replace("_", "-")
    return f" {key}" if value is True else f' {key}="{words(value)}"'


def number(value: float) -> str:
    """A coordinate with two decimals at most."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def write_text(path: Path, text: str, *, option: str) -> None:
    """Write a file; raises InputError, which names the option, where it cannot be written."""
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise cannot_write(path, error, option) from None


def cannot_write(path: Path, error: OSError, option: str) -> InputError:
    """The error of a file that an option names and that cannot be written."""
    message = f"{path}: {error.strerror or error}"
    return InputError.of("unwritable", option, message, "name a file in a folder that exists")
