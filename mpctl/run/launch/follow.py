"""Handling of rank 0's records and the launcher's own messages during a run.

Rank 0 appends to RUN/metrics.jsonl, or to RUN/answers.jsonl of a bench; RecordReader delivers each
line once. RUN/metrics.csv and RUN/tensorboard contain what metrics.jsonl contains. They are written
again from it at the first record of a launch, and when a record's step is not after the last one
(the run failed and started again from a checkpoint); any other record is appended. So no step is in
them twice, and files that a killed launcher left incomplete are complete after a resumption.

RUN/logs/launcher.log has the messages of the launcher, one per line with its time, so that
`mpctl logs RUN --launcher` can show them later.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mpctl.records.rundir.directory import RunDir
from mpctl.records.rundir.metrics import CsvFile, EventFiles, parse_record
from mpctl.records.rundir.rank_files import StepRecord
from mpctl.spec.job import JobSpec

OnRecord = Callable[[StepRecord], None]
OnAnswer = Callable[[Any], None]


@dataclass
class MetricsFollower:
    """Writes each record of a run to the sinks, then passes it on to `then`. last: the step of the
    last record."""

    run: RunDir
    sinks: list[tuple[str, CsvFile | EventFiles]]
    on_event: Callable[[str], None]
    then: OnRecord
    last: int | None = None

    def record(self, record: StepRecord) -> None:
        """Bring every sink up to this record. A sink that cannot be written (a full disk) is
        dropped with a message, and the run continues."""
        is_next = self.last is not None and record["step"] > self.last
        for name, sink in list(self.sinks):
            try:
                if not (is_next and sink.add(record)):
                    sink.rebuild(r for r in self.run.records() if r["step"] <= record["step"])
            except OSError as error:
                self.sinks.remove((name, sink))
                self.on_event(
                    f"{self.run.path / name} can no longer be written: {error.strerror}; metrics.jsonl is not affected"
                )
        self.last = record["step"]
        self.then(record)


def follow(run: RunDir, job: JobSpec, on_event: Callable[[str], None], then: OnRecord) -> MetricsFollower:
    """A follower with the sinks that launch.csv and launch.tensorboard ask for, if any."""
    sinks: list[tuple[str, CsvFile | EventFiles]] = []
    if job.launch.csv:
        corpora = (f"validation_loss/{name}" for name in job.data.validation)
        sinks.append(("metrics.csv", CsvFile(run.csv, tuple(corpora))))
    if job.launch.tensorboard:
        sinks.append(("tensorboard", EventFiles(run.tensorboard)))
    return MetricsFollower(run, sinks, on_event, then)


@dataclass
class RecordReader:
    """Delivers each complete line of a metrics.jsonl once, starting at its current end.

    parse: the record in a line, None for any other line; offset: bytes read so far; delivered:
    records delivered.
    """

    path: Path
    parse: Callable[[bytes], Any] = parse_record
    offset: int = 0
    delivered: int = 0

    def __post_init__(self) -> None:
        self.offset = self.path.stat().st_size if self.path.exists() else 0

    def deliver(self, on_record: OnRecord | OnAnswer) -> None:
        """Call on_record with every new record; a file that was removed or cut is read from its
        start."""
        try:
            stream = self.path.open("rb")
        except OSError:
            return
        with stream:
            self.offset *= self.offset <= os.fstat(stream.fileno()).st_size
            stream.seek(self.offset)
            for line in stream:
                if not line.endswith(b"\n"):
                    break
                self.offset += len(line)
                record = self.parse(line)
                if record is not None:
                    self.delivered += 1
                    on_record(record)

    def finish(self, on_record: OnRecord | OnAnswer) -> str:
        """Deliver what is left once the attempt is over; returns what was left out, in words:
        nothing."""
        self.deliver(on_record)
        return ""


def parse_answer(line: bytes) -> Any | None:
    """The answer in a line of answers.jsonl; None for a line that is not JSON."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


@dataclass(frozen=True)
class EventLog:
    """Appends messages to a file and passes them on to `then`; a message that cannot be written (a
    full disk) is still passed on."""

    path: Path
    then: Callable[[str], None]
    clock: Callable[[], float] = time.time

    def write(self, message: str) -> None:
        """Append a message, `2026-11-22T03:40:12Z SIGTERM: finishing this step and saving`."""
        moment = datetime.fromtimestamp(self.clock(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8", errors="replace") as stream:
                stream.write(f"{moment} {' '.join(message.splitlines())}\n")

    def event(self, message: str) -> None:
        self.write(message)
        self.then(message)
