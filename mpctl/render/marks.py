"""Marks as plain letters for streams that cannot show them: `→` as `->` in ASCII and Latin-1.

>>> "✓ a → b · ü".encode("ascii", "mpctl-marks")
b'ok a -> b - ?'
"""

from __future__ import annotations

import codecs
import io
from typing import TextIO

HANDLER = "mpctl-marks"
PLAIN = {
    "✓": "ok", "✗": "x", "→": "->", "←": "<-", "·": "-", "…": "...", "≠": "!=", "−": "-",
    "–": "-", "—": "-", "│": "|", "━": "=", "─": "-", "╸": "=", "╺": "-", "Φ": "Phi", "µ": "u",
    "×": "x", "±": "+-", "≤": "<=", "≥": ">=", "•": "*", "’": "'", "“": '"', "”": '"',
    **dict.fromkeys("┌┐└┘├┤┬┴┼", "+"), "┊": "|",
}  # fmt: skip


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
