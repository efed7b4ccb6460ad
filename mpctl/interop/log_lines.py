"""The lines of a log: bounded, without colours, with the rank that printed them.

A log is untrusted and may be large. A file is read in pieces, at most LARGEST bytes of it; of a
line LONGEST characters are kept. A carriage return ends a line as a newline does, as progress bars
write it, but only a newline counts one. Escape sequences (ECMA-48) and other characters that do not
print are taken out, so that nothing of a log reaches a terminal as more than text.

The rank is that of srun's `--label` (`3: `), of torchrun's `--tee` (`[default3]:`, `[rank3]:`), or
empty.

>>> [(line.number, line.rank, line.text) for line in lines_of(["[rank0]:a\\rb\\n\\x1b[31m1: c"])]
[(1, '0', 'a'), (1, '', 'b'), (2, '1', 'c')]
"""

from __future__ import annotations

import re
from codecs import getincrementaldecoder
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from mpctl.core.errors import InputError

LONGEST = 2**14
"""Characters of a line that are read; the rest of it is not."""
LARGEST = 2**30
"""Bytes of a file that are read."""
PIECE = 2**20
_ESCAPE = re.compile(r"\x1b(?:\[[0-?]{0,32}[ -/]{0,8}[@-~]|\][^\x07\x1b]{0,256}\x07?|[@-Z\\-_])")
_RANK = re.compile(r" {0,8}(?:\[(?:rank|default)(\d{1,7})\]:? ?|(\d{1,7}): )")
_ENDS = re.compile(r"(\r|\n)")


class LogLine(NamedTuple):
    """A line. number: from 1, of the line in its file. rank: of the process that printed it, as
    its prefix says; empty without one."""

    number: int
    rank: str
    text: str


def lines_of(pieces: Iterable[str]) -> Iterator[LogLine]:
    """The lines that are not blank of a text in pieces, read while they are asked for."""
    number, kept = 1, ""
    for piece in chain(pieces, ["\n"]):
        for part in _ENDS.split(piece):
            if part not in ("\r", "\n"):
                kept += part[: LONGEST - len(kept)]
                continue
            if kept and not kept.isspace():
                yield _line(number, kept)
            kept = ""
            number += part == "\n"


def file_pieces(path: Path) -> Iterator[str]:
    """The text of a file, up to LARGEST bytes. Raises InputError where it cannot be read."""
    decoder = getincrementaldecoder("utf-8")("replace")
    try:
        with path.open("rb") as file:
            for _ in range(LARGEST // PIECE):
                piece = file.read(PIECE)
                yield decoder.decode(piece, final=not piece)
                if not piece:
                    return
    except OSError as error:
        raise InputError.of("no-such-file", str(path), error.strerror or str(error)) from None


def plain(text: str, most: int = LONGEST) -> str:
    """The text without escape sequences and characters that do not print, at most so long."""
    if text.isprintable():
        return text[:most]
    kept = _ESCAPE.sub("", text)
    return "".join(c for c in kept if c.isprintable() or c == "\t")[:most]


def _line(number: int, text: str) -> LogLine:
    text, rank = plain(text), ""
    for _ in range(3):  # `[default0]:[rank0]: `
        if (found := _RANK.match(text)) is None:
            break
        rank, text = rank or found[1] or found[2], text[found.end() :]
    return LogLine(number, rank, text)
