"""The logs of a run, read back: the last lines of many ranks as one text, also while they grow.

Only the end of each file is read, as much of it as the lines asked for need: a thousand logs of a
gigabyte are answered as fast as a thousand short ones.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mpctl.errors import InputError
from mpctl.rundir.log_entries import LogEntry, split_entries
from mpctl.rundir.merged_logs import MergedEntry, counted_from_end, merge_entries
from mpctl.units import ranks_text

FIRST_BYTES, FIRST_BYTES_OF_ALL = 16 * 1024, 4 * 1024**2
"""Read at first: of each log, of all together; eight times as much when that was not enough."""
ALL_BYTES, MOST_BYTES = 16 * 1024**2, 256 * 1024**2
"""Read at most of all logs together: for a number of lines, for all lines."""
RANK_LOG = re.compile(r"rank-(\d{1,9})\.log")


@dataclass(frozen=True)
class LogTail:
    """The last lines of a log. is_cut: whether the log has lines before them."""

    lines: list[str]
    is_cut: bool


def rank_logs(run: Path) -> dict[int, Path]:
    """The logs of the ranks, by rank; empty while there are none."""
    matches = ((RANK_LOG.fullmatch(path.name), path) for path in _files(run / "logs"))
    return dict(sorted((int(match[1]), path) for match, path in matches if match))


def chosen_logs(run: Path, ranks: Iterable[int]) -> dict[int, Path]:
    """The logs of these ranks, of all ranks when none is named. Raises InputError for a rank that
    has no log."""
    logs = rank_logs(run)
    missing = [rank for rank in ranks if rank not in logs]
    if missing:
        hint = f"{ranks_text(logs)} have one" if logs else "no rank has started yet"
        raise InputError.of("no-log", "--rank", f"{ranks_text(missing)} has no log in {run}", hint)
    wanted = set(ranks) or logs.keys()
    return {rank: path for rank, path in logs.items() if rank in wanted}


def launcher_logs(run: Path) -> list[Path]:
    """The logs of the launcher, its nodes and torchrun: everything in logs/ that is no rank's."""
    return [path for path in _files(run / "logs") if not RANK_LOG.fullmatch(path.name)]


def _files(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.suffix == ".log")
    except OSError:
        return []


def read_tail(path: Path, most: int, end: int | None = None) -> LogTail:
    """The whole lines within the last `most` bytes before the offset `end`, by default before the
    end of the log; no line when it cannot be read."""
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
    """The last lines of a log before the offset `end`, by default of all of it; all of them for a
    count of None."""
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
    of them. A log longer than its share of ALL_BYTES, or of MOST_BYTES, is read from there on.

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


def _without_incomplete(
    logs: Mapping[int, list[LogEntry]], tails: Mapping[int, LogTail]
) -> dict[int, list[LogEntry]]:
    """The entries of the steps for which every tail is complete: one that is cut is from its second
    step on, and which step its first is cannot be known."""
    cut_logs = [entries for rank, entries in logs.items() if tails[rank].is_cut]
    begins = [_second_section(entries) for entries in cut_logs]
    known = [begin for begin in begins if begin is not None]
    if len(known) < len(begins):
        return {}
    first = max(known)
    return {rank: [e for e in entries if e.section >= first] for rank, entries in logs.items()}


def _second_section(entries: list[LogEntry]) -> tuple[int, int] | None:
    """The section of the first entry that is not in the section of the first; None without one."""
    return next((e.section for e in entries if e.section != entries[0].section), None)


def _last(entries: list[MergedEntry], count: int) -> list[MergedEntry]:
    lines = 0
    for index in range(len(entries) - 1, -1, -1):
        lines += len(entries[index].lines)
        if lines >= count:
            return entries[index:]
    return entries
