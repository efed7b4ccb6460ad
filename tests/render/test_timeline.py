"""The step's timeline: played by the estimate's seconds, drawn to scale, and as a trace."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest

from mpctl.model.pipeline.placement import StageChunk
from mpctl.plan.estimate.makespan import ChunkTimes, PipelineTiming
from mpctl.plan.estimate.timeline import StepLine, find_step_line, handed_over, play
from mpctl.plan.planning.plan import Plan, load_plan
from mpctl.render.svg_timeline import ROW, WHOLE, WIDTH, StepPicture
from mpctl.render.trace import trace_document, trace_text
from mpctl.spec.parallel import ScheduleName

VARIANTS: list[dict[str, Any]] = [
    {},
    {"parallel.schedule": "zero-bubble"},
    {"parallel.schedule": "gpipe"},
    {"parallel.vpp": 2},
    {"parallel.pp": 1, "parallel.dp": 8},
]


def planned(settings: dict[str, Any]) -> tuple[Plan, StepLine]:
    plan = load_plan("two-nodes-16-gpus", settings)
    assert plan.estimate is not None
    step = find_step_line(plan.estimate.layout)
    assert isinstance(step, StepLine)
    return plan, step


def pipeline(m: int, *, p: int = 4, schedule: ScheduleName = "1f1b", backward: float = 2.0) -> PipelineTiming:
    chunks = [[ChunkTimes(1.0, backward / 2, backward / 2)] for _ in range(p)]
    return PipelineTiming(schedule, chunks, [0.0] * (p - 1), [0.0] * (p - 1), m)


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_the_line_is_the_estimates_schedule(settings: dict[str, Any]) -> None:
    """Its busy seconds and bubble leave of the estimate's total what follows the last action."""
    plan, step = planned(settings)
    assert plan.estimate is not None
    assert plan.estimate.step_seconds is not None
    assert 0.5 < step.seconds / plan.estimate.step_seconds <= 1
    passes = len(plan.stages or ()) * plan.job.num_microbatches * plan.job.parallel.vpp
    kinds = 3 if plan.job.parallel.schedule == "zero-bubble" else 2
    assert sum(map(len, step.line.orders)) == kinds * passes


def test_by_hand() -> None:
    step = play(pipeline(3, p=2), {})
    assert (step.seconds, step.line.idle, step.skipped) == (12, (3, 3), 0)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero-bubble"])
def test_a_step_that_is_not_played_whole_is_as_long(schedule: ScheduleName) -> None:
    whole = play(pipeline(400, schedule=schedule, backward=80), {})
    part = play(pipeline(400, schedule=schedule, backward=80), {}, limit=600)
    assert part.skipped > 300
    assert part.seconds == pytest.approx(whole.seconds)
    if schedule != "zero-bubble":  # its pieces are too narrow for three digits
        assert ">399</text>" in StepPicture.of(part).draw()


def test_messages_by_hand() -> None:
    """F = 1, B = 2, 5 s ahead and half a second back: F0 at 0 and 6, B0 at 7, its gradient there at
    9.5; F1 is sent while F0 is still on its way, so that a trace has two rows for them."""
    first, second = StageChunk(0, 0), StageChunk(1, 0)
    slow = pipeline(2, p=2)._replace(ahead=[5.0], back=[0.5])
    step = play(slow, {(first, second): 8, (second, first): 4})
    assert step.line.starts == ((0, 1, 9.5, 12.5), (6, 7, 9, 10))
    assert step.sent == {(first, second): (8, 5.0), (second, first): (4, 0.5)}
    events = trace_document(step, total=20.0)["traceEvents"]
    rows = [
        (event["pid"], event["tid"], event["name"], event["ts"], event["dur"])
        for event in events
        if event.get("cat") in ("send", "after")
    ]
    after = ("sums of once a step and optimizer", 14.5e6, 5.5e6)
    assert rows == [
        (0, 2, "F0 to stage 1", 1e6, 5e6),
        (0, 3, "F1 to stage 1", 2e6, 5e6),
        (0, 1, *after),
        (1, 2, "B0 to stage 0", 9e6, 0.5e6),
        (1, 2, "B1 to stage 0", 12e6, 0.5e6),
        (1, 1, *after),
    ]
    assert [e["args"]["name"] for e in events if (e["pid"], e["tid"]) == (0, 3) and e["ph"] == "M"]


# ---------------------------------------------------------------- the picture


def drawn_boxes(picture: StepPicture) -> dict[float, list[tuple[float, float]]]:
    """(x, width) of every action, by the row's top."""
    found: dict[float, list[tuple[float, float]]] = defaultdict(list)
    for path in re.findall(r'<path d="([^"]+)" class="s s\d">', picture.draw()):
        for x, y, width in re.findall(r"M([\d.]+) ([\d.]+)h([\d.]+)v", path):
            found[float(y)].append((float(x), float(width)))
    return found


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_every_action_is_drawn_once_and_to_scale(settings: dict[str, Any]) -> None:
    _, step = planned(settings)
    picture = StepPicture.of(step)
    rows = drawn_boxes(picture)
    assert len(rows) == len(step.line.orders)
    for (_, boxes), order, busy in zip(sorted(rows.items()), step.line.orders, step.line.busy, strict=True):
        assert len(boxes) == len(order)
        widths = sum(width for _, width in boxes)
        assert widths == pytest.approx(busy * picture.scale.unit, abs=0.01 * len(boxes))
        ends = sorted(boxes)
        assert all(a + w <= b + 0.02 for (a, w), (b, _) in pairwise(ends))
        assert ends[-1][0] + ends[-1][1] <= WIDTH + 0.02


@pytest.mark.parametrize(("p", "m"), [(2, 1000), (16, 300), pytest.param(60, 200, marks=pytest.mark.slow)])
def test_a_long_step_is_drawn_at_both_ends(p: int, m: int) -> None:
    picture = StepPicture.of(play(pipeline(m, p=p), {}))
    assert not picture.scale.is_whole
    rows = drawn_boxes(picture)
    assert max(map(len, rows.values())) <= 2 * WHOLE + 4  # a cut parts an action
    assert len(picture.draw()) < 500_000
    boxes = [box for row in rows.values() for box in row]
    assert min(boxes)[0] < 63
    assert max(x + width for x, width in boxes) == pytest.approx(WIDTH, abs=0.05)
    assert picture.height <= 60 * ROW


def test_a_steady_stretch_stands_between_warm_up_and_cool_down() -> None:
    """128 micro batches of 20 chunks on 4 stages: stage 0 does 82 forwards before its first
    backward. What is shown of the middle has both kinds at every stage, and the cuts are marked."""
    chunks = [[ChunkTimes(1.0, 1.0, 1.0)] * 20 for _ in range(4)]
    step = play(PipelineTiming("1f1b", chunks, [0.0] * 79, [0.0] * 79, 128), {})
    picture = StepPicture.of(step)
    drawn = picture.draw()
    assert len(picture.scale.windows) == 3 and drawn.count("…") == 2 * 4
    assert all(name in drawn for name in ("warm-up", "steady part", "cool-down"))
    (_, _), (start, end), (_, _) = picture.scale.windows
    line = step.line
    for order, starts, ends in zip(line.orders, line.starts, line.ends, strict=True):
        timed = zip(order, starts, ends, strict=True)
        kinds = [action.kind for action, a, b in timed if start <= a and b <= end]
        assert 0.3 < kinds.count("backward") / len(kinds) < 0.7
    rows = drawn_boxes(picture)
    for boxes in rows.values():
        assert all(a + w <= b + 0.02 for (a, w), (b, _) in pairwise(sorted(boxes)))


def test_a_schedule_without_a_steady_part_has_two_windows() -> None:
    picture = StepPicture.of(play(pipeline(500, schedule="gpipe"), {}))
    assert len(picture.scale.windows) == 2 and "steady part" not in picture.draw()


# ---------------------------------------------------------------- the trace


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_the_trace_says_what_the_plan_says(settings: dict[str, Any]) -> None:
    plan, step = planned(settings)
    assert plan.estimate is not None
    total = plan.estimate.step_seconds
    document = json.loads(trace_text(step, total=total))
    assert document["otherData"]["schema"] == "mpctl.trace/2"
    rows: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in document["traceEvents"]:
        assert event["ph"] in ("X", "M")
        assert isinstance(event["name"], str)
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            rows[event["pid"], event["tid"]].append(event)
    for stage, busy in enumerate(step.line.busy):
        work = rows[stage, 0]
        assert len(work) == len(step.line.orders[stage])
        assert sum(event["dur"] for event in work) == pytest.approx(1e6 * busy, abs=1)
    for events in rows.values():  # of one row, one after the other
        ends = [round(1e3 * (event["ts"] + event["dur"])) for event in events]
        starts = [round(1e3 * event["ts"]) for event in events]
        assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
    last = max(event["ts"] + event["dur"] for events in rows.values() for event in events)
    assert last == pytest.approx(1e6 * (total or 0), rel=1e-6)


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_the_trace_sends_the_bytes_of_the_plan(settings: dict[str, Any]) -> None:
    plan, step = planned(settings)
    assert plan.estimate is not None
    sizes = {pair: size for pair, (size, _) in step.sent.items()}
    assert sizes == handed_over(plan.estimate.layout)
    sent: dict[int, int] = defaultdict(int)
    for event in trace_document(step)["traceEvents"]:
        if event.get("cat") == "send":
            sent[event["pid"]] += event["args"]["bytes"]
    for stage, messages in enumerate(plan.estimate.messages):
        assert sent[stage] == sum(m.bytes * m.count for m in messages if m.kind == "send")
