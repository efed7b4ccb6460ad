"""Profiled steps of a run: read with one common clock, and their time by part and stage.

Ranks of one host share a clock. Between hosts the last all-reduce over the world of each step (its
status) gives the offset: it ends on all ranks at about the same moment, since none can leave it
before the last has joined. A host's offset is the median over the steps of the difference between
the first ends on both hosts; its error is about the time of a small message.

A part is the time of all events of one kind in a step: the forwards of its micro batches, or the
collectives of a rank along an axis. Parts overlap: a forward contains its collectives over tp. A
row is a part on the ranks of a stage: their mean in each profiled step, and the median of the
steps. The plan has the passes, the work after the last of them, and the step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from statistics import fmean, median

from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic needs it to validate them before Python 3.12

from mpctl.core.errors import InputError
from mpctl.measure.bench.report import BenchEnvelope, BenchRow, bench_environment, envelope, spread
from mpctl.model.pipeline.schedule.orders import Kind
from mpctl.plan.estimate.timeline import StepLine
from mpctl.records.rundir.collective_log import LONGEST_RANK_LIST
from mpctl.records.rundir.group_names import group_name
from mpctl.records.rundir.profile_files import PROFILE, ProfiledStep, ProfileEvent

Steps = Mapping[int, Mapping[int, ProfiledStep]]
"""The record of each rank in each profiled step: by step, then by rank."""
_LINE = TypeAdapter(ProfiledStep)


@dataclass(frozen=True)
class RunProfile:
    """The profile of a run. offsets: seconds to be added to times of a clock, by its name, to
    convert them to one common clock; foreign: lines of its files that are no profiled steps."""

    steps: Steps
    offsets: Mapping[str, float]
    foreign: int = 0

    @property
    def lines(self) -> Iterator[ProfiledStep]:
        """Every rank's line of every step, by step and rank."""
        return (ranks[rank] for ranks in self.steps.values() for rank in sorted(ranks))

    @property
    def missing(self) -> list[int]:
        """Ranks of the run that recorded no step, or not all that others did."""
        size = max(line["world_size"] for line in self.lines)
        return [r for r in range(size) if any(r not in ranks for ranks in self.steps.values())]

    def events(self, line: ProfiledStep) -> Iterator[ProfileEvent]:
        """The events of a line, in times of the one clock."""
        offset = self.offsets.get(line["clock"], 0.0)
        for event in line["events"]:
            moved: ProfileEvent = {**event, "began": event["began"] + offset, "ended": event["ended"] + offset}
            if "started" in event:
                moved["started"] = event["started"] + offset
            if "axis" in event:
                moved["axis"] = group_name(event["axis"])
            yield moved


def read_run_profile(run: Path) -> RunProfile:
    """The profile of the run in directory `run`. Raises InputError where there is none."""
    steps: defaultdict[int, dict[int, ProfiledStep]] = defaultdict(dict)
    foreign = 0
    try:
        for path in sorted((run / PROFILE).glob("rank-*.jsonl")):
            for content in path.read_bytes().splitlines():
                if (line := parse_step(content)) is None:
                    foreign += 1
                else:  # a later attempt's line of the same step counts
                    steps[line["step"]][line["rank"]] = line
    except OSError as error:
        message = f"{error.filename} cannot be read: {error.strerror}"
        raise InputError.of("no-profile", str(run), message, "check the path and its rights") from None
    if not steps:
        raise InputError.of(
            "no-profile",
            str(run),
            f"{run / PROFILE} holds no profiled step",
            "launch the job with --profile 5-7, which records steps 5 to 7",
        )
    ordered = {step: steps[step] for step in sorted(steps)}
    return RunProfile(ordered, clock_offsets(ordered), foreign)


def parse_step(content: bytes) -> ProfiledStep | None:
    """The step in a line of a rank's file; None where it holds none."""
    try:
        line = _LINE.validate_json(content)
    except ValidationError:
        return None
    times = (e[key] for e in line["events"] for key in ("began", "ended", "started") if key in e)
    is_rank = 0 <= line["rank"] < line["world_size"] <= LONGEST_RANK_LIST
    return line if is_rank and all(map(isfinite, times)) else None


def clock_offsets(steps: Steps) -> dict[str, float]:
    """Seconds to be added to the times of each clock: 0 for the first rank's; a clock without a
    common step is unchanged."""
    first: defaultdict[str, dict[int, float]] = defaultdict(dict)
    for step, ranks in steps.items():
        for rank in sorted(ranks):
            ends = first[ranks[rank]["clock"]]
            if (end := _meeting(ranks[rank])) is not None:
                ends[step] = min(ends.get(step, end), end)
    reference = next(iter(first.values()), {})
    return {
        clock: median(reference[step] - ends[step] for step in common)
        if ends is not reference and (common := reference.keys() & ends.keys())
        else 0.0
        for clock, ends in first.items()
    }


def _meeting(line: ProfiledStep) -> float | None:
    """When the last all-reduce over the world ended in a step, None where there was none."""
    end = next((event["ended"] for event in line["events"] if event["name"] == "step"), None)
    ends = [
        event["ended"]
        for event in line["events"]
        if event.get("axis") == "world" and (end is None or event["ended"] <= end)
    ]
    return max(ends, default=None)


PASSES: dict[Kind, str] = {
    "forward": "forward",
    "backward": "backward",
    "backward_input": "backward",
    "backward_weight": "weight gradients",
}
CLOSING, STEP = "after the schedule", "step"
PARTS = (STEP, *dict.fromkeys(PASSES.values()), CLOSING, "data", "gradients", "norm", "optimizer", "status")
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
    """Report of `mpctl bench trace`. environment: the machine that reads the profile, with the hosts of
    the run; load_at_start is 0, because the load during the run is unknown."""

    results: list[TraceRow]
    findings: TraceFindings


class PlannedStep(TypedDict):
    """The plan's step: its passes (None where it has no times), its length in seconds, and the
    seconds in which ranks wait for a core, which the passes do not contain."""

    line: StepLine | None
    seconds: float | None
    contention: float


def trace_report(profile: RunProfile, planned: PlannedStep, *, job: str, command: str, file: str) -> TraceReport:
    """The report on a profile. job: its name; command: as typed; file: the trace's path."""
    lines = list(profile.lines)
    environment = bench_environment()
    environment["host"] = ", ".join(sorted({line["host"] for line in lines}))
    environment["load_at_start"] = 0.0
    return {
        **envelope("trace", job, environment, command, is_complete=not profile.missing),
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
    stages: defaultdict[int, list[ProfiledStep]] = defaultdict(list)
    for line in profile.lines:
        stages[line["coords"].get("pp", 0)].append(line)
    return [row for stage in sorted(stages) for row in _stage_rows(stage, stages[stage], planned)]


def _stage_rows(stage: int, lines: Sequence[ProfiledStep], planned: PlannedStep) -> Iterator[TraceRow]:
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
