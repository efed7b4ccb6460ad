"""Monitoring of a run: metrics for Prometheus, and a program that is called on changes.

`launch.metrics` names an endpoint, `:9400` of the loopback or `ADDRESS:9400` (metrics_port.py), at
which the launcher's host answers Prometheus, or a file whose name ends in .prom, for the textfile
collector of its node exporter. The library is prometheus_client (mpctl[prometheus]). All metrics
have the label `run`; their names and units are those of METRICS. The age of the newest checkpoint
is `time() - mpctl_checkpoint_timestamp_seconds`.

`launch.hook` is a command. It is called without a shell, with a JSON document on its standard
input, when an attempt has failed, when the run starts again, when a rank or a link begins to hold
it up or no longer does, and when it has ended:

    {"schema": "mpctl.hook/1", "event": "failure", "run": "/shared/runs/a", "name": "a",
     "time": 1.8e9, "attempt": 1, "status": "failed", "step": 41, "checkpoint": 40,
     "words": "...", "failure": {...}, "slow": [...]}

It must not hold the run up: calls run one after the other in a thread, each for HOOK_SECONDS at
most, and what goes wrong with one is a message. At the end the launcher waits for them.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, Literal

from typing_extensions import TypedDict  # pydantic needs it to validate them before Python 3.12

from mpctl.core.errors import Issue
from mpctl.records.checkpoint.folder import list_checkpoints
from mpctl.records.rundir.directory import RunDir
from mpctl.records.rundir.goodput import Goodput
from mpctl.records.rundir.launches import read_times_away
from mpctl.records.rundir.rank_files import StepRecord
from mpctl.records.rundir.slow import SlowPart
from mpctl.run.launch.attempt import RunChange
from mpctl.run.launch.follow import OnRecord
from mpctl.run.launch.metrics_port import answering
from mpctl.run.launch.status_file import read_status
from mpctl.spec.job import JobSpec

HOOK_SECONDS, SILENT_SECONDS = 30.0, 10.0
ADDRESS = re.compile(r"(?P<host>[A-Za-z0-9_.\-]*|\[[0-9a-fA-F:.]+\]):(?P<port>\d{1,5})")
METRICS = {
    "mpctl_up": "1 while ranks train, else 0",
    "mpctl_step": "last step",
    "mpctl_steps": "steps of the job",
    "mpctl_step_timestamp_seconds": "when the last step was recorded",
    "mpctl_loss": "loss of the last step",
    "mpctl_validation_loss": "last validation loss",
    "mpctl_step_seconds": "time of the last step",
    "mpctl_predicted_step_seconds": "step time of the plan",
    "mpctl_tokens_per_second": "tokens a second in the last step",
    "mpctl_mfu_ratio": "model FLOP a second over the device's data sheet, where that is known",
    "mpctl_gradient_norm": "norm of the gradients before clipping",
    "mpctl_goodput_ratio": "share of the time since the first step that went into steps that count",
    "mpctl_checkpoint_step": "step of the newest checkpoint",
    "mpctl_checkpoint_timestamp_seconds": "when the newest checkpoint was written",
    "mpctl_silent_ranks": "ranks that have sent a heartbeat, and none in the last 10 s",
    "mpctl_slow_ranks": "ranks that compute longer than their equals, as far as they are named",
    "mpctl_slow_links": "links between hosts that have become slow, as far as they are named",
    "mpctl_slowest_ratio": "how many times as long the slowest of these takes, 1 without any",
    "mpctl_failures_total": "attempts that failed",
    "mpctl_restarts_total": "attempts after the first",
    "mpctl_skipped_steps_total": "steps that changed no parameter",
}
"""Names and meanings; those that end in _total are counters of this launch, the others gauges."""
OF_RECORD = {
    "mpctl_step": "step",
    "mpctl_step_timestamp_seconds": "time",
    "mpctl_loss": "loss",
    "mpctl_validation_loss": "validation_loss",
    "mpctl_step_seconds": "step_seconds",
    "mpctl_tokens_per_second": "tokens_per_second",
    "mpctl_predicted_step_seconds": "predicted_step_seconds",
    "mpctl_mfu_ratio": "mfu",
    "mpctl_gradient_norm": "grad_norm",
}
"""Metrics that are numbers of a step's record, and their keys there."""


def monitoring_issues(job: JobSpec) -> Iterator[Issue]:
    """Yield the issues of `launch.metrics` and `launch.hook` on this host."""
    where = "launch.metrics"
    if (target := job.launch.metrics) is not None:
        match = ADDRESS.fullmatch(target)
        if match is not None and not 1 <= int(match["port"]) <= 65_535:
            yield Issue("bad-value", where, f"{match['port']} is not a port", "use 1 to 65535")
        elif match is None and not target.endswith(".prom"):
            yield Issue(
                "bad-value",
                where,
                f"{target!r} is neither an address nor a .prom file",
                "use :9400, 127.0.0.1:9400 or /var/lib/node_exporter/run.prom",
            )
        elif match is None and not Path(target).absolute().parent.is_dir():
            message = f"{Path(target).absolute().parent} is not a folder of this host"
            yield Issue("no-such-folder", where, message, "name a file in a folder that is there")
        if find_spec("prometheus_client") is None:
            yield Issue(
                "extra-missing",
                where,
                "the package prometheus_client is not installed",
                "install it with pip install 'mpctl[prometheus]'",
            )
    if job.launch.hook and shutil.which(job.launch.hook[0]) is None:
        message = f"{job.launch.hook[0]!r} is not a program on this host"
        yield Issue("no-such-program", "launch.hook", message, "give its path and its arguments as a list")


@contextmanager
def monitored(
    run: RunDir, job: JobSpec, on_event: Callable[[str], None], then: OnRecord
) -> Iterator[tuple[OnRecord, Callable[[RunChange], None]]]:
    """Yield the callbacks for records, which are passed on to `then`, and for changes of a run. An endpoint that cannot
    be opened is a message."""
    with ExitStack() as stack:
        exporter = Exporter(run, job, on_event) if job.launch.metrics is not None else None
        if exporter is not None:
            stack.enter_context(exporter.served())
        hook = stack.enter_context(hooked(run, job, on_event)) if job.launch.hook else None

        def on_record(record: StepRecord) -> None:
            if exporter is not None:
                exporter.record(record)
            then(record)

        def on_change(change: RunChange) -> None:
            if exporter is not None:
                exporter.change(change)
            if hook is not None:
                hook(change)

        yield on_record, on_change


# ---------------------------------------------------------------- Prometheus


@dataclass(eq=False)
class Exporter:
    """The metrics of one launch, a collector of prometheus_client. values: by name, those that are
    known; goodput: of the run's records, those of earlier launches included."""

    run: RunDir
    job: JobSpec
    on_event: Callable[[str], None]
    values: dict[str, float] = field(default_factory=dict)
    goodput: Goodput = field(default_factory=Goodput)

    @property
    def file(self) -> str | None:
        """File of `launch.metrics`; None if it is an endpoint."""
        target = self.job.launch.metrics or ""
        return None if ADDRESS.fullmatch(target) else target

    @contextmanager
    def served(self) -> Iterator[None]:
        """Answer Prometheus, or write the file, while the run goes on; the file stays, with
        mpctl_up 0, so that a run that has ended is seen."""
        records = list(self.run.records())
        self.goodput.away = read_times_away(self.run.launcher_log, records)
        for record in records:
            self.goodput.add(record)
        totals = (name for name in METRICS if name.endswith("_total"))
        self.values |= {"mpctl_up": 1.0, **dict.fromkeys(totals, 0.0), **slow_values(())}
        if not self.job.launch.program:
            self.values["mpctl_steps"] = float(self.job.training.steps)
        target = self.job.launch.metrics or ""
        match = ADDRESS.fullmatch(target)
        if match is None:
            try:
                self._write()
                yield
            finally:
                self.values["mpctl_up"] = 0.0
                self._write()
            return
        from prometheus_client import generate_latest

        registry = self.registry()
        with ExitStack() as stack:
            try:
                stack.enter_context(answering(match["host"], int(match["port"]), lambda: generate_latest(registry)))
            except OSError as error:
                words = error.strerror or error
                self.on_event(f"launch.metrics: {target} cannot be opened: {words}")
            yield

    def record(self, record: StepRecord) -> None:
        self.goodput.add(record)
        for name, key in OF_RECORD.items():
            if isinstance(value := record.get(key), (int, float)):
                self.values[name] = float(value)
        self.values["mpctl_skipped_steps_total"] += bool(record.get("skipped"))
        if (share := self.goodput.share) is not None:
            self.values["mpctl_goodput_ratio"] = share
        self._write()

    def change(self, change: RunChange) -> None:
        counted = {"failure": "mpctl_failures_total", "restart": "mpctl_restarts_total"}
        if change.event in counted:
            self.values[counted[change.event]] += 1
        self.values["mpctl_up"] = float(change.event in ("restart", "slow"))
        self.values |= slow_values(change.slow)
        self._write()

    def registry(self) -> Any:
        """A registry of prometheus_client that reads the values when it is asked."""
        from prometheus_client import CollectorRegistry

        registry = CollectorRegistry()
        registry.register(self)
        return registry

    def collect(self) -> Iterator[Any]:
        """The metrics, as prometheus_client asks a collector for them."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        if saved := list_checkpoints(self.run.checkpoints):
            step, folder = saved[-1]
            self.values["mpctl_checkpoint_step"] = float(step)
            self.values["mpctl_checkpoint_timestamp_seconds"] = folder.stat().st_mtime
        if (report := read_status(self.run.status)) is not None:
            beats = (rank.breadcrumb.beat_time for rank in report.state.ranks.values())
            silent = sum(0 < beat < time.time() - SILENT_SECONDS for beat in beats)
            self.values["mpctl_silent_ranks"] = float(silent)
        for name, meaning in METRICS.items():
            if name in self.values:
                kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
                family = kind(name, meaning, labels=["run"])
                family.add_metric([self.job.name or self.run.path.name], self.values[name])
                yield family

    def _write(self) -> None:
        """Write the file, if it is one; it is replaced as a whole."""
        if self.file is None:
            return
        from prometheus_client import write_to_textfile

        try:
            write_to_textfile(self.file, self.registry())
        except OSError as error:
            words = error.strerror or error
            self.on_event(f"launch.metrics: {self.file} cannot be written: {words}")


def slow_values(slow: Sequence[SlowPart]) -> dict[str, float]:
    """The metrics of what holds up the run."""
    ranks = sum(len(part.ranks) for part in slow if part.kind == "ranks")
    return {
        "mpctl_slow_ranks": float(ranks),
        "mpctl_slow_links": float(sum(part.kind == "link" for part in slow)),
        "mpctl_slowest_ratio": max([1.0, *(part.ratio for part in slow)]),
    }


# ---------------------------------------------------------------- the hook


@contextmanager
def hooked(run: RunDir, job: JobSpec, on_event: Callable[[str], None]) -> Iterator[Callable[[RunChange], None]]:
    """Yield the callback for changes. At the end, calls that still run are waited for."""
    waiting: SimpleQueue[HookDocument | None] = SimpleQueue()

    def call_all() -> None:
        while (document := waiting.get()) is not None:
            if words := call_hook(job.launch.hook, document):
                on_event(f"launch.hook, called on {document['event']}: {words}")

    def change(one: RunChange) -> None:
        waiting.put(hook_document(run, job, one))

    thread = Thread(target=call_all, name="hook", daemon=True)
    thread.start()
    try:
        yield change
    finally:
        waiting.put(None)
        thread.join(2 * HOOK_SECONDS)


class HookDocument(TypedDict):
    """Schema mpctl.hook/1: what `launch.hook` reads. time: seconds since 1970; step: the last one; checkpoint: the
    step of the newest one, 0 without any; words: the event in a sentence."""

    schema: Literal["mpctl.hook/1"]
    event: Literal["failure", "restart", "end", "slow"]
    run: str
    name: str
    time: float
    attempt: int
    status: str
    step: int
    checkpoint: int
    words: str
    failure: dict[str, Any] | None
    slow: list[dict[str, Any]]


def hook_document(run: RunDir, job: JobSpec, change: RunChange) -> HookDocument:
    return {
        "schema": "mpctl.hook/1",
        "event": change.event,
        "run": str(run.path.absolute()),
        "name": job.name or run.path.name,
        "time": time.time(),
        "attempt": change.attempt,
        "status": change.status,
        "step": run.last_step(),
        "checkpoint": run.last_checkpoint(),
        "words": change.words,
        "failure": None if change.failure is None else change.failure.as_dict(),
        "slow": [part.as_dict() for part in change.slow],
    }


def call_hook(command: list[str], document: HookDocument) -> str:
    """Call the program once. Return the failure in words, empty if none."""
    try:
        done = subprocess.run(
            command,
            input=json.dumps(document) + "\n",
            capture_output=True,
            text=True,
            timeout=HOOK_SECONDS,
            start_new_session=True,  # Ctrl-C is for the launcher
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"it was ended after {HOOK_SECONDS:g} s"
    except OSError as error:
        return f"it cannot be run: {error.strerror or error}"
    if done.returncode == 0:
        return ""
    said = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    return f"it ended with {done.returncode}" + (f": {said[-1][:200]}" if said else "")
