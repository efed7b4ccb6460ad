"""Where the time of profiled steps goes, stage by stage, beside the plan (`mpctl bench trace`).

A part is what all events of one kind take in a step: the forwards of its micro batches, or what a
rank spends in collectives along an axis. Parts overlap: a forward contains its collectives over tp.
A row is a part on the ranks of a stage: their mean in each profiled step, and the median of the
steps. The plan has the passes, what follows the last of them, and the step.

By hand, stage 0 with forwards from 0 to 1 and 1 to 2 s on one rank, 0 to 1 and 2 to 4 s on another:
2.5 s of forward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from typing_extensions import TypedDict  # pydantic needs it to validate them before Python 3.12

from mpctl.bench.report import SCHEMA, BenchEnvelope, BenchRow, bench_environment, spread
from mpctl.bench.run_profile import RunProfile
from mpctl.estimate.timeline import StepLine
from mpctl.pipeline.schedule.orders import Kind
from mpctl.rundir.profile_files import ProfiledStep, ProfileEvent

PASSES: dict[Kind, str] = {
    "forward": "forward",
    "backward": "backward",
    "backward_input": "backward",
    "backward_weight": "weight gradients",
}
CLOSING, STEP = "after the schedule", "step"
PARTS = (
    STEP,
    *dict.fromkeys(PASSES.values()),
    CLOSING,
    "data",
    "gradients",
    "norm",
    "optimizer",
    "status",
)
"""The order of a stage's parts; collectives by axis follow."""


class TraceRow(BenchRow):
    """A part of the step on the ranks of a stage. ranks: how many recorded it; share: of their
    step; predicted_seconds: by the plan, None where it has no such part or no times."""

    stage: int
    part: str
    ranks: int
    share: float
    predicted_seconds: float | None


class TraceFindings(TypedDict):
    """steps: those profiled; ranks: how many recorded them; missing: ranks of the run that did not;
    clock_offsets: seconds added to the times of each clock; planned_contention: seconds of the
    planned step that ranks wait for a core; file: the trace that was written."""

    steps: list[int]
    ranks: int
    missing: list[int]
    clock_offsets: dict[str, float]
    planned_contention: float
    file: str


class TraceReport(BenchEnvelope):
    """What `mpctl bench trace` reports. environment: of the machine that reads the profile, with
    the hosts of the run; load_at_start is 0, as that of the run is not known."""

    results: list[TraceRow]
    findings: TraceFindings


class PlannedStep(TypedDict):
    """The plan's step: its passes (None where it has no times), its whole length in seconds, and
    those of it that ranks wait for a core, which the passes do not contain."""

    line: StepLine | None
    seconds: float | None
    contention: float


def trace_report(
    profile: RunProfile, planned: PlannedStep, *, job: str, command: str, file: str
) -> TraceReport:
    """The report on a profile. job: its name; command: as typed; file: the trace's path."""
    lines = list(profile.lines)
    environment = bench_environment()
    environment["host"] = ", ".join(sorted({line["host"] for line in lines}))
    environment["load_at_start"] = 0.0
    return {
        "schema": SCHEMA,
        "bench": "trace",
        "job": job,
        "is_complete": not profile.missing,
        "environment": environment,
        "command": command,
        "results": trace_rows(profile, planned),
        "findings": {
            "steps": list(profile.steps),
            "ranks": len({line["rank"] for line in lines}),
            "missing": profile.missing,
            "clock_offsets": dict(profile.offsets),
            "planned_contention": planned["contention"],
            "file": file,
        },
    }


def trace_rows(profile: RunProfile, planned: PlannedStep) -> list[TraceRow]:
    """The parts of each stage, by stage."""
    stages: defaultdict[int, list[ProfiledStep]] = defaultdict(list)
    for line in profile.lines:
        stages[line["coords"].get("pp", 0)].append(line)
    return [row for stage in sorted(stages) for row in _stage_rows(stage, stages[stage], planned)]


def _stage_rows(
    stage: int, lines: Sequence[ProfiledStep], planned: PlannedStep
) -> Iterator[TraceRow]:
    steps: defaultdict[int, list[dict[str, float]]] = defaultdict(list)
    for line in lines:
        if parts := part_seconds(line["events"]):
            steps[line["step"]].append(parts)
    known = {part for ranks in steps.values() for rank in ranks for part in rank}
    predicted = planned_parts(planned, stage)
    order = [*(part for part in PARTS if part in known), *sorted(known.difference(PARTS))]
    whole = [fmean(rank[STEP] for rank in ranks) for ranks in steps.values()]
    for part in order:
        means = [fmean(rank.get(part, 0.0) for rank in ranks) for ranks in steps.values()]
        yield {
            "name": f"stage {stage} {part}",
            **spread(means),
            "stage": stage,
            "part": part,
            "ranks": len({line["rank"] for line in lines}),
            "share": sum(means) / sum(whole),
            "predicted_seconds": predicted.get(part),
        }


def part_seconds(events: Sequence[ProfileEvent]) -> dict[str, float]:
    """Seconds of each part of one rank's step; empty where the step itself is not recorded.
    Collectives of an axis are called `in pp`."""
    step = next((event for event in events if event["name"] == STEP), None)
    if step is None or not step["ended"] > step["began"]:
        return {}
    seconds, last = {STEP: _length(step)}, step["began"]
    for event in events:
        if event is step or event["began"] < step["began"] or event["ended"] > step["ended"]:
            continue  # a validation or a save after the step
        part = f"in {event['axis']}" if "axis" in event else PASSES.get(event["name"])  # type: ignore[call-overload]
        name = part or event["name"]
        seconds[name] = seconds.get(name, 0.0) + _length(event)
        if event["name"] in PASSES:
            last = max(last, event["ended"])
    seconds[CLOSING] = step["ended"] - last
    return seconds


def planned_parts(planned: PlannedStep, stage: int) -> Mapping[str, float]:
    """Seconds that the plan has for the parts of a stage."""
    parts, step, total = dict[str, float](), planned["line"], planned["seconds"]
    if total is not None:
        parts[STEP] = total
    if step is None or stage >= len(step.line.orders):
        return parts
    times = (step.line.orders[stage], step.line.starts[stage], step.line.ends[stage])
    for action, start, end in zip(*times, strict=True):
        name = PASSES[action.kind]
        parts[name] = parts.get(name, 0.0) + (end - start) * step.microbatches / step.played
    if total is not None and not step.skipped:
        parts[CLOSING] = total - planned["contention"] - times[2][-1]
    return parts


def _length(event: ProfileEvent) -> float:
    return event["ended"] - event["began"]
