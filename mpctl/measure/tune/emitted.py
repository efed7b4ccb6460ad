"""Trials that another launcher makes: written as what it takes, read back from its logs.

A call writes BATCH trials, each a file DIR/trials/NNN.sh (.yaml, .py) with the layout and STEPS
steps. People run them wherever the launcher runs, and put what it prints into DIR/trials/NNN.log.
The next call reads the logs (interop/log_rows.py), learns from them, and writes the next trials,
until the tuning is settled or `--trials` were made. A log that ran out of memory is a result, and
so is one that ends in a traceback; one without a step time is named, and waited for.

Trials of one call are chosen together, each as if those before it had come out as expected
(choose.py). Layouts that the launcher cannot express are no candidates.

By hand, 003.sh written, 003.log with steps of 2.1, 2.0 and 2.0 s: trial 3 is measured, 2.0 s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from mpctl.core.durable import write_whole
from mpctl.core.errors import InputError, Issue, attempt
from mpctl.interop.emitted import EmittedPlan, emit_plan, get_launcher
from mpctl.interop.log_rows import LogLayout, log_rows
from mpctl.measure.calibrate.runs import usable_runs
from mpctl.measure.tune.choose import choose_several
from mpctl.measure.tune.loop import Tuning
from mpctl.measure.tune.pool import run_row
from mpctl.measure.tune.state import LEAST_STEPS, TrialRecord, cannot_write
from mpctl.measure.tune.trial import OUT_OF_MEMORY, trial_plan
from mpctl.plan.planning.layout_settings import LayoutSettings
from mpctl.plan.search.request import SearchRequest

BATCH, STEPS = 3, 20
ENDINGS = {"shell": ".sh", "yaml": ".yaml", "python": ".py"}
LOG = ".log"
TRACEBACK = "Traceback (most recent call last)"
TAIL = 65536  # bytes at the end of a log in which a failure is looked for


def emitted(request: SearchRequest, layout: LayoutSettings, launcher: str) -> EmittedPlan:
    """A trial of a layout as its launcher takes it. Raises InputError where it cannot say it."""
    return emit_plan(trial_plan(request.space().job_of(layout), STEPS), launcher)


def expressible(request: SearchRequest, launcher: str) -> Callable[[LayoutSettings], bool]:
    """Whether a launcher can express a layout. Raises InputError for an unknown launcher."""
    get_launcher(launcher)

    def accepts(layout: LayoutSettings) -> bool:
        try:
            emitted(request, layout, launcher)
        except InputError:
            return False
        return True

    return accepts


def take_turn(tuning: Tuning, launcher: str) -> list[Path]:
    """Read the logs that are there; where no trial waits any more, write the next ones. Returns the
    files of trials that wait for their logs. Raises InputError where no layout can be expressed, or
    a file cannot be written."""
    for issue in read_logs(tuning):
        tuning.watch.on_event(str(issue))
    tuning.update()
    waiting = [record for record in tuning.records if record.status == "written"]
    if waiting:
        tuning.ended = "waiting"
    else:
        waiting = write_trials(tuning, launcher)
    tuning.watch.on_change(tuning)
    ending = ENDINGS[get_launcher(launcher).language]
    return [tuning.folder.written_path(record.number, ending) for record in waiting]


def write_trials(tuning: Tuning, launcher: str) -> list[TrialRecord]:
    """Write the next trials; none where the tuning has ended, and why is in `tuning.ended`."""
    left = BATCH
    if tuning.limits.trials is not None:
        left = min(left, tuning.limits.trials - len(tuning.made))
    choices = choose_several(tuning.belief, left) if left > 0 else []
    if not choices:
        tuning.ended = "trials" if left <= 0 else "settled" if tuning.is_settled else "exhausted"
        return []
    tuning.ended = "waiting"
    tuning.claim()
    written = []
    for choice in choices:
        record = replace(tuning.new_record(choice, STEPS), status="written")
        text = emitted(tuning.request, record.settings, launcher)
        path = tuning.folder.written_path(record.number, ENDINGS[text.language])
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, text.text + "\n")
        except OSError as error:
            raise cannot_write(tuning.folder.path, error) from None
        tuning.keep(record)
        written.append(record)
    return written


def read_logs(tuning: Tuning) -> Iterator[Issue]:
    """Turn written trials whose logs are there into measured or failed ones; the issues of logs
    that say neither."""
    for record in tuning.records:
        path = tuning.folder.written_path(record.number, LOG)
        if record.status != "written" or not path.is_file():
            continue
        ended, issues = _read(tuning, record, path)
        yield from issues
        if ended is not None:
            tuning.keep(ended)


def _read(tuning: Tuning, record: TrialRecord, path: Path) -> tuple[TrialRecord | None, list[Issue]]:
    space, typed = tuning.space, tuning.request.typed
    job = run_row(space, record.settings, 1.0, typed)["job"]
    found = log_rows([(path, LogLayout(job=job, cluster=job["cluster"]["preset"]))])
    issues = list(found.issues)
    usable = attempt(issues, partial(usable_runs, found.rows)) if found.rows else None
    if usable is not None:
        ((run, *_), _) = usable
        seconds = run.measured["step_seconds"]
        steady = replace(record, warm_up=0)
        return steady.ended("measured", wall=0.0, seconds=(seconds,) * LEAST_STEPS), []
    tail = _tail(path)
    if OUT_OF_MEMORY.search(tail):
        return record.ended("out-of-memory", wall=0.0, error=_last_line(tail)), []
    if TRACEBACK in tail:
        return record.ended("failed", wall=0.0, error=_last_line(tail)), []
    return None, [issue._replace(where=str(path)) for issue in issues]


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    found = next((line for line in reversed(lines) if OUT_OF_MEMORY.search(line)), lines[-1])
    return found[:300]
