"""The records of a run, read so that a damaged line costs that line and nothing else."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mpctl.launch.scalars import Record, is_number

NEEDED = ("step", "loss", "tokens", "step_seconds", "tokens_per_second")
VALIDATED = b'"validation_loss"'


@dataclass(frozen=True)
class Ends:
    """What a list of runs shows of metrics.jsonl, without reading every line as JSON.

    validated: the last record that has a validation loss; each is None when there is none.
    """

    first: Record | None = None
    last: Record | None = None
    validated: Record | None = None


def read_records(metrics: Path) -> Iterator[Record]:
    """Every record that is whole; other lines are skipped. Raises OSError for an unreadable file,
    nothing for a missing one."""
    return filter(None, map(_record, _lines(metrics)))


def read_ends(metrics: Path) -> Ends:
    """The first, the last and the last validated record, in one pass."""
    first = validated = None
    tail: deque[bytes] = deque(maxlen=100)  # damage at the end must not hide what lies before it
    for line in _lines(metrics):
        first = first or _record(line)
        tail.append(line)
        if VALIDATED in line:
            validated = _record(line) or validated
    last = next(filter(None, map(_record, reversed(tail))), None)
    return Ends(first, last or first, validated)


def _lines(metrics: Path) -> Iterator[bytes]:
    if metrics.is_file():
        with metrics.open("rb") as stream:
            yield from stream


def _record(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not all(is_number(record.get(key)) for key in NEEDED):
        return None
    if not isinstance(record["step"], int) or record["step"] < 1:
        return None
    return {key: value for key, value in record.items() if _is_as_written(key, value)}


def _is_as_written(key: str, value: object) -> bool:
    """Whether what validation is said to have found has the form that the worker writes."""
    if key.endswith("validation_losses"):
        return isinstance(value, dict) and all(map(is_number, value.values()))
    return is_number(value) or not key.endswith("validation_loss")
