"""The logs of many ranks as one: what several of them printed stands there once, with their ranks.

The merging law. Entries (log_entries.py) are ordered by attempt and by the last step that the rank
had done when it printed them, since ranks take their steps together while their lines carry no
time. Within a step, entries that are alike become one; the order of the first rank is kept, and
what only a later rank printed follows the entry that it printed before. Attempts are counted from
the end, so that logs cut at their beginning are merged alike. Values in which the ranks of an entry
differ are shown as `…`.

>>> logs = {0: ["rank 0 is up", "step 1: loss 5.1"], 1: ["rank 1 is up", "slow disk",
...         "step 1: loss 5.1"]}
>>> [(entry.ranks, entry.text) for entry in merge_logs(logs)]
[((0, 1), 'rank … is up'), ((1,), 'slow disk'), ((0, 1), 'step 1: loss 5.1')]
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from mpctl.rundir.log_entries import LogEntry, Template, split_entries

ELLIPSIS = "…"


@dataclass(frozen=True, slots=True)
class MergedEntry:
    """An entry of one or several ranks. text: its lines; ranks: that printed it, in order;
    repeats: how many times the rank printed it that printed it most, within one step."""

    text: str
    ranks: tuple[int, ...]
    repeats: int = 1

    @property
    def lines(self) -> list[str]:
        """The lines of the text."""
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
    """The entries of one step. first: stands before the first of them."""

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
