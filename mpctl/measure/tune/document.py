"""Results of a tuning, schema mpctl.tune/1: printed by `mpctl tune --json`, and written to
DIR/report.json before and after every trial.

The lead of the best layout is the extra step time of the second, as a fraction. It is beyond noise if no
other layout has a real chance to be faster (choose.py).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NotRequired

from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic needs it to validate them before Python 3.12

from mpctl.core.errors import InputError
from mpctl.measure.tune.choose import MeasuredLayout
from mpctl.measure.tune.loop import ENDED, Tuning
from mpctl.measure.tune.state import BEST, PRESETS, TrialRecord
from mpctl.plan.planning.layout_settings import LayoutSettings, layout_text

SCHEMA: Literal["mpctl.tune/1"] = "mpctl.tune/1"
CommandOf = Callable[[LayoutSettings], str]


class TrialEntry(TypedDict):
    """A trial. planned_seconds: of a step, by the presets at the beginning; expected_seconds: after
    the trials before it; step_seconds: measured, None where it was not; steps: that were made, the
    warm-up included; wall_seconds: start and end included; job: id of the scheduler's job that made
    it, empty without one; waited_seconds: of that job in the queue; both absent in documents of
    older versions; why: it was chosen."""

    number: int
    layout: str
    settings: dict[str, Any]
    status: str
    why: str
    planned_seconds: float
    expected_seconds: float
    step_seconds: float | None
    steps: int
    wall_seconds: float
    planned_bytes: int
    peak_bytes: int | None
    error: str
    job: NotRequired[str]
    waited_seconds: NotRequired[float]


class MeasuredEntry(TypedDict):
    """A measured layout, of all its trials. planned_seconds: by the presets at the beginning;
    fitted_seconds: by those fitted to all trials, None before they are; step_seconds: the geometric
    mean of its trials; trials: their step times."""

    layout: str
    settings: dict[str, Any]
    planned_seconds: float
    fitted_seconds: float | None
    step_seconds: float
    trials: list[float]
    planned_bytes: int
    command: str


class BestEntry(MeasuredEntry):
    """The best layout. tokens_per_second: of all ranks; lead: by how much longer the second takes,
    a share, None without a second; is_settled: whether the lead is beyond noise over every layout
    that was planned; file: a job file with it, in the folder."""

    tokens_per_second: float
    lead: float | None
    is_settled: bool
    file: str


class LearntEntry(TypedDict):
    """Findings from the trials. words: sentences; presets: folder of the fitted presets, None if there
    are none; mean_error_before, mean_error_after: errors of the plans of the measured layouts with the
    original and the fitted presets, as fractions, None without a measured layout."""

    words: list[str]
    presets: str | None
    mean_error_before: float | None
    mean_error_after: float | None


class TuneDocument(TypedDict):
    """The document.

    launcher: of --emit, which makes the trials, None where mpctl does; ended: why the tuning ended,
    None while it runs; words: the same as a sentence; candidates: layouts that may be measured;
    rivals: of these, those that may still be faster than the best; noise: of one trial, a standard
    deviation as a share.
    """

    schema: Literal["mpctl.tune/1"]
    job: str
    command: str
    folder: str
    ranks: int
    device: str | None
    launcher: str | None
    ended: str | None
    words: str
    budget_seconds: float
    spent_seconds: float
    candidates: int
    rivals: int
    noise: float
    best: BestEntry | None
    layouts: list[MeasuredEntry]
    trials: list[TrialEntry]
    learnt: LearntEntry


def read_document(path: Path) -> TuneDocument:
    """The document in a file. Raises InputError where there is none."""
    try:
        return TypeAdapter(TuneDocument).validate_json(path.read_bytes())
    except FileNotFoundError:
        raise InputError.of(
            "no-tuning", "--show", f"there is no {path}", "name the folder of a tuning: runs/tune-NAME"
        ) from None
    except OSError as error:
        message = f"{path} cannot be read: {error.strerror or error}"
        raise InputError.of("no-tuning", "--show", message) from None
    except ValidationError as error:
        message = f"{path} is no document of {SCHEMA}: {error.errors()[0]['msg']}"
        raise InputError.of("no-tuning", "--show", message, "tune again, which writes it from the trials") from None


def tune_document(tuning: Tuning, command_of: CommandOf) -> TuneDocument:
    """The document of a tuning, at any moment. command_of: the command line that launches a
    layout."""
    job, belief = tuning.space.job, tuning.belief
    ranked = sorted(belief.measured, key=lambda one: one.mean)
    layouts = [_layout(tuning, one, command_of) for one in ranked]
    device = job.cluster.device
    return {
        "schema": SCHEMA,
        "job": job.label,
        "command": tuning.command,
        "folder": str(tuning.folder.path),
        "ranks": job.world_size,
        "device": device.name if device else None,
        "launcher": tuning.launcher,
        "ended": tuning.ended,
        "words": ENDED[tuning.ended] if tuning.ended else "",
        "budget_seconds": tuning.limits.seconds,
        "spent_seconds": tuning.spent,
        "candidates": len(belief.candidates),
        "rivals": len(belief.rivals) if belief.measured else len(belief.candidates),
        "noise": belief.noise,
        "best": _best(tuning, layouts) if layouts else None,
        "layouts": layouts,
        "trials": list(map(_trial, tuning.records)),
        "learnt": _learnt(tuning, layouts),
    }


def _trial(record: TrialRecord) -> TrialEntry:
    return {
        "number": record.number,
        "layout": layout_text(record.settings),
        "settings": record.layout,
        "status": record.status,
        "why": record.why,
        "planned_seconds": record.planned,
        "expected_seconds": record.expected,
        "step_seconds": record.step_seconds if record.status == "measured" else None,
        "steps": len(record.seconds),
        "wall_seconds": record.wall,
        "planned_bytes": record.planned_bytes,
        "peak_bytes": record.peak_bytes,
        "error": record.error,
        "job": record.job,
        "waited_seconds": record.waited,
    }


def _layout(tuning: Tuning, one: MeasuredLayout, command_of: CommandOf) -> MeasuredEntry:
    layout = one.candidate.layout
    return {
        "layout": layout_text(layout),
        "settings": dict(layout._asdict()),
        "planned_seconds": one.candidate.seconds,
        "fitted_seconds": after.evaluator.step_seconds(layout) if (after := tuning.after) else None,
        "step_seconds": one.mean,
        "trials": list(one.seconds),
        "planned_bytes": one.candidate.bytes,
        "command": command_of(layout),
    }


def _best(tuning: Tuning, layouts: list[MeasuredEntry]) -> BestEntry:
    best = tuning.best
    assert best is not None, "a layout was measured"
    settings = dict(best._asdict())
    entry = next(one for one in layouts if one["settings"] == settings)
    others = [one["step_seconds"] for one in layouts if one is not entry]
    job = tuning.space.job
    tokens = (job.training.global_batch_size or 1) * tuning.space.model.tokens_per_sample
    return {
        **entry,
        "tokens_per_second": tokens / entry["step_seconds"],
        "lead": min(others) / entry["step_seconds"] - 1 if others else None,
        "is_settled": tuning.is_settled,
        "file": BEST,
    }


def _learnt(tuning: Tuning, layouts: list[MeasuredEntry]) -> LearntEntry:
    found = tuning.learnt
    before = [abs(one["planned_seconds"] / one["step_seconds"] - 1) for one in layouts]
    after = [abs(fitted / one["step_seconds"] - 1) for one in layouts if (fitted := one["fitted_seconds"])]
    return {
        "words": list(found.words) if found else [],
        "presets": PRESETS if found else None,
        "mean_error_before": sum(before) / len(before) if before else None,
        "mean_error_after": sum(after) / len(after) if after else None,
    }
