"""The collective log of a rank: which collective of which group it has started and finished.

It is in the memory that the rank shares with the agent of its host (breadcrumb.py). Logging a
collective is a few stores to memory, no system call, and the kernel keeps them when the process is
killed or stopped. So the launcher can report which rank did not join which collective, whatever the
transport: gloo, NCCL or shared memory. Unlike the flight recorders of torch and NCCL it needs no
answer from the process.

Collectives of a group are numbered from 1, in the order in which the rank starts them; all ranks of
a group start the same ones in the same order. Messages between two ranks are a group of these two,
numbered by the sender as it sends and by the receiver as it begins to receive.

Layout, in 64-bit little-endian integers: what the rank waits for (0: it does not wait, else
SHIFT * number + group + 1), then for each of MAX_GROUPS groups four integers (started, finished,
kind and bytes of the last one started) and GROUP_TEXT bytes of text, `tp 2-3`: name and ranks.

By hand: a rank of the groups tp (ranks 2-3) and dp_cp (ranks 0, 2) that waits in the 7th collective
of tp, its group 0, and has finished 5 of dp_cp holds 64 * 7 + 1 = 449; tp 7, 6; dp_cp 5, 5.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from mpctl.core.collectives import Kind

KINDS: tuple[Literal[""] | Kind, ...] = (  # in the order of the file's numbers
    "",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "send",
    "reduce",
    "all_to_all",
)
KIND_NUMBERS = {kind: number for number, kind in enumerate(KINDS)}
MAX_GROUPS, SHIFT = 31, 64
GROUP_TEXT = 96
GROUP_BYTES = 32 + GROUP_TEXT
LOG_BYTES = 8 + MAX_GROUPS * GROUP_BYTES
LONGEST_RANK_LIST = 1 << 24
RANGES = re.compile(r"\d{1,9}(-\d{1,9}(/\d{1,9})?)?(,\d{1,9}(-\d{1,9}(/\d{1,9})?)?)*")
Ranks = tuple[int, ...] | range


class CollectiveLog:
    """The log of one rank, written by that rank. memory: LOG_BYTES of zeros at a multiple of 8
    bytes, in the rank's breadcrumb."""

    def __init__(self, memory: memoryview) -> None:
        self.memory = memory
        self.words = memory.cast("q")
        self.groups: dict[str, GroupLog] = {}

    def group(self, name: str, ranks: Sequence[int]) -> GroupLog | None:
        """The log of a group, by its name and the global ranks of its members; the same one for
        the same arguments. None where there is no room for it."""
        text = f"{name} {rank_ranges(ranks)}"
        encoded = text.encode()
        if text not in self.groups:
            if len(self.groups) == MAX_GROUPS or len(encoded) > GROUP_TEXT:
                return None
            number = len(self.groups)
            start = 8 + number * GROUP_BYTES
            self.memory[start + 32 : start + 32 + len(encoded)] = encoded
            self.groups[text] = GroupLog(self, number, name, ranks)
        return self.groups[text]


class GroupLog:
    """Log of a rank for one group: `start`, then `wait` when it begins to wait for the result, then
    `finish`. Not thread-safe."""

    def __init__(self, log: CollectiveLog, number: int, name: str, ranks: Sequence[int]) -> None:
        self.log, self.name, self.ranks = log, name, ranks
        self.words, self.number = log.words, number
        self.at = 1 + number * (GROUP_BYTES // 8)
        self.started = self.finished = 0

    def start(self, kind: Kind, size: int) -> int:
        """Log that a collective starts; returns its number. size: bytes of the full message."""
        self.started = number = self.started + 1
        words, at = self.words, self.at
        words[at + 2] = KIND_NUMBERS[kind]
        words[at + 3] = size
        words[at] = number  # last: a reader of the number finds its kind and size
        return number

    def wait(self, number: int) -> None:
        """Log that from now on the rank waits for the result of collective `number`."""
        self.words[0] = SHIFT * number + self.number + 1

    def finish(self, number: int) -> None:
        """Log that collective `number`, and so all before it, has its result here."""
        words = self.words
        if number > self.finished:
            self.finished = number
            words[self.at + 1] = number
        words[0] = 0

    def channel(self, source: int, destination: int) -> GroupLog | None:
        """The log of messages from one member to another, by their positions in the group."""
        return self.log.group(self.name, (self.ranks[source], self.ranks[destination]))


@dataclass(frozen=True)
class GroupProgress:
    """Progress of a rank in one group. name: of the axis, `tp`; members: global ranks, `2-3`;
    started, finished: number of the last collective that was started or finished; kind, bytes: of
    the last one started."""

    name: str
    members: str
    started: int
    finished: int
    kind: str
    bytes: int

    @property
    def key(self) -> tuple[str, str]:
        """Identity of the group, the same on all of its ranks."""
        return self.name, self.members

    @property
    def ranks(self) -> Ranks:
        """The global ranks of the members. Raises ValueError where there are too many."""
        return parse_rank_ranges(self.members)


@dataclass(frozen=True)
class CollectiveProgress:
    """The state in the log of a rank. waiting: index in `groups` of the group that the rank waits
    in, None while it computes; number: of the collective there that it waits for."""

    groups: tuple[GroupProgress, ...] = ()
    waiting: int | None = None
    number: int = 0

    @property
    def waits_in(self) -> GroupProgress | None:
        return None if self.waiting is None else self.groups[self.waiting]


def read_collectives(content: bytes) -> CollectiveProgress:
    """The progress from LOG_BYTES of a breadcrumb; empty where they are cut or damaged."""
    if len(content) < LOG_BYTES:
        return CollectiveProgress()
    groups = tuple(_read_groups(content))
    number, group = divmod(struct.unpack_from("<q", content)[0], SHIFT)
    if not all(RANGES.fullmatch(group.members) for group in groups):
        return CollectiveProgress()
    if not 0 < group <= len(groups):
        return CollectiveProgress(groups)
    return CollectiveProgress(groups, group - 1, number)


def _read_groups(content: bytes) -> Iterator[GroupProgress]:
    """The groups that the rank has opened."""
    for start in range(8, LOG_BYTES, GROUP_BYTES):
        text = content[start + 32 : start + GROUP_BYTES].rstrip(b"\0").decode(errors="replace")
        if not text:
            break
        name, _, ranks = text.rpartition(" ")
        started, finished, kind, size = struct.unpack_from("<4q", content, start)
        word = KINDS[kind] if 0 <= kind < len(KINDS) else ""
        yield GroupProgress(name, ranks, started, finished, word, size)


def rank_ranges(ranks: Sequence[int]) -> str:
    """Ranks in a few characters, in the given order: `2-3`, `0-12/4` (every fourth), `5,0-1`."""
    parts, position = [], 0
    while position < len(ranks):
        count, step = _evenly_spaced(ranks, position)
        first, last = ranks[position], ranks[position + count - 1]
        if count == 1:
            parts.append(f"{first}")
        else:
            parts.append(f"{first}-{last}" + (f"/{step}" if step > 1 else ""))
        position += count
    return ",".join(parts)


def parse_rank_ranges(text: str) -> Ranks:
    """The inverse of `rank_ranges`: a range where the ranks are evenly spaced. Raises ValueError
    for other text, and for more ranks than any run has."""
    parts = [_parse_range(part) for part in text.split(",")]
    if len(parts) == 1:
        return parts[0]
    return tuple(rank for part in parts for rank in part)


def _parse_range(text: str) -> range:
    span, _, step = text.partition("/")
    first, dash, last = span.partition("-")
    ranks = range(int(first), int(last if dash else first) + 1, int(step or 1))
    if len(ranks) > LONGEST_RANK_LIST:
        raise ValueError(f"{len(ranks)} ranks in {text!r}")
    return ranks


def _evenly_spaced(ranks: Sequence[int], start: int) -> tuple[int, int]:
    """Count the ranks from position `start` on that rise by the same step; return the count and the
    step. Two ranks count as one unless the step is 1."""
    if isinstance(ranks, range) and ranks.step > 0 and len(ranks) > 2 and start == 0:
        return len(ranks), ranks.step
    if start + 1 >= len(ranks):
        return 1, 1
    step, end = ranks[start + 1] - ranks[start], start + 2
    if step < 1:
        return 1, 1
    while end < len(ranks) and ranks[end] - ranks[end - 1] == step:
        end += 1
    return (end - start, step) if end - start > 2 or step == 1 else (1, 1)
