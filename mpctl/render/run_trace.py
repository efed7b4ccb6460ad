"""Profiled steps as a trace for Perfetto or chrome://tracing, and the planned step with them.

The format is that of the planned trace (trace.py), with its names: a process for each rank and,
after the ranks of a stage, one for the plan of that stage, which begins where each profiled step
does. A rank's rows: tid 0 its passes and other work, tid 1 where it is in a collective and computes
nothing, from tid 2 on messages from their start to the end of the wait for them.

A forward of micro batch 0 on rank 3 that begins 2 ms after the first event and lasts 1 ms
is {"ph": "X", "pid": 3, "tid": 0, "name": "F0", "ts": 2000, "dur": 1000, ...}.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal, cast

from typing_extensions import TypedDict  # pydantic needs it to validate them before Python 3.12

from mpctl import __version__
from mpctl.core.units import bytes_text
from mpctl.measure.bench.trace import PASSES, PlannedStep, RunProfile
from mpctl.model.pipeline.schedule.orders import Action, Kind
from mpctl.records.rundir.profile_files import ProfileEvent
from mpctl.render.trace import Event, complete_event, free_row, named_row, pass_name, trace_document

ROWS = ("work", "in collectives", "messages")
MESSAGE_KEYS = ("axis", "bytes", "dtype", "of", "microbatch", "chunk", "peer")
Started = tuple[str, str, float]


def run_trace_text(profile: RunProfile, planned: PlannedStep, *, job: str) -> str:
    """The trace as JSON text. job: its name."""
    document = run_trace_document(profile, planned, job=job)
    return json.dumps(document, separators=(",", ":")) + "\n"


class RunTraceData(TypedDict):
    """Schema mpctl.run-trace/2: what a run's trace says about itself. clock_offsets: of hosts, seconds."""

    schema: Literal["mpctl.run-trace/2"]
    mpctl: str
    is_estimate: bool
    job: str
    steps: list[int]
    clock_offsets: dict[str, float]
    planned_step_seconds: float | None


class RunTraceDocument(TypedDict):
    """Profiled steps, and the planned one, in the Trace Event Format."""

    traceEvents: list[Event]
    displayTimeUnit: str
    otherData: RunTraceData


def run_trace_document(profile: RunProfile, planned: PlannedStep, *, job: str) -> RunTraceDocument:
    """The events of all ranks in all profiled steps, and of the plan."""
    begins = (event["began"] for line in profile.lines for event in profile.events(line))
    zero = min(begins, default=0.0)
    return {
        "traceEvents": [*_names(profile), *_events(profile, zero), *_plan(profile, planned, zero)],
        "displayTimeUnit": "ms",
        "otherData": {
            "schema": "mpctl.run-trace/2",
            "mpctl": __version__,
            "is_estimate": False,
            "job": job,
            "steps": list(profile.steps),
            "clock_offsets": dict(profile.offsets),
            "planned_step_seconds": planned["seconds"],
        },
    }


def _names(profile: RunProfile) -> Iterator[Event]:
    """The names and the order of the processes and rows of the ranks."""
    first = {line["rank"]: line for line in reversed(list(profile.lines))}
    for rank, line in sorted(first.items()):
        coords = ", ".join(f"{axis} {at}" for axis, at in line["coords"].items())
        name = f"rank {rank}: {coords}, {line['host']}"
        yield named_row(rank, 0, "process_name", name=name)
        order = _sort_index(line["coords"].get("pp", 0), rank, line["world_size"])
        yield named_row(rank, 0, "process_sort_index", sort_index=order)
        for row, text in enumerate(ROWS):
            yield named_row(rank, row, "thread_name", name=text)


def _events(profile: RunProfile, zero: float) -> Iterator[Event]:
    """Yield the events of all ranks, with times from `zero` on."""
    free: dict[int, list[float]] = {}  # when each row of messages of a rank ends
    for line in profile.lines:
        rank, step = line["rank"], {"step": line["step"]}
        events = sorted(profile.events(line), key=lambda event: event["began"])
        chunks = 1 + max((event.get("chunk", 0) for event in events), default=0)
        starts = {_started(e): e for e in events if e.get("phase") == "start"}
        for event in events:
            kind = event["name"]
            times = (event["began"] - zero, event["ended"] - zero)
            if "axis" not in event:
                name = f"step {line['step']}" if kind == "step" else kind
                if kind in PASSES:
                    name = pass_name(_action(event, kind), chunks)
                more = _chosen(event, ("microbatch", "chunk"))
                yield complete_event(rank, 0, name, kind, times, {**step, **more})
                continue
            start = starts.get(_started(event), event)
            name, message = _title(start, chunks), _chosen(start, MESSAGE_KEYS)
            more = {"phase": event.get("phase"), **message}
            yield complete_event(rank, 1, name, kind, times, {**step, **more})
            if event.get("phase") == "wait":  # the message is under way from its start to here
                times = (event.get("started", event["began"]) - zero, times[1])
                row = free_row(free.setdefault(rank, []), *times)
                yield complete_event(rank, row, name, kind, times, {**step, **message})


def _chosen(event: ProfileEvent, keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: value for key, value in event.items() if key in keys}


def _plan(profile: RunProfile, planned: PlannedStep, zero: float) -> Iterator[Event]:
    """The planned step at each profiled one: a process a stage, after the ranks."""
    if planned["line"] is None:
        return
    world = max(line["world_size"] for line in profile.lines)
    document = trace_document(planned["line"], total=planned["seconds"], contention=planned["contention"])
    for event in document["traceEvents"]:
        stage, moved = event["pid"], {**event, "pid": world + event["pid"]}
        if event["name"] == "process_name":
            moved["args"] = {"name": f"plan: {event['args']['name']}"}
        elif event["name"] == "process_sort_index":
            moved["args"] = {"sort_index": _sort_index(stage, world, world)}
        if event["ph"] == "M":
            yield moved
            continue
        for step, ranks in profile.steps.items():
            began = min(
                (e["began"] for line in ranks.values() for e in profile.events(line) if e["name"] == "step"),
                default=None,
            )
            if began is not None:
                at = round((began - zero) * 1e9) / 1e3
                yield {**moved, "ts": at + event["ts"], "args": {**event["args"], "step": step}}


def _sort_index(stage: int, rank: int, world: int) -> int:
    """Processes stand by stage, in it by rank, and the plan (rank `world`) after them."""
    return stage * (world + 1) + rank


def _started(event: ProfileEvent) -> Started:
    """Return the key that a wait shares with its start."""
    return event["name"], event.get("axis", ""), event.get("started", event["began"])


def _title(event: ProfileEvent, chunks: int) -> str:
    """`tp all_reduce 2.0 MiB`; between stages as the planned trace has it, `F0 to stage 1`."""
    if "peer" in event and "of" in event:
        way = "to" if event["name"] == "send" else "from"
        return f"{pass_name(_action(event, event['of']), chunks)} {way} stage {event['peer']}"
    return f"{event.get('axis')} {event['name']} {bytes_text(event.get('bytes', 0))}"


def _action(event: ProfileEvent, kind: str) -> Action:
    return Action(cast(Kind, kind), event.get("microbatch", 0), event.get("chunk", 0))
