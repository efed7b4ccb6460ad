"""The records of a run, read so that a damaged line costs that line and nothing else."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mpctl.rundir.metrics import parse_record
from mpctl.rundir.scalars import Record

TOLD_EVERY = 1000  # lines
VALIDATED = b'"validation_loss"'

OnProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class KeyRecords:
    """What a list of runs shows of metrics.jsonl, without reading every line as JSON.

    validated: the last record that has a validation loss; each is None when there is none.
    """

    first: Record | None = None
    last: Record | None = None
    validated: Record | None = None


def read_records(metrics: Path, on_progress: OnProgress = lambda done, total: None) -> list[Record]:
    """Every record that is whole; other lines are skipped. Raises OSError for an unreadable file,
    nothing for a missing one. on_progress: of bytes read and all bytes."""
    found, done = [], 0
    total = metrics.stat().st_size if metrics.is_file() else 0
    for number, line in enumerate(_lines(metrics)):
        done += len(line)
        if number % TOLD_EVERY == 0:
            on_progress(done, total)
        if (record := parse_record(line)) is not None:
            found.append(record)
    return found


def read_ends(metrics: Path) -> KeyRecords:
    """The first, the last and the last validated record, in one pass."""
    first = validated = None
    tail: deque[bytes] = deque(maxlen=100)  # damage at the end must not hide what lies before it
    for line in _lines(metrics):
        first = first or parse_record(line)
        tail.append(line)
        if VALIDATED in line:
            validated = parse_record(line) or validated
    last = next(filter(None, map(parse_record, reversed(tail))), None)
    return KeyRecords(first, last or first, validated)


def _lines(metrics: Path) -> Iterator[bytes]:
    if metrics.is_file():
        with metrics.open("rb") as stream:
            yield from stream
