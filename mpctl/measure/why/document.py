"""The answer of `mpctl why` as data: schema mpctl.why/1.

By hand, planned 10 s with a band of 9 to 11 s and a measured median of 12 s: the verdict is slower,
and the last part, unexplained, is 2 s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import fmean
from typing import Literal

from typing_extensions import TypedDict  # pydantic needs it to validate them before Python 3.12

from mpctl.core.units import plural, seconds_span_text, seconds_text
from mpctl.measure.why.changes import ChangeEntry, find_changes
from mpctl.measure.why.levels import planned_memory
from mpctl.measure.why.observed import Observed
from mpctl.measure.why.planned import Planned, part_of
from mpctl.measure.why.series import find_shape
from mpctl.measure.why.signatures import SIGNATURES, ordered
from mpctl.measure.why.standing import StandingEntry, find_standing
from mpctl.measure.why.suspects import RunFacts, Suspect, SuspectEntry
from mpctl.plan.estimate.step import PARTS
from mpctl.plan.planning.layout_settings import layout_of, layout_text

WORDS = {
    "compute": "kernels",
    "tp": "messages of tensor parallelism",
    "cp": "messages of context parallelism",
    "ep": "messages of experts' ranks",
    "pp": "messages between stages",
    "dp_cp": "gradients and parameters over replicas",
    "bubble": "waiting for other stages",
    "optimizer": "states read and written",
    "other": "host, where kernels do not hide it",
    "contention": "waiting for cores",
    "recomputation": "activations computed again",
    "unexplained": "measured minus planned",
}
Status = Literal["inside", "slower", "faster"]
Progress = Callable[[str, int, int], None]


class VerdictEntry(TypedDict):
    """status: inside the plan's band, slower or faster. text: one sentence."""

    status: Status
    text: str


class BandEntry(TypedDict):
    """Seconds of a step: as planned, and between which nine of ten measured ones are."""

    planned_seconds: float
    low_seconds: float
    high_seconds: float
    extrapolates: list[str]


class LevelEntry(TypedDict):
    """Steps of about the same length, in seconds."""

    first_step: int
    last_step: int
    seconds: float


class MeasuredSteps(TypedDict):
    """Seconds of a step: the median of steady lines, and the mean of all but the first ones. spread: one
    standard deviation of a line as a share. best_seconds: at the fastest level, or before a drift.
    interval: steps of a line. tflops, mfu: as the log prints them; planned_mfu, planned_tflops: by the
    plan's count at the measured seconds."""

    step_seconds: float
    mean_seconds: float
    best_seconds: float
    spread: float
    lines: int
    interval: int
    restarts: int
    levels: list[LevelEntry]
    tflops: float | None
    mfu: float | None
    planned_mfu: float
    planned_tflops: float


class PartEntry(TypedDict):
    """A part of the step. planned, measured: seconds that it adds; hidden: seconds of messages that
    computation hides. measured is None where nothing measured it."""

    name: str
    words: str
    planned: float
    hidden: float
    measured: float | None


class MemoryEntry(TypedDict):
    """Bytes on the fullest rank: `allocated` by tensors or `reserved` by the allocator."""

    kind: str
    planned: float
    measured: float


class WhyDocument(TypedDict):
    """Schema mpctl.why/1. name: of the log or run. layout: in words. parts: of the planned step, with
    `unexplained` at the end, measured minus planned. suspects: the likeliest first. changes: what
    would save time by the plan, the largest first. standing: among published runs, None where too few are
    of this kind."""

    schema: Literal["mpctl.why/1"]
    name: str
    layout: str
    runtime: str
    read: str
    notes: list[str]
    verdict: VerdictEntry
    band: BandEntry
    measured: MeasuredSteps
    parts: list[PartEntry]
    suspects: list[SuspectEntry]
    changes: list[ChangeEntry]
    memory: list[MemoryEntry]
    device_bytes: int | None
    standing: StandingEntry | None


def why_document(observed: Observed, on_progress: Progress = lambda *_: None) -> WhyDocument:
    """Compare a run with its plan. on_progress: called with (task, done, of all). Raises InputError where
    the plan cannot state a time."""
    planned, shape = Planned(observed.layout), find_shape(observed.points)
    facts = RunFacts(observed, planned, shape)
    time, device = planned.time, planned.job.cluster.device
    suspects: list[Suspect] = []
    for done, signature in enumerate(SIGNATURES):
        on_progress("planning", done, len(SIGNATURES) + 1)
        suspects += signature(facts)
    on_progress("planning", len(SIGNATURES), len(SIGNATURES) + 1)
    return {
        "schema": "mpctl.why/1",
        "name": observed.name,
        "layout": layout_text(layout_of(planned.job)),
        "runtime": planned.job.training.runtime,
        "read": observed.text,
        "notes": list(observed.notes),
        "verdict": _verdict(facts),
        "band": {
            "planned_seconds": time.total,
            "low_seconds": time.low,
            "high_seconds": time.high,
            "extrapolates": list(time.extrapolates),
        },
        "measured": _measured(facts),
        "parts": list(_parts(facts)),
        "suspects": [suspect.entry() for suspect in ordered(suspects)],
        "changes": find_changes(planned, observed.launcher),
        "memory": [
            {
                "kind": kind,
                "planned": observed.planned_memory.get(kind) or planned_memory(planned, kind),
                "measured": size,
            }
            for kind, size in observed.memory.items()
        ],
        "device_bytes": device.memory_bytes if device else None,
        "standing": find_standing(planned, observed.seconds),
    }


def _verdict(facts: RunFacts) -> VerdictEntry:
    time, seconds, shape = facts.planned.time, facts.observed.seconds, facts.shape
    band = f"its 90 % band of {seconds_span_text(time.low, time.high)}"
    found = (
        f"{seconds_text(seconds)} a step (median of {plural(shape.lines, 'line')}, spread {100 * shape.spread:.1f} %)"
    )
    if len(shape.levels) > 1:
        last = shape.levels[-1]
        found += f", {seconds_text(last.seconds)} from step {last.first} on"
    off = f"{100 * abs(seconds / time.total - 1):.0f} %"
    if seconds > time.high:
        return {
            "status": "slower",
            "text": f"{found}: {off} above the planned {seconds_text(time.total)}, outside {band}",
        }
    if seconds < time.low:
        return {
            "status": "faster",
            "text": f"{found}: {off} below the planned {seconds_text(time.total)}, outside {band}",
        }
    side = "above" if seconds >= time.total else "below"
    return {
        "status": "inside",
        "text": f"{found}: as planned, {off} {side} {seconds_text(time.total)} and inside {band}",
    }


def _measured(facts: RunFacts) -> MeasuredSteps:
    shape, observed = facts.shape, facts.observed
    counted = observed.points[-shape.lines :]
    return {
        "step_seconds": observed.seconds,
        "mean_seconds": fmean(point.seconds for point in counted),
        "best_seconds": shape.base,
        "spread": shape.spread,
        "lines": shape.lines,
        "interval": shape.interval,
        "restarts": shape.starts - 1,
        "levels": [
            {"first_step": level.first, "last_step": level.last, "seconds": level.seconds} for level in shape.levels
        ],
        "tflops": observed.tflops,
        "mfu": observed.mfu,
        "planned_mfu": facts.planned.time.model_flops / observed.seconds / facts.planned.time.peak,
        "planned_tflops": facts.planned.time.model_flops / observed.seconds / 1e12,
    }


def _parts(facts: RunFacts) -> Iterator[PartEntry]:
    """The planned step by part, recomputation apart from compute, then what is not explained."""
    planned, observed = facts.planned, facts.observed
    found, sent = planned.time.parts(), planned.sent
    again = found["compute"] - planned.unrecomputed
    share = planned.time.hardware_flops / planned.time.peak / found["compute"]
    measured: dict[str, float] = {}
    for axis, seconds in observed.communication.items():
        name = part_of(axis)
        measured[name] = measured.get(name, 0.0) + seconds
    if measured:
        measured["compute"] = observed.seconds - sum(measured.values())
    for name in (part.name for part in PARTS if part.name in found):
        seconds = found[name] - (again if name == "compute" else 0.0)
        hidden = max(0.0, sent.get(name, 0.0) - seconds)
        entry = _part(name, seconds, hidden, measured.get(name))
        if name == "compute":
            entry["words"] += f", at {100 * share:.0f} % of the device's peak"
        yield entry
        if name == "compute" and again > 0:
            yield _part("recomputation", again)
    yield _part("unexplained", 0.0, 0.0, observed.seconds - planned.time.total)


def _part(name: str, planned: float, hidden: float = 0.0, measured: float | None = None) -> PartEntry:
    return {"name": name, "words": WORDS[name], "planned": planned, "hidden": hidden, "measured": measured}
