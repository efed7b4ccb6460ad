"""The lines of metrics.jsonl: one record a step, a JSON object a line.

A machine that stops while a line is written tears it, and people append to files; so every reader
takes the lines that are records and leaves out the others, and somebody says which those were.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from mpctl.rundir.scalars import Record, is_number

NEEDED = ("step", "loss", "tokens", "step_seconds", "tokens_per_second")


def parse_record(line: bytes) -> Record | None:
    """A step's record, None for a line that is torn or something else. Of what a record says of
    validation only that is kept which has the form that the worker writes."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not all(is_number(record.get(key)) for key in NEEDED):
        return None
    if not isinstance(record["step"], int) or record["step"] < 1:
        return None
    return {key: value for key, value in record.items() if _is_as_written(key, value)}


def read_lines(path: Path) -> Iterator[tuple[int, Record | None]]:
    """(number from 1, record or None) of each line that is not empty; nothing when there is no such
    file."""
    try:
        with path.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield number, parse_record(line)
    except FileNotFoundError:
        return


def foreign_lines(path: Path) -> list[int]:
    """Numbers of the lines that are no records."""
    return [number for number, record in read_lines(path) if record is None]


def foreign_text(path: Path, numbers: list[int]) -> str:
    """`RUN/metrics.jsonl: line 3 is not a record of a step (torn or foreign) and is ignored`."""
    shown = ", ".join(map(str, numbers[:5]))
    more = f" and {len(numbers) - 5} more" if len(numbers) > 5 else ""
    if len(numbers) == 1:
        return f"{path}: line {shown} is not a record of a step (torn or foreign) and is ignored"
    return (
        f"{path}: lines {shown}{more} are not records of a step (torn or foreign) and are ignored"
    )


def _is_as_written(key: str, value: object) -> bool:
    if key.endswith("validation_losses"):
        return isinstance(value, dict) and all(map(is_number, value.values()))
    return is_number(value) or not key.endswith("validation_loss")
