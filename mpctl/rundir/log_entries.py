"""The log of one rank as entries: what was printed at once, and what of it is the rank's own.

An entry is a line with the lines that belong to it: indented ones below it, a closing bracket, the
whole of a traceback. Two entries are *alike* when they differ only in values that are a rank's own
or the moment's: rank numbers, coordinates, addresses, process ids, times and durations. A
`Template` splits a text at these values; entries with the same `parts` are alike.

>>> Template.of("rank 3 waited 12.5 s for 10.0.0.7:29500")
Template(parts=('rank ', ' waited ', ' s for ', ':', ''), values=('3', '12.5', '10.0.0.7', '29500'))
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

TRACEBACK = "Traceback (most recent call last):"
CLOSING = (")", "]", "}")
RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?")
"""How torch begins each line of a traceback that ends a rank; the file's name says which rank."""
ATTEMPT = re.compile(r"^rank \d+ of \d+, coordinates ")
"""The first line that a worker prints."""
STEP = re.compile(r"^step (\d+): ")
VALUE = re.compile(
    r"""
      \[? [IWEF]\d{4} [ ] \d\d:\d\d:\d\d [\d.]* (?: [ ]+\d+ )? (?= [ ] )  # glog: W1122 02:39:50.194
    | \d{4}-\d\d-\d\d [T _] \d\d:\d\d:\d\d (?: [.,]\d+ )? (?: Z | [+-]\d\d:?\d\d )?
    | \b \d{1,2}:\d\d:\d\d (?: [.,]\d+ )?
    | 0x [0-9a-fA-F]+
    | (?<= '(?:tp|cp|dp|pp|ep)':[ ] ) \d+                                 # coordinates
    | (?i: (?<= \brank[ =:] ) | (?<= \brank ) | (?<= \branks[ ] ) ) \d+
    | (?i: (?<= \bpid[ =:] ) | (?<= \bpid:[ ] ) | (?<= \bprocess[ ] ) | (?<= \bthread[ ] ) ) \d+
    | (?: (?<= cuda: ) | (?<= \bGPU[ ] ) ) \d+
    | \b \d{1,3} (?: \.\d{1,3} ){3} \b                                    # IPv4
    | (?<= [\w\]]: ) \d{4,5} \b                                           # port
    | \b \d+ (?: \.\d+ )? (?= [ ]? (?: ms | us | µs | s | sec | seconds | min ) \b )
    """,
    re.VERBOSE,
)


@dataclass(frozen=True, slots=True)
class Template:
    """A text split at its values: `parts` before, between and after them, one more than values."""

    parts: tuple[str, ...]
    values: tuple[str, ...] = ()

    @classmethod
    def of(cls, text: str) -> Template:
        """The template of a text."""
        return cls(tuple(VALUE.split(text)), tuple(VALUE.findall(text)))

    def text(self, values: Iterable[str]) -> str:
        """The text with other values, as many as it has."""
        pairs = zip_longest(self.parts, values, fillvalue="")
        return "".join(part + value for part, value in pairs)


class LogEntry(NamedTuple):
    """One entry. attempt: how many attempts the log has begun before it; step: the last step that
    the rank had done."""

    attempt: int
    step: int
    text: str

    @property
    def section(self) -> tuple[int, int]:
        """(attempt, step): entries of several ranks are ordered by it."""
        return self.attempt, self.step


def split_entries(lines: Iterable[str]) -> Iterator[LogEntry]:
    """The entries of a rank's log, or of a part of it, in order; empty lines are left out."""
    splitter = EntrySplitter()
    yield from splitter.feed(lines)
    yield from splitter.flush()


class EntrySplitter:
    """Splits a log that is still written. attempt, step: as in LogEntry, of the lines so far."""

    def __init__(self) -> None:
        self.attempt = self.step = 0
        self.lines: list[str] = []

    def feed(self, lines: Iterable[str]) -> Iterator[LogEntry]:
        """Take more lines; the entries that they complete. The last entry is not complete, since
        the next line may belong to it."""
        for line in map(_without_prefix, lines):
            if self._continues(line):
                self.lines.append(line)
            elif line:
                yield from self.flush()
                self._begin(line)

    def flush(self) -> Iterator[LogEntry]:
        """The last entry, if any, taken as complete."""
        if self.lines:
            yield LogEntry(self.attempt, self.step, "\n".join(self.lines))
            self.lines = []

    def _begin(self, line: str) -> None:
        self.lines = [line]
        if line.startswith("step ") and (number := STEP.match(line)):
            self.step = int(number[1])
        elif line.startswith("rank ") and ATTEMPT.match(line):
            self.attempt, self.step = self.attempt + 1, 0

    def _continues(self, line: str) -> bool:
        """Whether a line belongs to the entry before it."""
        entry = self.lines
        if not entry or not line or line.startswith(TRACEBACK):
            return False
        if line[0].isspace() or line in CLOSING:
            return True
        return entry[0].startswith(TRACEBACK) and (len(entry) == 1 or entry[-1][0].isspace())


def _without_prefix(line: str) -> str:
    line = line.rstrip()
    return RANK_PREFIX.sub("", line) if line.startswith("[rank") else line
