"""The logs of a run while they grow: new lines of many ranks, merged as they come.

Ranks print the same line within moments of each other. New entries are therefore held back until no
rank prints for QUIET_SECONDS, or, while they print without a pause, until every rank that printed
has gone on to a later step, or LONGEST_SECONDS have passed.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from mpctl.rundir.log_entries import EntrySplitter, LogEntry
from mpctl.rundir.merged_logs import MergedEntry, merge_entries
from mpctl.runs.liveness import is_running
from mpctl.runs.logs import rank_logs

Lines = TypeVar("Lines")

QUIET_SECONDS = 0.4
LONGEST_SECONDS = 3.0
POLL_SECONDS, RUNNING_SECONDS = 0.2, 1.0
"""How often logs are read, and how often the launcher is looked for."""


def follow_until_end(run: Path, poll: Callable[[bool], Iterable[Lines]]) -> Iterator[Lines]:
    """What `poll` finds, again and again until the run has ended; poll is called with True for the
    last time."""
    is_last, next_check = False, float("-inf")
    while not is_last:
        if time.monotonic() >= next_check:
            next_check = time.monotonic() + RUNNING_SECONDS
            is_last = not is_running(run)
        yield from poll(is_last)
        if not is_last:
            time.sleep(POLL_SECONDS)


@dataclass
class FollowedLog:
    """One log that grows. offset: bytes read so far; inode: of the file that they were read from,
    which another run may replace."""

    path: Path
    offset: int = 0
    inode: int | None = None
    rest: bytes = b""
    splitter: EntrySplitter = field(default_factory=EntrySplitter)

    def skip(self) -> int:
        """Begin at the present end; returns it, in bytes."""
        status = self._status()
        if status is not None:
            self.offset, self.inode = status.st_size, status.st_ino
        return self.offset

    def read(self) -> list[str]:
        """The lines that were completed since the last call."""
        status = self._status()
        if status is None:
            self.inode = None
            return []
        if self.inode != status.st_ino or status.st_size < self.offset:
            self.offset, self.rest = 0, b""
        self.inode = status.st_ino
        if status.st_size == self.offset:
            return []
        try:
            with self.path.open("rb") as stream:
                stream.seek(self.offset)
                content = stream.read(status.st_size - self.offset)
        except OSError:
            return []
        self.offset += len(content)
        *lines, self.rest = (self.rest + content).split(b"\n")
        return [line.decode("utf-8", errors="replace") for line in lines]

    def end(self) -> list[str]:
        """What was read of a line that was not completed, if anything."""
        rest, self.rest = self.rest, b""
        return [rest.decode("utf-8", errors="replace")] if rest else []

    def _status(self) -> os.stat_result | None:
        try:
            return self.path.stat()
        except OSError:
            return None


class FileFollower:
    """Follows logs that are shown as they are."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self.logs = [FollowedLog(path) for path in paths]
        self.ends = {log.path: log.skip() for log in self.logs}

    def poll(self, is_last: bool) -> Iterator[tuple[Path, list[str]]]:
        """The new lines of each log that has any; half a line too when this is the last call."""
        for log in self.logs:
            lines = log.read() + (log.end() if is_last else [])
            if lines:
                yield log.path, lines


class MergedFollower:
    """Follows the logs of some ranks of a run; of all of them, also those that start later, when
    none is named. ends: by rank, the offset in bytes from which on its log is followed."""

    def __init__(
        self, run: Path, ranks: Iterable[int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.run, self.ranks, self.clock = run, frozenset(ranks), clock
        self.logs: dict[int, FollowedLog] = {}
        self.entries: defaultdict[int, list[LogEntry]] = defaultdict(list)
        self.first_time = self.last_time = 0.0
        self._find()
        self.ends = {rank: log.skip() for rank, log in self.logs.items()}

    def poll(self, is_last: bool = False) -> list[MergedEntry]:
        """The entries that can be shown now; all that are left when this is the last call."""
        self._find()
        if self._read() or is_last:
            self.last_time = self.clock()
        if is_last or self.clock() - self.last_time >= QUIET_SECONDS:
            for rank, log in self.logs.items():
                self.entries[rank].extend(log.splitter.feed(log.end() if is_last else ()))
                self.entries[rank].extend(log.splitter.flush())
            return self._take(lambda entry: True)
        if self.clock() - self.first_time >= LONGEST_SECONDS:
            return self._take(lambda entry: True)
        sections = [entries[-1].section for entries in self.entries.values() if entries]
        return self._take(lambda entry: entry.section < min(sections))

    def _find(self) -> None:
        for rank, path in rank_logs(self.run).items():
            if rank not in self.logs and (not self.ranks or rank in self.ranks):
                self.logs[rank] = FollowedLog(path)

    def _read(self) -> bool:
        """Whether any rank has printed a line since the last call."""
        is_new = False
        for rank, log in self.logs.items():
            if lines := log.read():
                if not is_new and not any(self.entries.values()):
                    self.first_time = self.clock()
                is_new = True
                self.entries[rank].extend(log.splitter.feed(lines))
        return is_new

    def _take(self, is_due: Callable[[LogEntry], bool]) -> list[MergedEntry]:
        due = {rank: [e for e in entries if is_due(e)] for rank, entries in self.entries.items()}
        for entries in self.entries.values():
            entries[:] = [entry for entry in entries if not is_due(entry)]
        if any(due.values()):
            self.first_time = self.clock()
        return merge_entries(due)
