"""The trace of real steps: times by hand, names of the planned one, rows for a viewer."""

from __future__ import annotations

import json
from typing import Any

from mpctl.render.run_trace import run_trace_document, run_trace_text
from tests.measure.bench.profiles import event, line, profile_of, two_stages
from tests.measure.bench.test_trace import NO_PLAN, planned


def rows(events: list[dict[str, Any]], pid: int, tid: int) -> list[tuple[str, float, float]]:
    return [
        (e["name"], e["ts"] / 1e6, e["dur"] / 1e6) for e in events if (e["ph"], e["pid"], e["tid"]) == ("X", pid, tid)
    ]


def test_events_by_hand() -> None:
    document = run_trace_document(profile_of(*two_stages()), NO_PLAN, job="x")
    events = document["traceEvents"]
    assert sorted(rows(events, 0, 0)) == [
        ("B0", 5, 2),
        ("F0", 0, 1),
        ("data", 0, 0.25),
        ("optimizer", 7, 0.5),
        ("status", 7.5, 0.5),
        ("step 3", 0, 8),
        ("validation", 8, 12),
    ]
    assert rows(events, 0, 1) == [
        ("F0 to stage 1", 1, 0.25),
        ("B0 from stage 1", 1.25, 0.25),
        ("B0 from stage 1", 1.5, 3.5),
        ("world all_reduce 32 B", 7.5, 0.5),
    ]
    assert rows(events, 0, 2) == [("B0 from stage 1", 1.25, 3.75)]
    assert rows(events, 1, 0)[1:] == [("F0", 1.5, 1), ("B0", 2.5, 2)]
    (received,) = [e["args"] for e in events if (e["pid"], e["tid"], e["ph"]) == (0, 2, "X")]
    assert received == {
        "step": 3,
        "axis": "pp",
        "bytes": 8,
        "dtype": "float32",
        "of": "backward",
        "microbatch": 0,
        "chunk": 0,
        "peer": 1,
    }
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == ["rank 0: tp 0, pp 0, a", "rank 1: tp 0, pp 1, a"]


def test_the_plan_stands_beside_each_step_after_the_ranks_of_its_stage() -> None:
    steps = (*two_stages(3, 100.0), *two_stages(4, 130.0))
    document = json.loads(run_trace_text(profile_of(*steps), planned(), job="x"))
    events = document["traceEvents"]
    order = {e["pid"]: e["args"]["sort_index"] for e in events if e["name"] == "process_sort_index"}
    assert sorted(order, key=order.__getitem__) == [0, 2, 1, 3]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert (names[2], names[3]) == ("plan: stage 0", "plan: stage 1")
    begins = [ts for name, ts, _ in rows(events, 2, 0) if name == "F0"]
    assert begins == [0, 30]
    assert rows(events, 2, 1) == [
        ("sums of once a step and optimizer", 12, 2),
        ("sums of once a step and optimizer", 42, 2),
        ("contention: ranks share cores", 14, 1),
        ("contention: ranks share cores", 44, 1),
    ]
    assert document["otherData"]["planned_step_seconds"] == 15


def test_messages_under_way_at_once_stand_in_rows_of_their_own() -> None:
    sent = {"axis": "dp_cp", "bytes": 4, "dtype": "float32"}
    waits = [
        event("all_reduce", began, ended, phase="wait", started=started, **sent)
        for started, began, ended in ((1, 4, 5), (2, 5, 6), (5, 7, 8))
    ]
    starts = [event("all_reduce", at, at, phase="start", **sent) for at in (1, 2, 5)]
    step = line(0, 1, event("step", 0, 9), *starts, *waits)
    events = run_trace_document(profile_of(step), NO_PLAN, job="x")["traceEvents"]
    name = "dp_cp all_reduce 4 B"
    assert rows(events, 0, 2) == [(name, 1, 4), (name, 5, 3)]
    assert rows(events, 0, 3) == [(name, 2, 4)]


def test_passes_of_several_chunks_name_theirs() -> None:
    passes = [event("forward", n, n + 1, microbatch=2, chunk=n) for n in (0, 1)]
    step = line(0, 1, event("step", 0, 2), *passes)
    events = run_trace_document(profile_of(step), NO_PLAN, job="x")["traceEvents"]
    assert [name for name, _, _ in rows(events, 0, 0)] == ["step 1", "F2.0", "F2.1"]
