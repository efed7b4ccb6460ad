"""The planned step as a trace for Perfetto or chrome://tracing: work and messages of stages.

The format is the Trace Event Format's JSON object: `X` events with `ts` and `dur` in microseconds,
`M` events that name rows. pid is the pipeline stage; tid 0 its work, tid 1 what follows its
last action, from tid 2 on its messages to other stages. A rank of a stage does what its stage does.

A forward of 1 ms at 2 ms is {"ph": "X", "ts": 2000, "dur": 1000, "name": "F0", ...}.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from typing import Any, Literal

from typing_extensions import TypedDict  # pydantic needs it to validate them before Python 3.12

from mpctl import __version__
from mpctl.model.pipeline.placement import StageChunk
from mpctl.model.pipeline.schedule.orders import Action, show, target
from mpctl.plan.estimate.timeline import StepLine

Event = dict[str, Any]
ROWS = ("work", "after the schedule", "sends")
SENDS = 2  # the first row of messages


def trace_text(step: StepLine, *, total: float | None = None, contention: float = 0.0) -> str:
    """The trace as JSON text; arguments as those of `trace_document`."""
    document = trace_document(step, total=total, contention=contention)
    return json.dumps(document, separators=(",", ":")) + "\n"


class TraceData(TypedDict):
    """Schema mpctl.trace/2: what a trace says about itself. microbatches: of the step, played: of them, those that
    the trace has."""

    schema: Literal["mpctl.trace/2"]
    mpctl: str
    is_estimate: bool
    microbatches: int
    played: int
    schedule_seconds: float
    step_seconds: float | None


class TraceDocument(TypedDict):
    """The planned step in the Trace Event Format."""

    traceEvents: list[Event]
    displayTimeUnit: str
    otherData: TraceData


def trace_document(step: StepLine, *, total: float | None = None, contention: float = 0.0) -> TraceDocument:
    """The events of a step. total: seconds of the full step, of which the schedule is the first
    part; contention: those of it that ranks wait for a core (plan/estimate/network.py), which no
    action is known to contain and which stand at the end."""
    stages = range(len(step.line.orders))
    events = chain.from_iterable(
        (*_names(stage), *_stage(step, stage), *_after(step, stage, total, contention)) for stage in stages
    )
    return {
        "traceEvents": list(events),
        "displayTimeUnit": "ms",
        "otherData": {
            "schema": "mpctl.trace/2",
            "mpctl": __version__,
            "is_estimate": True,
            "microbatches": step.microbatches,
            "played": step.played,
            "schedule_seconds": step.seconds,
            "step_seconds": total,
        },
    }


def _names(stage: int) -> Iterator[Event]:
    yield named_row(stage, 0, "process_name", name=f"stage {stage}")
    yield named_row(stage, 0, "process_sort_index", sort_index=stage)
    for row, name in enumerate(ROWS):
        yield named_row(stage, row, "thread_name", name=name)


def named_row(process: int, row: int, what: str, **arguments: Any) -> Event:
    """The event that names a process or a row; what: "process_name" and the like."""
    return {"ph": "M", "pid": process, "tid": row, "name": what, "args": arguments}


def _stage(step: StepLine, stage: int) -> Iterator[Event]:
    line, num_stages = step.line, len(step.line.orders)
    chunks = 1 + max(action.chunk for action in line.orders[stage])
    free: list[float] = []  # when each row of sends ends
    for action, start, end in zip(line.orders[stage], line.starts[stage], line.ends[stage], strict=True):
        yield _event(stage, 0, pass_name(action, chunks), action.kind, (start, end), action)
        receiver = target(action, stage=stage, stages=num_stages, chunks=chunks, is_v=step.is_v)
        if receiver is None or receiver.stage == stage:
            continue
        size, seconds = step.sent[StageChunk(stage, action.chunk), receiver]
        if size:
            name = f"{pass_name(action, chunks)} to stage {receiver.stage}"
            row = free_row(free, end, end + seconds)
            sent = _event(stage, row, name, "send", (end, end + seconds), action)
            sent["args"] |= {"bytes": size, "to_stage": receiver.stage}
            yield sent
    for row in range(1, len(free)):
        yield named_row(stage, SENDS + row, "thread_name", name=f"sends {row + 1}")


def free_row(free: list[float], start: float, end: float) -> int:
    """The row, from SENDS on, of a message under way from `start` to `end`: concurrent messages are
    in different rows, since events of one row may not overlap. free: when the last message of each
    row ends; it is updated."""
    for row, is_free in enumerate(free):
        if is_free <= start:
            free[row] = end
            return SENDS + row
    free.append(end)
    return SENDS + len(free) - 1


def _event(stage: int, row: int, name: str, kind: str, times: tuple[float, float], action: Action) -> Event:
    arguments = {"microbatch": action.microbatch, "chunk": action.chunk}
    return complete_event(stage, row, name, kind, times, arguments)


def complete_event(
    process: int, row: int, name: str, kind: str, times: tuple[float, float], arguments: dict[str, Any]
) -> Event:
    """An event with its begin and end, in seconds. kind: the category, by which viewers filter."""
    return {"ph": "X", "pid": process, "tid": row, "name": name, "cat": kind, **_times(*times), "args": arguments}


def _times(start: float, end: float) -> dict[str, float]:
    """Microseconds, rounded to nanoseconds, so that adjacent events do not overlap."""
    began, ended = round(start * 1e9), round(end * 1e9)
    return {"ts": began / 1e3, "dur": (ended - began) / 1e3}


def pass_name(action: Action, chunks: int) -> str:
    """`F3` for the forward of micro batch 3; where the stage has several chunks `F3.1`."""
    return show([action]) if action.chunk or chunks == 1 else f"{show([action])}.0"


def _after(step: StepLine, stage: int, total: float | None, contention: float) -> Iterator[Event]:
    """Parts estimated only as lengths: sums over replicas, the optimizer, contention."""
    if total is None or step.skipped:
        return
    end = total - contention
    if end > step.seconds:
        name = "sums of once a step and optimizer"
        yield complete_event(stage, 1, name, "after", (step.seconds, end), {})
    if contention > 0:
        name = "contention: ranks share cores"
        yield complete_event(stage, 1, name, "contention", (end, total), {})
