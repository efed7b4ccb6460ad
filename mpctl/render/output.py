"""Write to stdout and stderr without rich: a JSON document, issues, marks as plain letters.

Marks become plain letters for streams that cannot show them: `→` is `->` in ASCII and Latin-1.

>>> show_marks(io.TextIOWrapper(io.BytesIO()))
>>> "✓ a → b · ü".encode("ascii", HANDLER)
b'ok a -> b - ?'
"""

from __future__ import annotations

import codecs
import io
import json
import sys
from collections.abc import Sequence
from typing import Any, TextIO

from mpctl.core.errors import ErrorDocument, Issue


def print_json(document: Any) -> None:
    """Print a document as JSON on stdout, on one line."""
    json.dump(document, sys.stdout)
    print()


def print_issues(issues: Sequence[Issue], *, wants_json: bool) -> None:
    """All issues of a command: as JSON on stdout, or else each with its way out on stderr."""
    if wants_json:
        document: ErrorDocument = {"schema": "mpctl.error/1", "issues": [issue.as_dict() for issue in issues]}
        print_json(document)
        return
    from mpctl.render.console import Console, marked

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    for issue in issues:
        text = marked("✗", (issue.where, "bold"), f": {issue.message}", (f"  [{issue.rule}]", "dim"))
        if issue.hint:
            text.append("\n  → ", "cyan").append(issue.hint)
        console.print(text)


def print_warnings(messages: Sequence[str]) -> None:
    """One line each on stderr, so that stdout stays the result."""
    from mpctl.render.console import Console, marked

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    for message in messages:
        console.print(marked("!", message))


HANDLER = "mpctl-marks"
PLAIN = {
    "✓": "ok",
    "✗": "x",
    "→": "->",
    "←": "<-",
    "·": "-",
    "…": "...",
    "≠": "!=",
    "−": "-",
    "–": "-",
    "—": "-",
    "│": "|",
    "━": "=",
    "─": "-",
    "╸": "=",
    "╺": "-",
    "Φ": "Phi",
    "µ": "u",
    "×": "x",
    "±": "+-",
    "≤": "<=",
    "≥": ">=",
    "•": "*",
    "’": "'",
    "“": '"',
    "«": "<<",
    "»": ">>",
    "”": '"',
    **dict.fromkeys("┌┐└┘├┤┬┴┼", "+"),
    "┊": "|",
}


def show_marks(stream: TextIO) -> None:
    """Let the stream write what its encoding lacks in plain letters, and `?` for any other."""
    codecs.register_error(HANDLER, _replace)
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors=HANDLER)


def _replace(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return "".join(PLAIN.get(mark, "?") for mark in lacking), error.end
