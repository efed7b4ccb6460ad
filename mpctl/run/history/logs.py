"""Reads the logs of a run: the last lines of many ranks as one text, also while the logs grow.

Only the end of each file is read, as much as the requested lines need: a thousand logs of a
gigabyte are read as fast as a thousand short ones.

Ranks print the same line within moments of each other. While logs are followed, new entries are
therefore held back until no rank prints for QUIET_SECONDS, or, while they print without a pause,
until every rank that printed has gone on to a later step, or LONGEST_SECONDS have passed.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from mpctl.core.errors import InputError
from mpctl.core.units import ranks_text
from mpctl.records.rundir.logs import (
    EntrySplitter,
    LogEntry,
    MergedEntry,
    Template,
    counted_from_end,
    merge_entries,
    split_entries,
)
from mpctl.run.history.saved import is_running

FIRST_BYTES, FIRST_BYTES_OF_ALL = 16 * 1024, 4 * 1024**2
"""Bytes read at first: of each log, of all logs; eight times as much when that was not enough."""
ALL_BYTES, MOST_BYTES = 16 * 1024**2, 256 * 1024**2
"""Most bytes read of all logs together: for a number of lines, for all lines."""
RANK_LOG = re.compile(r"rank-(\d{1,9})\.log")
Lines = TypeVar("Lines")
QUIET_SECONDS = 0.4
LONGEST_SECONDS = 3.0
POLL_SECONDS, RUNNING_SECONDS = 0.2, 1.0
"""Seconds between reads of the logs, and between checks for the launcher."""
WARNING = re.compile(r"Warning: |\bWARN(?:ING)?\b|\[W\d{4} |^W\d{4} ")
POLL_WARNINGS_SECONDS, MOST_WARNINGS = 2.0, 20
WARNED_BYTES, LEAST_WARNED_BYTES = 1 << 22, 1 << 13
"""Bytes in which a poll looks for warnings: of all logs, and at least of each. The rest of what
ranks print meanwhile is skipped."""
LONGEST_WARNING = 1000
"""Characters of a warning that are shown."""


@dataclass(frozen=True)
class LogTail:
    """The last lines of a log. is_cut: whether lines before them are left out."""

    lines: list[str]
    is_cut: bool


def rank_logs(run: Path) -> dict[int, Path]:
    """The logs of the ranks, by rank; empty while there are none."""
    matches = ((RANK_LOG.fullmatch(path.name), path) for path in _files(run / "logs"))
    return dict(sorted((int(match[1]), path) for match, path in matches if match))


def chosen_logs(run: Path, ranks: Iterable[int]) -> dict[int, Path]:
    """The logs of these ranks, or of all ranks when none is named. Raises InputError for a rank
    that has no log."""
    logs = rank_logs(run)
    missing = [rank for rank in ranks if rank not in logs]
    if missing:
        hint = f"{ranks_text(logs)} have one" if logs else "no rank has started yet"
        raise InputError.of("no-log", "--rank", f"{ranks_text(missing)} has no log in {run}", hint)
    wanted = set(ranks) or logs.keys()
    return {rank: path for rank, path in logs.items() if rank in wanted}


def launcher_logs(run: Path) -> list[Path]:
    """The logs of the launcher, its nodes and torchrun: all of logs/ except the ranks'."""
    return [path for path in _files(run / "logs") if not RANK_LOG.fullmatch(path.name)]


def _files(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.suffix == ".log")
    except OSError:
        return []


def read_tail(path: Path, most: int, end: int | None = None) -> LogTail:
    """The complete lines within the last `most` bytes before the offset `end`, by default before
    the end of the log; no line when it cannot be read."""
    try:
        if not path.is_file():  # a pipe would block
            return LogTail([], is_cut=False)
        with path.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            end = size if end is None else min(end, size)
            begin = max(0, end - most)
            stream.seek(begin)
            content = stream.read(end - begin)
    except OSError:
        return LogTail([], is_cut=False)
    lines = content.decode("utf-8", errors="replace").split("\n")
    return LogTail(lines[1:] if begin else lines, is_cut=begin > 0)


def last_lines(path: Path, count: int | None, end: int | None = None) -> list[str]:
    """The last `count` lines of a log before the offset `end`, by default its end; all lines if
    count is None."""
    most = FIRST_BYTES
    while True:
        tail = read_tail(path, most, end)
        lines = tail.lines[:-1] if tail.lines[-1:] == [""] else tail.lines
        if not tail.is_cut or (count is not None and len(lines) >= count):
            return lines if count is None else lines[max(0, len(lines) - count) :]
        most *= 8


def merged_tail(
    logs: Mapping[int, Path], count: int | None, ends: Mapping[int, int] | None = None
) -> list[MergedEntry]:
    """The last entries of these logs, by rank, merged: as many as `count` lines need; for None all
    of them. Of a log longer than its share of ALL_BYTES, or of MOST_BYTES, only the end is read.

    ends: by rank, the offset in bytes at which to stop reading, by default the end of its log.
    """
    limit = (MOST_BYTES if count is None else ALL_BYTES) // max(1, len(logs))
    most = limit if count is None else min(FIRST_BYTES, FIRST_BYTES_OF_ALL // max(1, len(logs)))
    while True:
        tails = {rank: read_tail(path, most, (ends or {}).get(rank)) for rank, path in logs.items()}
        is_whole = most >= limit or not any(tail.is_cut for tail in tails.values())
        entries = {rank: counted_from_end(split_entries(tails[rank].lines)) for rank in logs}
        if not is_whole:
            entries = _without_incomplete(entries, tails)
        merged = merge_entries(entries)
        if is_whole or count is None or sum(len(entry.lines) for entry in merged) >= count:
            return merged if count is None else _last(merged, count)
        most = min(8 * most, limit)


def _without_incomplete(logs: Mapping[int, list[LogEntry]], tails: Mapping[int, LogTail]) -> dict[int, list[LogEntry]]:
    """The entries of the steps for which every tail is complete: a tail that was cut is complete
    from its second step on, and the number of its first step is unknown."""
    cut_logs = [entries for rank, entries in logs.items() if tails[rank].is_cut]
    begins = [_second_section(entries) for entries in cut_logs]
    known = [begin for begin in begins if begin is not None]
    if len(known) < len(begins):
        return {}
    first = max(known)
    return {rank: [e for e in entries if e.section >= first] for rank, entries in logs.items()}


def _second_section(entries: list[LogEntry]) -> tuple[int, int] | None:
    """The section of the first entry that is outside the first section; None without one."""
    return next((e.section for e in entries if e.section != entries[0].section), None)


def _last(entries: list[MergedEntry], count: int) -> list[MergedEntry]:
    lines = 0
    for index in range(len(entries) - 1, -1, -1):
        lines += len(entries[index].lines)
        if lines >= count:
            return entries[index:]
    return entries


def follow_until_end(run: Path, poll: Callable[[bool], Iterable[Lines]]) -> Iterator[Lines]:
    """Yield the lines from `poll` until the run has ended; the last call passes True."""
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
    which another run may replace; is_cut: whether they end inside a line that is left out."""

    path: Path
    offset: int = 0
    inode: int | None = None
    rest: bytes = b""
    is_cut: bool = False
    splitter: EntrySplitter = field(default_factory=EntrySplitter)

    def skip(self) -> int:
        """Begin at the present end; returns it, in bytes."""
        status = self._status()
        if status is not None:
            self.offset, self.inode = status.st_size, status.st_ino
        return self.offset

    def read(self, most: int | None = None) -> list[str]:
        """The lines that were completed since the last call. most: bytes that are read; what is
        beyond them, and the line in which they end, is skipped."""
        status = self._status()
        if status is None:
            self.inode = None
            return []
        if self.inode != status.st_ino or status.st_size < self.offset:
            self.offset, self.rest, self.is_cut = 0, b"", False
        self.inode = status.st_ino
        if status.st_size == self.offset:
            return []
        length = status.st_size - self.offset
        try:
            with self.path.open("rb") as stream:
                stream.seek(self.offset)
                content = stream.read(length if most is None else min(length, most))
        except OSError:
            return []
        is_skipped = most is not None and len(self.rest) + length > most
        self.offset += length if is_skipped else len(content)
        *lines, self.rest = (self.rest + content).split(b"\n")
        if self.is_cut and lines:
            lines, self.is_cut = lines[1:], False
        if self.is_cut or is_skipped:
            self.rest, self.is_cut = b"", True
        return [line.decode("utf-8", errors="replace") for line in lines]

    def end(self) -> list[str]:
        """Return the last, incomplete line, if any."""
        rest, self.rest = self.rest, b""
        return [rest.decode("utf-8", errors="replace")] if rest else []

    def _status(self) -> os.stat_result | None:
        try:
            return self.path.stat()
        except OSError:
            return None


class FileFollower:
    """Follows logs that are shown unchanged."""

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
    none is named. ends: by rank, the offset in bytes from which on its log is followed.

    wanted: the entries that are followed, by their first line. most: bytes of all logs that a poll
    reads, though LEAST_WARNED_BYTES of each; None for no bound."""

    def __init__(
        self,
        run: Path,
        ranks: Iterable[int],
        clock: Callable[[], float] = time.monotonic,
        wanted: Callable[[str], bool] = lambda line: True,
        most: int | None = None,
    ) -> None:
        self.run, self.ranks, self.clock = run, frozenset(ranks), clock
        self.wanted, self.most = wanted, most
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
                self._add(rank, log.splitter.feed(log.end() if is_last else ()))
                self._add(rank, log.splitter.flush())
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
        is_new, most = False, self.most
        if most is not None:
            most = max(LEAST_WARNED_BYTES, most // max(1, len(self.logs)))
        for rank, log in self.logs.items():
            if lines := log.read(most):
                if not is_new and not any(self.entries.values()):
                    self.first_time = self.clock()
                is_new = True
                self._add(rank, log.splitter.feed(lines))
        return is_new

    def _add(self, rank: int, entries: Iterable[LogEntry]) -> None:
        wanted = (entry for entry in entries if self.wanted(entry.text.partition("\n")[0]))
        self.entries[rank].extend(wanted)

    def _take(self, is_due: Callable[[LogEntry], bool]) -> list[MergedEntry]:
        due = {rank: [e for e in entries if is_due(e)] for rank, entries in self.entries.items()}
        for entries in self.entries.values():
            entries[:] = [entry for entry in entries if not is_due(entry)]
        if any(due.values()):
            self.first_time = self.clock()
        return merge_entries(due)


def is_warning(line: str) -> bool:
    """Whether a line that a rank printed is a warning.

    >>> is_warning("a.py:3: UserWarning: slow"), is_warning("WARNED"), is_warning("[W0101 00:00:00")
    (True, False, True)
    """
    return "W" in line and WARNING.search(line) is not None


class WarningWatch:
    """Reports warnings of ranks from a thread while its block runs. on_warning: called with a line
    for each; never from two threads at once."""

    def __init__(self, run: Path, on_warning: Callable[[str], None]) -> None:
        self.on_warning = on_warning
        self.follower = MergedFollower(run, (), wanted=is_warning, most=WARNED_BYTES)
        self.shown: set[tuple[str, ...]] = set()
        self.is_over = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="warnings", daemon=True)

    def __enter__(self) -> WarningWatch:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.is_over.set()
        self.thread.join()

    def poll(self, is_last: bool = False) -> None:
        """Report what has been printed since the last call."""
        for entry in self.follower.poll(is_last):
            self._report(entry)

    def _report(self, entry: MergedEntry) -> None:
        parts = Template.of(entry.text).parts
        if parts in self.shown or len(self.shown) > MOST_WARNINGS:
            return
        self.shown.add(parts)
        if len(self.shown) > MOST_WARNINGS:
            self.on_warning("ranks print more warnings: mpctl logs shows them")
        else:
            said = entry.lines[0]
            said = said if len(said) <= LONGEST_WARNING else f"{said[:LONGEST_WARNING]} …"
            self.on_warning(f"{ranks_text(entry.ranks, most=3)}: {said}")

    def _watch(self) -> None:
        while not self.is_over.wait(POLL_WARNINGS_SECONDS):
            self.poll()
        self.poll(is_last=True)
