"""What was observed of a run, from another launcher's log or a run directory of mpctl, with the job
that it is compared with.

A log that has rates alone is converted: its steady median is the seconds that log and job give
together (interop/log_rows.py), and every line is in proportion.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from mpctl.core.errors import InputError
from mpctl.core.units import plural
from mpctl.interop.log_events import LogEvents
from mpctl.interop.log_launchers import EMITTED
from mpctl.interop.log_lines import plain
from mpctl.interop.log_rows import LogLayout, row_of_run
from mpctl.interop.logs import last_batch, read_log_file
from mpctl.measure.calibrate.runs import measured_step, usable_runs
from mpctl.measure.why.series import Point
from mpctl.model.layout.job_layout import JobLayout
from mpctl.records.rundir.directory import RunDir
from mpctl.records.rundir.slow import SlowPart, read_slow
from mpctl.records.rundir.summary import recorded_median, training_progress
from mpctl.run.history.show import open_runs


@dataclass(frozen=True)
class Observed:
    """A run. name: of its log or directory. points: every step, oldest first. seconds: of a steady step.
    launcher: whose log it is, a target of `--emit`; empty for a run of mpctl. communication: measured
    seconds of rank 0 by axis; processor: its seconds of processor time. slow: ranks and links that the
    launcher named. memory: bytes, `allocated` and `reserved`; planned_memory: what a run of mpctl planned
    of it. tflops, mfu: as the log prints them, mfu as a share."""

    name: str
    layout: JobLayout
    points: tuple[Point, ...]
    seconds: float
    launcher: str = ""
    text: str = ""
    notes: tuple[str, ...] = ()
    events: LogEvents = field(default_factory=LogEvents)
    communication: Mapping[str, float] = field(default_factory=dict)
    processor: float | None = None
    slow: tuple[SlowPart, ...] = ()
    planned_memory: Mapping[str, float] = field(default_factory=dict)
    tflops: float | None = None
    mfu: float | None = None

    @property
    def memory(self) -> Mapping[str, float]:
        return self.events.memory


def observe_log(path: Path, layout: LogLayout) -> Observed:
    """A log and its job. Raises InputError with all issues: a log without steps, a job that is not of
    this log, a step that cannot be."""
    run = read_log_file(path, layout.launcher)
    if not run.every:
        message = f"{run.text}: the steps themselves are needed"
        raise InputError.of("log-no-steps", plain(str(path)), message, "give the log with the lines of its steps")
    row, notes = row_of_run(run, path, layout)
    (measured,), _ = usable_runs([row])
    seconds = measured.measured["step_seconds"]
    scale = seconds / median(step.duration for step in run.steps)
    batch = last_batch(run.steps)
    points = tuple(
        Point(row.step.number, scale * row.step.duration, row.after, row.start)
        for row in run.every
        if row.step.batch in (None, batch)
    )
    mfu = run.figure("mfu")
    return Observed(
        plain(str(path)),
        measured.layout,
        points,
        seconds,
        EMITTED[run.launcher],
        run.text.rpartition(", spread")[0],
        tuple(notes[1:]),
        run.events,
        tflops=run.figure("tflops"),
        mfu=mfu / 100 if mfu else None,
    )


def observe_run(path: Path) -> Observed:
    """A run directory of mpctl. Raises InputError where it has no job with a model, or no steps."""
    (saved,) = open_runs([path])
    job, run = saved.job, RunDir(saved.path)
    if job is None or job.model is None:
        raise InputError.of("not-a-run", str(path), "its job has no model", "; ".join(saved.problems))
    if job.launch.program:
        message = "it ran a program of its own, which mpctl does not time"
        raise InputError.of("not-a-run", str(path), message, "give the program's log: mpctl why JOB LOG")
    seconds = measured_step(run)
    records = saved.records
    if len(records) < 3:
        raise InputError.of(
            "too-short", str(path), f"{plural(len(records), 'step')}, and 3 are needed", "run it longer"
        )
    layout = JobLayout.of(job)
    progress = training_progress(list(records))
    forecast = records[-1].get("predicted_step_seconds")
    peaks = [row["memory"]["peak"] for row in (saved.summary.plan_beside_run if saved.summary else ()) if row["memory"]]
    fullest = max(peaks, key=lambda peak: peak["measured"], default=None)
    points = tuple(
        Point(record["step"], record["step_seconds"], "checkpoint" if "save_seconds" in record else "")
        for record in records
        if record.get("predicted_step_seconds") == forecast
    )
    return Observed(
        saved.name,
        layout,
        points,
        seconds,
        text=f"mpctl: {plural(len(records), 'step')}",
        events=LogEvents({"allocated": fullest["measured"]} if fullest else {}),
        planned_memory={"allocated": fullest["planned"]} if fullest else {},
        communication=progress["communication_seconds"] or {},
        processor=recorded_median(records, "cpu_seconds"),
        slow=tuple(read_slow(run.slow)),
    )
