"""RUN/metrics.jsonl: one record a step, a JSON object a line.

A machine that stops while a line is written leaves half a line, and people append to files.
Therefore every reader takes the lines that are records of a step, skips the others, and the
commands report which lines were skipped.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from mpctl.rundir.rank_files import RequiredStepFields, StepRecord
from mpctl.rundir.scalars import is_number

REQUIRED = tuple(RequiredStepFields.__annotations__)
VALIDATED = b'"validation_loss"'
LINES_PER_REPORT = 1000

OnProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class KeyRecords:
    """The records that a list of runs needs: the first, the last, and the last with a validation
    loss. Each is None when there is none."""

    first: StepRecord | None = None
    last: StepRecord | None = None
    validated: StepRecord | None = None


def parse_record(line: bytes) -> StepRecord | None:
    """The record in a line; None for a line that is torn or something else. Validation losses that
    are not numbers are left out."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    has_no_loss = record.get("skipped") is True and record.get("loss", 0) is None
    required = (key for key in REQUIRED if not (key == "loss" and has_no_loss))
    if not all(is_number(record.get(key)) for key in required):
        return None
    if not isinstance(record["step"], int) or record["step"] < 1:
        return None
    return cast(StepRecord, {key: value for key, value in record.items() if _is_valid(key, value)})


def read_lines(path: Path) -> Iterator[tuple[int, StepRecord | None]]:
    """(line number from 1, record or None) of each line that is not empty; nothing when the file
    does not exist."""
    try:
        with path.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield number, parse_record(line)
    except FileNotFoundError:
        return


def read_records(
    path: Path, on_progress: OnProgress = lambda done, total: None
) -> list[StepRecord]:
    """All records, oldest first; empty when the file does not exist. Raises OSError when it cannot
    be read. on_progress: called with (bytes read, bytes of the file)."""
    records, done = [], 0
    total = path.stat().st_size if path.is_file() else 0
    for number, line in enumerate(_lines(path)):
        done += len(line)
        if number % LINES_PER_REPORT == 0:
            on_progress(done, total)
        if (record := parse_record(line)) is not None:
            records.append(record)
    return records


def read_key_records(path: Path) -> KeyRecords:
    """The first, the last and the last validated record, in one pass that parses few lines."""
    first = validated = None
    tail: deque[bytes] = deque(maxlen=100)  # damage at the end must not hide what lies before it
    for line in _lines(path):
        first = first or parse_record(line)
        tail.append(line)
        if VALIDATED in line:
            validated = parse_record(line) or validated
    last = next(filter(None, map(parse_record, reversed(tail))), None)
    return KeyRecords(first, last or first, validated)


def foreign_lines(path: Path) -> list[int]:
    """The numbers of the lines that are not records."""
    return [number for number, record in read_lines(path) if record is None]


def foreign_text(path: Path, numbers: list[int]) -> str:
    """A warning about them: `RUN/metrics.jsonl: line 3 is not a record of a step (torn or written
    by something else) and is ignored`."""
    shown = ", ".join(map(str, numbers[:5]))
    more = f" and {len(numbers) - 5} more" if len(numbers) > 5 else ""
    if len(numbers) == 1:
        what = f"line {shown} is not a record of a step"
        return f"{path}: {what} (torn or written by something else) and is ignored"
    what = f"lines {shown}{more} are not records of a step"
    return f"{path}: {what} (torn or written by something else) and are ignored"


def _is_valid(key: str, value: object) -> bool:
    if key.endswith("validation_losses") or key == "communication_seconds":
        return isinstance(value, dict) and all(map(is_number, value.values()))
    return is_number(value) or not key.endswith("validation_loss")


def _lines(path: Path) -> Iterator[bytes]:
    if path.is_file():
        with path.open("rb") as stream:
            yield from stream
