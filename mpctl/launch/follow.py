"""RUN/metrics.csv and RUN/tensorboard, kept up to date by the launcher while records arrive.

Both contain what metrics.jsonl contains. They are written again from metrics.jsonl at the first
record of a launch, and when a record's step is not after the last one (the run failed and started
again from a checkpoint); any other record is appended. So no step is in them twice, and files that
a killed launcher left incomplete are complete after a resumption.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from mpctl.rundir.directory import RunDir
from mpctl.rundir.event_files import EventFiles
from mpctl.rundir.metrics_csv import CsvFile
from mpctl.rundir.rank_files import StepRecord
from mpctl.spec.job import JobSpec

OnRecord = Callable[[StepRecord], None]


class MetricsSink(Protocol):
    """Another form of metrics.jsonl: metrics_csv.CsvFile or event_files.EventFiles."""

    def rebuild(self, records: Iterable[StepRecord]) -> None:
        """Write everything again from these records."""

    def has_columns_for(self, record: StepRecord) -> bool:
        """Whether the record can be appended without writing everything again."""

    def add(self, record: StepRecord) -> None:
        """Append a record."""


@dataclass
class MetricsFollower:
    """Writes each record of a run to the sinks, then passes it on to `then`. last: the step of the
    last record."""

    run: RunDir
    sinks: list[tuple[str, MetricsSink]]
    on_event: Callable[[str], None]
    then: OnRecord
    last: int | None = None

    def record(self, record: StepRecord) -> None:
        """Bring every sink up to this record. A sink that cannot be written (a full disk) is
        dropped with a message, and the run goes on."""
        is_next = self.last is not None and record["step"] > self.last
        for name, sink in list(self.sinks):
            try:
                if is_next and sink.has_columns_for(record):
                    sink.add(record)
                else:
                    sink.rebuild(r for r in self.run.records() if r["step"] <= record["step"])
            except OSError as error:
                self.sinks.remove((name, sink))
                self.on_event(
                    f"{self.run.path / name} can no longer be written: {error.strerror}; "
                    "metrics.jsonl is not affected"
                )
        self.last = record["step"]
        self.then(record)


def follow(
    run: RunDir, job: JobSpec, on_event: Callable[[str], None], then: OnRecord
) -> MetricsFollower:
    """A follower with the sinks that launch.csv and launch.tensorboard ask for, if any."""
    sinks: list[tuple[str, MetricsSink]] = []
    if job.launch.csv:
        corpora = (f"validation_loss/{name}" for name in job.data.validation)
        sinks.append(("metrics.csv", CsvFile(run.path / "metrics.csv", tuple(corpora))))
    if job.launch.tensorboard:
        sinks.append(("tensorboard", EventFiles(run.path / "tensorboard")))
    return MetricsFollower(run, sinks, on_event, then)
