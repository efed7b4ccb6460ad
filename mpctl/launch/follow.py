"""RUN/metrics.csv and RUN/tensorboard, kept up to date by the launcher while records arrive.

Both say what metrics.jsonl says. The first record of a launch, and one that goes back behind the
last (the run failed and started again from a checkpoint), has them written anew from
metrics.jsonl; any other is added. So no step stands in them twice, and a run that was killed is
made good when it is resumed. What was added is handed to the system before the next record.
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
    """Another form of metrics.jsonl."""

    def rebuild(self, records: Iterable[StepRecord]) -> None: ...

    def has_columns_for(self, record: StepRecord) -> bool: ...

    def add(self, record: StepRecord) -> None: ...


@dataclass
class MetricsFollower:
    """Takes each record of a run as it comes and hands it to `then`; last: the step taken last."""

    run: RunDir
    sinks: list[tuple[str, MetricsSink]]
    on_event: Callable[[str], None]
    then: OnRecord
    last: int | None = None

    def record(self, record: StepRecord) -> None:
        """Bring every sink up to this record. One that cannot be written (a full disk) is given
        up with a word: the run goes on."""
        is_next = self.last is not None and record["step"] > self.last
        for name, sink in list(self.sinks):
            try:
                if is_next and sink.has_columns_for(record):
                    sink.add(record)
                else:
                    sink.rebuild(r for r in self.run.records() if r["step"] <= record["step"])
            except OSError as error:
                self.sinks.remove((name, sink))
                self.on_event(f"{self.run.path / name} is written no more: {error.strerror}; "
                              "metrics.jsonl goes on")  # fmt: skip
        self.last = record["step"]
        self.then(record)


def follow(
    run: RunDir, job: JobSpec, on_event: Callable[[str], None], then: OnRecord
) -> MetricsFollower:
    """Writes what `launch.csv` and `launch.tensorboard` ask for; with neither it only hands on."""
    sinks: list[tuple[str, MetricsSink]] = []
    if job.launch.csv:
        corpora = (f"validation_loss/{name}" for name in job.data.validation)
        sinks.append(("metrics.csv", CsvFile(run.path / "metrics.csv", tuple(corpora))))
    if job.launch.tensorboard:
        sinks.append(("tensorboard", EventFiles(run.path / "tensorboard")))
    return MetricsFollower(run, sinks, on_event, then)
