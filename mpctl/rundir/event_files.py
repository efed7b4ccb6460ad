"""RUN/tensorboard: the records of metrics.jsonl as event files of TensorBoard. Needs the package
tensorboard, not TensorFlow.

One event a step, with a scalar for every metric. A file begins with a session start at step 0,
which makes a running TensorBoard discard the steps it has read (its purge of restarted runs), so
that a run that went back to a checkpoint shows no step twice.
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
from mpctl.rundir.rank_files import StepRecord
from mpctl.rundir.scalars import is_number, points

PATTERN = "events.out.tfevents.*"


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
        Issue(
            "extra-missing",
            where,
            message,
            "install it with pip install 'mpctl[tensorboard]', or set it to false",
        )
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
        before it goes on to the next. The next rebuild removes it.
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

    def has_columns_for(self, record: StepRecord) -> bool:
        """True: event files have no columns that would have to be declared."""
        return True

    def add(self, record: StepRecord) -> None:
        """Append the record's events."""
        if self.path is None:
            raise RuntimeError("rebuild comes before add")
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


def _events(record: StepRecord) -> Iterator[Any]:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    written = record.get("time")
    when = float(written) if is_number(written) else time.time()
    for point in points(record):
        values = [Summary.Value(tag=name, simple_value=v) for name, v in point.values.items()]
        yield Event(wall_time=when, step=point.step, summary=Summary(value=values))
