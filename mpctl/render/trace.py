"""The planned step as a trace for Perfetto or chrome://tracing: what each stage does and sends.

The format is the Trace Event Format's JSON object: `X` events with `ts` and `dur` in microseconds,
`M` events that name rows. pid is the pipeline stage; tid 0 its work, tid 1 what follows its
last action, from tid 2 on its messages to other stages. A rank of a stage does what its stage does.

By hand: a forward of 1 ms at 2 ms is {"ph": "X", "ts": 2000, "dur": 1000, "name": "F0", ...}.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from typing import Any

from mpctl import __version__
from mpctl.estimate.timeline import StepLine
from mpctl.pipeline.schedule.orders import Action, StageChunk, show, target

Event = dict[str, Any]
ROWS = ("work", "after the schedule", "sends")
SENDS = 2  # the first row of messages


def trace_text(step: StepLine, *, total: float | None = None) -> str:
    """The trace as JSON text. total: seconds of the whole step, of which the schedule is the first
    part."""
    return json.dumps(trace_document(step, total=total), separators=(",", ":")) + "\n"


def trace_document(step: StepLine, *, total: float | None = None) -> dict[str, Any]:
    """The events of a step. total: seconds of the whole step, of which the schedule is the first
    part."""
    stages = range(len(step.line.orders))
    events = chain.from_iterable(
        (*_names(stage), *_stage(step, stage), *_after(step, stage, total)) for stage in stages
    )
    return {
        "traceEvents": list(events),
        "displayTimeUnit": "ms",
        "otherData": {
            "schema": "mpctl.trace/1",
            "mpctl": __version__,
            "is_estimate": True,
            "microbatches": step.microbatches,
            "played": step.played,
            "schedule_seconds": step.seconds,
            "step_seconds": total,
        },
    }


def _names(stage: int) -> Iterator[Event]:
    yield _named(stage, 0, "process_name", name=f"stage {stage}")
    yield _named(stage, 0, "process_sort_index", sort_index=stage)
    for row, name in enumerate(ROWS):
        yield _named(stage, row, "thread_name", name=name)


def _named(stage: int, row: int, what: str, **arguments: Any) -> Event:
    return {"ph": "M", "pid": stage, "tid": row, "name": what, "args": arguments}


def _stage(step: StepLine, stage: int) -> Iterator[Event]:
    line, num_stages = step.line, len(step.line.orders)
    chunks = 1 + max(action.chunk for action in line.orders[stage])
    free: list[float] = []  # when each row of sends ends
    for action, start, end in zip(
        line.orders[stage], line.starts[stage], line.ends[stage], strict=True
    ):
        yield _event(stage, 0, _name(action, chunks), action.kind, (start, end), action)
        receiver = target(action, stage=stage, stages=num_stages, chunks=chunks)
        if receiver is None:
            continue
        size, seconds = step.sent[StageChunk(stage, action.chunk), receiver]
        if size:
            name = f"{_name(action, chunks)} to stage {receiver.stage}"
            row = _row(free, end, end + seconds)
            sent = _event(stage, row, name, "send", (end, end + seconds), action)
            sent["args"] |= {"bytes": size, "to_stage": receiver.stage}
            yield sent
    for row in range(1, len(free)):
        yield _named(stage, SENDS + row, "thread_name", name=f"sends {row + 1}")


def _row(free: list[float], start: float, end: float) -> int:
    """Messages on the way at once stand in rows of their own: events of one row may not overlap."""
    for row, is_free in enumerate(free):
        if is_free <= start:
            free[row] = end
            return SENDS + row
    free.append(end)
    return SENDS + len(free) - 1


def _event(
    stage: int, row: int, name: str, kind: str, times: tuple[float, float], action: Action
) -> Event:  # fmt: skip
    return {
        "ph": "X", "pid": stage, "tid": row, "name": name, "cat": kind, **_times(*times),
        "args": {"microbatch": action.microbatch, "chunk": action.chunk},
    }  # fmt: skip


def _times(start: float, end: float) -> dict[str, float]:
    """Microseconds in whole nanoseconds, so that what touches does not overlap."""
    began, ended = round(start * 1e9), round(end * 1e9)
    return {"ts": began / 1e3, "dur": (ended - began) / 1e3}


def _name(action: Action, chunks: int) -> str:
    """`F3`; of several chunks `F3.1`."""
    return show([action]) if action.chunk or chunks == 1 else f"{show([action])}.0"


def _after(step: StepLine, stage: int, total: float | None) -> Iterator[Event]:
    """What the estimate knows as a length alone: sums over replicas, the optimizer."""
    if total is None or step.skipped or total <= step.seconds:
        return
    yield {
        "ph": "X", "pid": stage, "tid": 1, "name": "sums of once a step and optimizer",
        "cat": "after", **_times(step.seconds, total), "args": {},
    }  # fmt: skip
