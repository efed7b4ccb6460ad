"""The records of metrics.jsonl as event files of TensorBoard; needs its package, not TensorFlow.

One event a step, with a scalar for every metric. A file begins with a session start at step 0,
which tells a TensorBoard that is open to forget the steps it has read (its purge of restarted
runs): a run that went back to a checkpoint shows no step twice.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mpctl.errors import Issue
from mpctl.rundir.scalars import Record, is_number, points

PATTERN = "events.out.tfevents.*"


def missing_tensorboard(where: str) -> list[Issue]:
    """An issue at `where` when the package is not installed."""
    try:
        found = find_spec("tensorboard") is not None
    except ValueError:
        found = False
    if found:
        return []
    return [Issue("extra-missing", where, "the package tensorboard is not installed",
                  "pip install 'mpctl[tensorboard]', or set it to false")]  # fmt: skip


@dataclass
class EventFiles:
    """A folder that `tensorboard --logdir` reads; holds one file of events."""

    folder: Path
    path: Path | None = None

    def rebuild(self, records: Iterable[Record]) -> None:
        """Write a new file of all records; the old one is emptied once it is complete.

        Emptied, not removed: a TensorBoard that is open must find the file that it reads before it
        goes on to the next. The next rebuild removes it.
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

    def has_place_for(self, record: Record) -> bool:
        """Always: a metric needs no declaration."""
        return True

    def add(self, record: Record) -> None:
        """Append the record's events."""
        assert self.path is not None, "rebuild comes first"
        _append(self.path, _events(record))


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


def _events(record: Record) -> Iterator[Any]:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    written = record.get("time")
    when = float(written) if is_number(written) else time.time()
    for point in points(record):
        values = [Summary.Value(tag=name, simple_value=v) for name, v in point.values.items()]
        yield Event(wall_time=when, step=point.step, summary=Summary(value=values))
