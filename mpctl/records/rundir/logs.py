"""The logs of ranks as entries, and the logs of many ranks as one.

An entry is a line with the lines that belong to it: indented ones below it, a closing bracket, a
complete traceback. Two entries are *alike* when they differ only in values of a rank or of the
moment: rank numbers, coordinates, addresses, process ids, times and durations. A `Template` splits
a text at these values; entries with the same `parts` are alike.

>>> Template.of("rank 3 waited 12.5 s for 10.0.0.7:29500")
Template(parts=('rank ', ' waited ', ' s for ', ':', ''), values=('3', '12.5', '10.0.0.7', '29500'))

The merging law. Entries are ordered by attempt and by the last step that the rank had done when it
printed them, since ranks take their steps together while their lines carry no time. Within a step,
entries that are alike become one; they have the order of the first rank, and an entry that only a
later rank printed follows the one that this rank printed before it. Attempts are counted from the
end, so that logs that lack their beginning are merged alike. Values in which the ranks of an entry
differ are shown as `…`.

>>> logs = {0: ["rank 0 is up", "step 1: loss 5.1"], 1: ["rank 1 is up", "slow disk",
...         "step 1: loss 5.1"]}
>>> [(entry.ranks, entry.text) for entry in merge_logs(logs)]
[((0, 1), 'rank … is up'), ((1,), 'slow disk'), ((0, 1), 'step 1: loss 5.1')]
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import zip_longest
from typing import NamedTuple

TRACEBACK = "Traceback (most recent call last):"
CLOSING = (")", "]", "}")
RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?")
"""Prefix of torch in each line of a traceback that ends a rank; the file's name has the rank too."""
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
ELLIPSIS = "…"
MOST_LINES = 1000
"""Lines of an entry; those that would belong to a longer one begin another."""


@dataclass(frozen=True, slots=True)
class Template:
    """A text split at its values: `parts` before, between and after them, one more than values."""

    parts: tuple[str, ...]
    values: tuple[str, ...] = ()

    @classmethod
    def of(cls, text: str) -> Template:
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
        """Take more lines; yields the entries that they complete. The last entry is not complete,
        since the next line may belong to it."""
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
        if not entry or not line or line.startswith(TRACEBACK) or len(entry) >= MOST_LINES:
            return False
        if line[0].isspace() or line in CLOSING:
            return True
        return entry[0].startswith(TRACEBACK) and (len(entry) == 1 or entry[-1][0].isspace())


def _without_prefix(line: str) -> str:
    line = line.rstrip()
    return RANK_PREFIX.sub("", line) if line.startswith("[rank") else line


@dataclass(frozen=True, slots=True)
class MergedEntry:
    """An entry of one or several ranks. text: its lines; ranks: that printed it, in order;
    repeats: the most times that one rank printed it within one step."""

    text: str
    ranks: tuple[int, ...]
    repeats: int = 1

    @property
    def lines(self) -> list[str]:
        return self.text.split("\n")


def merge_logs(logs: Mapping[int, Iterable[str]]) -> list[MergedEntry]:
    """The lines of each rank's log, by rank, merged."""
    return merge_entries({rank: counted_from_end(split_entries(logs[rank])) for rank in logs})


def counted_from_end(entries: Iterable[LogEntry]) -> list[LogEntry]:
    """The entries of a log with the last attempt numbered 0 and the one before it -1."""
    entries = list(entries)
    last = entries[-1].attempt if entries else 0
    return [LogEntry(attempt - last, step, text) for attempt, step, text in entries]


def merge_entries(logs: Mapping[int, Iterable[LogEntry]]) -> list[MergedEntry]:
    """The entries of each rank's log, by rank, merged; attempts of the same number are the same."""
    template_of = lru_cache(maxsize=100_000)(Template.of)
    sections: defaultdict[tuple[int, int], _Section] = defaultdict(_Section)
    for rank in sorted(logs):
        last: dict[tuple[int, int], _Group] = {}
        for entry in logs[rank]:
            section = sections[entry.section]
            before = last.get(entry.section, section.first)
            last[entry.section] = section.add(rank, template_of(entry.text), before)
    return [entry for key in sorted(sections) for entry in sections[key].merged()]


@dataclass(eq=False)
class _Group:
    """Entries that are alike. differs: by value, whether ranks differ in it; counts: how often each
    rank printed it; following: groups that began after this one, the first rank's first."""

    template: Template
    differs: list[bool]
    counts: Counter[int] = field(default_factory=Counter)
    following: list[_Group] = field(default_factory=list)

    def add(self, rank: int, template: Template) -> None:
        self.counts[rank] += 1
        if template is not self.template:
            pairs = zip(self.template.values, template.values, strict=True)
            for index, (first, other) in enumerate(pairs):
                self.differs[index] |= first != other

    def merged(self) -> MergedEntry:
        pairs = zip(self.template.values, self.differs, strict=True)
        text = self.template.text(ELLIPSIS if differs else value for value, differs in pairs)
        return MergedEntry(text, tuple(sorted(self.counts)), max(self.counts.values()))


class _Section:
    """The entries of one step. first: an empty group before the first of them."""

    def __init__(self) -> None:
        self.first = _Group(Template(()), [])
        self.groups: dict[tuple[str, ...], _Group] = {}

    def add(self, rank: int, template: Template, after: _Group) -> _Group:
        """Count an entry of a rank, whose entry before it is in the group `after`."""
        group = self.groups.get(template.parts)
        if group is None:
            group = _Group(template, [False] * len(template.values))
            self.groups[template.parts] = group
            after.following.append(group)
        group.add(rank, template)
        return group

    def merged(self) -> Iterator[MergedEntry]:
        """Depth first: what only later ranks printed after an entry, then what the first did."""
        pending = self.first.following[:1] + self.first.following[:0:-1]
        while pending:
            group = pending.pop()
            yield group.merged()
            pending += group.following[:1] + group.following[:0:-1]
