"""The folder of a tuning: one job, one record a trial, each written whole before the next begins.

DIR/tuned.json      the job without its layout, and what the search holds fixed
    trials/003.json the record of trial 3: its layout, why it was chosen, its steps, how it ended
    trials/003/     its run directory
    trials/003.sh   with --emit: what its launcher takes (.yaml, .py), and 003.log, what it printed
    data/           prepared data that trials share
    presets/        the presets as fitted to the trials so far
    best.toml       the best layout so far, as a job to launch
    report.json, report.html

A tuning that was killed at any moment goes on from there: a trial that was running counts as
measured if it had made enough steps, and is made again if not; one that a scheduler runs is waited
for. Trials belong to one job: a folder
that has some of another job is refused, one without any becomes that of this job.

By hand, a job of tp 2 and one of tp 4 are the same job: a layout is what is being looked for. One
of 16 samples a step and one of 32 are not.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

from mpctl.core.durable import write_whole
from mpctl.core.errors import InputError
from mpctl.plan.planning.layout_settings import TRAINING, LayoutSettings
from mpctl.records.rundir.directory import RunDir
from mpctl.records.rundir.summary import WARM_UP_STEPS
from mpctl.spec.job import JobSpec

TrialStatus = Literal[
    "running", "measured", "out-of-memory", "failed", "too-slow", "cancelled", "interrupted", "written"
]
JOB_SCHEMA: Literal["mpctl.tuned-job/1"] = "mpctl.tuned-job/1"
TRIAL_SCHEMA: Literal["mpctl.trial/1"] = "mpctl.trial/1"
JOB, TRIALS, DATA, PRESETS = "tuned.json", "trials", "data", "presets"
BEST, REPORT, PAGE = "best.toml", "report.json", "report.html"
LEAST_STEPS = 3  # after the warm-up, below which a trial says nothing
MOST_DIFFERENCES = 5


@checked_dataclass(frozen=True)
class TrialRecord:
    """A trial, planned, running or over.

    number: from 1; layout: by the fields of LayoutSettings; why: it was chosen, in words; planned:
    seconds of a step by the presets that the tuning began with; expected: by those fitted to the
    trials before; planned_bytes: of the fullest rank; steps: to be made, warm-up included; began:
    seconds since 1970; wall: seconds from the start to the end of the ranks; seconds: of each step
    that was made, the warm-up included; error: why it failed; peak_bytes: of the fullest rank in
    one step, None where that is not known; warm_up: how many of the first steps do not count;
    job: id of the scheduler's job that made it, empty without one; waited: seconds of that job in
    the queue.
    """

    number: int
    layout: dict[str, Any]
    why: str
    planned: float
    expected: float
    planned_bytes: int
    steps: int
    began: float
    status: TrialStatus = "running"
    wall: float = 0.0
    seconds: tuple[float, ...] = ()
    error: str = ""
    peak_bytes: int | None = None
    warm_up: int = WARM_UP_STEPS
    job: str = ""
    waited: float = 0.0
    schema: Literal["mpctl.trial/1"] = TRIAL_SCHEMA

    @property
    def settings(self) -> LayoutSettings:
        """Its layout."""
        return LayoutSettings(**self.layout)

    @property
    def steady(self) -> tuple[float, ...]:
        """The seconds of the steps after the warm-up."""
        return self.seconds[self.warm_up :]

    @property
    def step_seconds(self) -> float | None:
        """The median of the steps after the warm-up; None where they are too few."""
        return median(self.steady) if len(self.steady) >= LEAST_STEPS else None

    def ended(
        self,
        status: TrialStatus,
        *,
        wall: float,
        seconds: tuple[float, ...] = (),
        error: str = "",
        peak_bytes: int | None = None,
    ) -> TrialRecord:
        """The record of the trial when it is over."""
        return replace(self, status=status, wall=wall, seconds=seconds, error=error, peak_bytes=peak_bytes)


_RECORD: TypeAdapter[TrialRecord] = TypeAdapter(TrialRecord)


@dataclass(frozen=True)
class TuneFolder:
    """The folder of a tuning, which need not exist yet."""

    path: Path

    @property
    def _runs(self) -> Path:
        return self.path / TRIALS

    @property
    def presets(self) -> Path:
        """The presets as fitted to the trials, as KIND/NAME.toml."""
        return self.path / PRESETS

    def run(self, number: int) -> RunDir:
        """The run directory of a trial."""
        return RunDir(self._runs / f"{number:03}")

    def record_path(self, number: int) -> Path:
        """The file of a trial's record."""
        return self._runs / f"{number:03}.json"

    def written_path(self, number: int, ending: str) -> Path:
        """The file of a trial for another launcher, or of its log."""
        return self._runs / f"{number:03}{ending}"

    def check(self, job: JobSpec, fixed: Mapping[str, Any]) -> None:
        """Raises InputError where the folder has trials of another job, or files of no tuning."""
        known = self._known_job()
        if known is not None:
            if self._has_trials:
                _require_same(self.path, known, job_identity(job, fixed))
        elif self.path.exists() and (not self.path.is_dir() or RunDir(self.path).is_occupied):
            raise InputError.of(
                "tune-foreign", "--out", f"{self.path} exists, and no tuning made it", "name a new folder"
            )

    def claim(self, job: JobSpec, fixed: Mapping[str, Any]) -> None:
        """Make the folder that of this job, or go on with it; data that were prepared for another
        are removed. Raises InputError as `check` does, and where it cannot be written."""
        self.check(job, fixed)
        own = job_identity(job, fixed)
        try:
            if self._known_job() != own:
                if (self.path / DATA).exists():
                    shutil.rmtree(self.path / DATA)
                self._runs.mkdir(parents=True, exist_ok=True)
                write_whole(self.path / JOB, json.dumps(own, indent=1) + "\n")
        except OSError as error:
            raise cannot_write(self.path, error) from None

    @property
    def _has_trials(self) -> bool:
        return next(self._runs.glob("[0-9]*.json"), None) is not None

    def _known_job(self) -> dict[str, Any] | None:
        path = self.path / JOB
        if not path.is_file():
            return None
        try:
            known = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise InputError.of("tune-unreadable", str(path), str(error), "name another folder by --out") from None
        if not isinstance(known, dict) or known.get("schema") != JOB_SCHEMA:
            raise InputError.of(
                "tune-foreign", str(path), f"it is not a file of {JOB_SCHEMA}", "name another folder by --out"
            )
        return known

    def save(self, record: TrialRecord) -> None:
        """Write a record whole. Raises InputError where it cannot be written."""
        try:
            self._runs.mkdir(parents=True, exist_ok=True)
            write_whole(self.record_path(record.number), json.dumps(asdict(record)) + "\n")
        except OSError as error:
            raise cannot_write(self.path, error) from None

    def records(self) -> list[TrialRecord]:
        """The trials so far, in order. Raises InputError for a file that is no record."""
        return list(self._records())

    def _records(self) -> Iterator[TrialRecord]:
        for path in sorted(self._runs.glob("[0-9]*.json")):
            try:
                yield _RECORD.validate_json(path.read_bytes())
            except (OSError, ValidationError) as error:
                message = str(error).splitlines()[0]
                raise InputError.of(
                    "tune-unreadable", str(path), message, "remove the file to forget the trial"
                ) from None

    def recovered(self) -> list[TrialRecord]:
        """The trials so far; one that was running when the tuning was killed is now over: measured
        if its steps suffice, interrupted if not. Its record is written again. A job of a scheduler
        goes on without the tuning, and its trial with it."""
        found = []
        for record in self.records():
            if record.status == "running" and not record.job:
                record = _interrupted(record, self.run(record.number))
                self.save(record)
            found.append(record)
        return found


def _interrupted(record: TrialRecord, run: RunDir) -> TrialRecord:
    """The record of a trial whose tuning was killed while it ran."""
    ends = [step["time"] for step in run.records() if "time" in step]
    wall = max(max(ends, default=record.began) - record.began, 0.0)
    ended = record.ended("measured", wall=wall, seconds=step_times(run))
    return ended if ended.step_seconds is not None else replace(ended, status="interrupted")


def step_times(run: RunDir) -> tuple[float, ...]:
    """Seconds of each step that a run has recorded."""
    return tuple(record["step_seconds"] for record in run.records())


def job_identity(job: JobSpec, fixed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that all trials of a folder share: the job without its layout, and the fields
    of a layout that the search does not vary."""
    tables = job.model_dump(mode="json", exclude_none=True)
    free = set(LayoutSettings._fields) - set(TRAINING) - set(fixed)
    varied = {*TRAINING, "steps"} - {"moe_overlap"}  # which folders of before it was searched have
    kept = {
        "cluster": tables["cluster"],
        "model": tables.get("model", {}),
        "parallel": {k: v for k, v in tables["parallel"].items() if k not in free},
        "training": {k: v for k, v in tables["training"].items() if k not in varied or k in fixed},
        "data": tables["data"],
        "launch": {k: v for k, v in tables["launch"].items() if k in ("on", "device")},
    }
    return {"schema": JOB_SCHEMA, "job": kept, "fixed": json.loads(json.dumps(dict(fixed)))}


def _require_same(path: Path, known: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    differences = list(_differences(known, own))
    if not differences:
        return
    shown = "; ".join(differences[:MOST_DIFFERENCES])
    more = len(differences) - MOST_DIFFERENCES
    shown += f"; and {more} more" if more > 0 else ""
    raise InputError.of(
        "tune-other-job",
        "--out",
        f"{path} has trials of another job: {shown}",
        "name another folder, or the job that it has",
    )


def _differences(known: Mapping[str, Any], own: Mapping[str, Any], at: str = "") -> Iterator[str]:
    for key in dict.fromkeys([*known, *own]):
        there, here = known.get(key), own.get(key)
        if isinstance(there, dict) and isinstance(here, dict):
            yield from _differences(there, here, f"{at}{key}.")
        elif there != here:
            yield f"{(at + key).removeprefix('job.')} {there!r} there, {here!r} here"


def cannot_write(path: Path, error: OSError) -> InputError:
    """The error for a folder that cannot be written."""
    message = f"{path} cannot be written: {error.strerror or error}"
    return InputError.of("tune-unwritable", "--out", message, "name a folder that can be written")
