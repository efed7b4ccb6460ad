"""RUN/metrics.jsonl, one record a step, and its other forms: a table, TensorBoard's events.

A machine that stops while a line is written leaves half a line, and people append to files.
Therefore every reader takes the lines that are records of a step, skips the others, and the
commands report which lines were skipped.

`points` makes named numbers of a record, which plots, metrics.csv and TensorBoard show. A number's
name is its key in the record. Lists and tables become numbers: `memory_bytes` is that of the
fullest rank, `validation_losses` of a corpus NAME becomes `validation_loss/NAME`,
`communication_seconds` of an axis becomes `communication_seconds/AXIS`. The validation before the
first step is written in step 1's record and becomes numbers of step 0.

>>> record = {"step": 1, "memory_bytes": [7, 9], "initial_validation_loss": 6.0}
>>> [tuple(point) for point in points(record)]
[(0, {'validation_loss': 6.0}), (1, {'memory_bytes': 9})]
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard, cast

from mpctl.core.durable import write_whole
from mpctl.core.errors import Issue
from mpctl.core.units import few_text
from mpctl.records.rundir.group_names import with_group_names
from mpctl.records.rundir.rank_files import RequiredStepFields, StepRecord

REQUIRED = tuple(RequiredStepFields.__annotations__)
VALIDATED = b'"validation_loss"'
LINES_PER_REPORT = 1000

OnProgress = Callable[[int, int], None]
COLUMNS = (
    "tokens",
    "loss",
    "validation_loss",
    "learning_rate",
    "grad_norm",
    "step_seconds",
    "tokens_per_second",
    "cpu_seconds",
    "memory_bytes",
)
"""The order of metrics.csv's columns; further numbers of a record follow by name."""
TABLES = {"validation_losses": "validation_loss", "communication_seconds": "communication_seconds"}
"""Tables of numbers by name: their key in a record, and how their numbers' names begin."""
NOT_MEASURED = ("step", "time", "predicted_step_seconds")
INITIAL = "initial_"
PATTERN = "events.out.tfevents.*"


@dataclass(frozen=True)
class KeyRecords:
    """The records that a list of runs needs: the first, the last, and the last with a validation
    loss. Each is None when there is none."""

    first: StepRecord | None = None
    last: StepRecord | None = None
    validated: StepRecord | None = None


def parse_record(line: bytes) -> StepRecord | None:
    """The record in a line; None for any other line, such as half a record. Validation losses that
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
    valid = {key: value for key, value in record.items() if _is_valid(key, value)}
    if "communication_seconds" in valid:
        valid["communication_seconds"] = with_group_names(valid["communication_seconds"])
    return cast(StepRecord, valid)


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


def read_records(path: Path, on_progress: OnProgress = lambda done, total: None) -> list[StepRecord]:
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
    tail: deque[bytes] = deque(maxlen=100)  # damage at the end must not hide the records before it
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
    shown = few_text([*map(str, numbers)], most=5)
    if len(numbers) == 1:
        what = f"line {shown} is not a record of a step"
        return f"{path}: {what} (torn or written by something else) and is ignored"
    what = f"lines {shown} are not records of a step"
    return f"{path}: {what} (torn or written by something else) and are ignored"


def _is_valid(key: str, value: object) -> bool:
    if key.endswith("validation_losses") or key == "communication_seconds":
        return isinstance(value, dict) and all(map(is_number, value.values()))
    return is_number(value) or not key.endswith("validation_loss")


def _lines(path: Path) -> Iterator[bytes]:
    if path.is_file():
        with path.open("rb") as stream:
            yield from stream


class ScalarPoint(NamedTuple):
    """The numbers of one step by name; step 0 is before training."""

    step: int
    values: dict[str, float]


def points(record: StepRecord) -> Iterator[ScalarPoint]:
    """The record's step as one point, after the point of the step before where the record also
    holds the validation before training."""
    before = {k.removeprefix(INITIAL): v for k, v in record.items() if k.startswith(INITIAL)}
    if before and (values := scalars(before)):
        yield ScalarPoint(record["step"] - 1, values)
    yield ScalarPoint(record["step"], scalars(record))


def scalars(record: Mapping[str, object]) -> dict[str, float]:
    """Every finite number of a record by name; anything else is left out."""
    numbers: dict[str, float] = {}
    for key, value in record.items():
        if key in NOT_MEASURED or key.startswith(INITIAL):
            continue
        if key in TABLES and isinstance(value, dict):
            numbers |= {f"{TABLES[key]}/{name}": v for name, v in value.items() if is_number(v)}
        elif key == "memory_bytes" and isinstance(value, list):
            numbers |= {key: max(value)} if value and all(map(is_number, value)) else {}
        elif is_number(value):
            numbers[key] = value
    return numbers


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value read from JSON is a finite number; true and false are not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def ordered(names: Iterable[str]) -> list[str]:
    """Metric names without repetition, in the order of COLUMNS, others after them by name."""
    rank = {name: index for index, name in enumerate(COLUMNS)}
    return sorted(set(names), key=lambda name: (rank.get(name, len(rank)), name))


@dataclass
class CsvFile:
    """One file. columns: names of the metrics that have a column, also before any step has a value
    for them."""

    path: Path
    columns: tuple[str, ...] = ()

    def rebuild(self, records: Iterable[StepRecord]) -> None:
        """Write a new file, which replaces the old one when it is complete."""
        rows = [point for record in records for point in points(record)]
        names = (name for point in rows for name in point.values)
        self.columns = tuple(ordered([*COLUMNS, *self.columns, *names]))
        text = _line(("step", *self.columns)) + "".join(map(self._row, rows))
        write_whole(self.path, text, sync=False)

    def add(self, record: StepRecord) -> bool:
        """Append a record; False where it has a metric without a column."""
        rows = list(points(record))
        if any(point.values.keys() - set(self.columns) for point in rows):
            return False
        with self.path.open("a", encoding="utf-8") as stream:
            stream.writelines(map(self._row, rows))
        return True

    def _row(self, point: ScalarPoint) -> str:
        return _line([point.step, *(point.values.get(name, "") for name in self.columns)])


def _line(cells: Iterable[object]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(cells)
    return line.getvalue()


def missing_tensorboard(where: str) -> list[Issue]:
    """An issue that names the setting or option `where`, when the package is not installed."""
    try:
        is_installed = find_spec("tensorboard") is not None
    except ValueError:
        is_installed = False
    if is_installed:
        return []
    message = "the package tensorboard is not installed"
    return [
        Issue("extra-missing", where, message, "install it with pip install 'mpctl[tensorboard]', or set it to false")
    ]


@dataclass
class EventFiles:
    """A folder that `tensorboard --logdir` reads. path: the file that events are appended to, None
    before the first `rebuild`."""

    folder: Path
    path: Path | None = None

    def rebuild(self, records: Iterable[StepRecord]) -> None:
        """Write a new file with all records, then empty the old one.

        It is emptied, not removed, because a running TensorBoard must find the file that it reads
        before it opens the next. The next rebuild removes it.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        old, now = list(self.folder.glob(PATTERN)), time.time_ns()
        # TensorBoard reads a folder's files in the order of their names.
        name = f"{now // 10**9:010d}.{now % 10**9:09d}.{socket.gethostname()}.{os.getpid()}"
        self.path = self.folder / PATTERN.replace("*", name)
        events = (event for record in records for event in _events(record))
        _append(self.path, [*_opening(), *events])
        for path in old:
            if path.stat().st_size:
                path.write_bytes(b"")
            else:
                path.unlink()

    def add(self, record: StepRecord) -> bool:
        """Append a record."""
        if self.path is None:
            raise RuntimeError("rebuild comes before add")
        _append(self.path, _events(record))
        return True


def _append(path: Path, events: Iterable[Any]) -> None:
    from tensorboard.summary.writer.record_writer import RecordWriter

    with path.open("ab") as stream:
        writer = RecordWriter(stream)
        for event in events:
            writer.write(event.SerializeToString())


def _opening() -> Iterator[Any]:
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    now = time.time()
    yield Event(wall_time=now, file_version="brain.Event:2")
    yield Event(wall_time=now, step=0, session_log=SessionLog(status=SessionLog.START))


def _events(record: StepRecord) -> Iterator[Any]:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    written = record.get("time")
    when = float(written) if is_number(written) else time.time()
    for point in points(record):
        values = [Summary.Value(tag=name, simple_value=v) for name, v in point.values.items()]
        yield Event(wall_time=when, step=point.step, summary=Summary(value=values))
