"""A run's profile: clocks of several hosts, damage, and where a step's time goes."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpctl.core.errors import InputError
from mpctl.measure.bench.trace import (
    PlannedStep,
    clock_offsets,
    part_seconds,
    planned_parts,
    read_run_profile,
    trace_report,
    trace_rows,
)
from mpctl.model.pipeline.placement import StageChunk
from mpctl.plan.estimate.makespan import ChunkTimes, PipelineTiming
from mpctl.plan.estimate.timeline import play
from mpctl.records.rundir.profile_files import ProfiledStep, profile_path
from tests.measure.bench.profiles import event, line, profile_of, two_stages, write


def meeting(rank: int, step: int, clock: str, end: float) -> ProfiledStep:
    """A step whose last all-reduce over the world ends at `end`, and one after it."""
    whole = {"axis": "world", "bytes": 8, "dtype": "float64", "phase": "start"}
    events = [event("all_reduce", at - 0.5, at, **whole) for at in (end, end + 4)]
    return line(rank, step, event("step", end - 1, end), *events, clock=clock, host=clock)


def test_hosts_are_aligned_by_the_first_end_of_each_steps_meeting() -> None:
    """By hand: 12.0 on a against 905.0 on b, and 20.0 against 912.8; between them -892.9."""
    steps = {
        1: {
            0: meeting(0, 1, "a", 12.0),
            1: meeting(1, 1, "a", 12.3),
            2: meeting(2, 1, "b", 905.1),
            3: meeting(3, 1, "b", 905.0),
        },
        2: {0: meeting(0, 2, "a", 20.0), 2: meeting(2, 2, "b", 912.8)},
    }
    offsets = clock_offsets(steps)
    assert offsets == {"a": 0.0, "b": pytest.approx(-892.9)}


def test_a_host_without_a_common_step_is_left_as_it_is() -> None:
    steps = {1: {0: meeting(0, 1, "a", 12.0)}, 2: {1: meeting(1, 2, "b", 905.0)}}
    assert clock_offsets(steps) == {"a": 0.0, "b": 0.0}
    assert clock_offsets({1: {0: line(0, 1)}}) == {"a": 0.0}


def test_times_are_moved_to_one_clock(tmp_path: Path) -> None:
    write(tmp_path, meeting(0, 1, "a", 12.0), meeting(1, 1, "b", 905.0))
    profile = read_run_profile(tmp_path)
    ends = [[e["ended"] for e in profile.events(one) if e["name"] == "step"] for one in profile.lines]
    assert ends == [[12.0], [12.0]]


def test_the_last_attempt_counts_and_damage_is_counted(tmp_path: Path) -> None:
    write(tmp_path, *two_stages(3), line(0, 3, event("step", 5.0, 6.0)), *two_stages(4))
    with profile_path(tmp_path, 1).open("a") as stream:
        stream.write('{"rank": 1, "step": 7, "events"\n[]\nnonsense\n{"rank": "x"}\n')
    write(tmp_path, line(1, 9, event("step", 1.0, float("nan"))), line(1, 9, world_size=1 << 60))
    profile = read_run_profile(tmp_path)
    assert (list(profile.steps), profile.foreign, profile.missing) == ([3, 4], 6, [])
    assert profile.steps[3][0]["events"] == [{"name": "step", "began": 5.0, "ended": 6.0}]


def test_ranks_that_recorded_less_are_missing(tmp_path: Path) -> None:
    write(tmp_path, two_stages(3)[0], *two_stages(4))
    assert read_run_profile(tmp_path).missing == [1]


def test_a_run_without_a_profile_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no profiled step") as refused:
        read_run_profile(tmp_path)
    assert "--profile" in refused.value.issues[0].hint


NO_PLAN: PlannedStep = {"line": None, "seconds": None, "contention": 0.0}


def planned() -> PlannedStep:
    """F = 1, B = 2 on 2 stages, 3 micro batches: 12 s of schedule, of a step of 15 s with 1 s of
    contention."""
    chunks = [[ChunkTimes(1.0, 1.0, 1.0)] for _ in range(2)]
    first, second = StageChunk(0, 0), StageChunk(1, 0)
    sizes = {(first, second): 8, (second, first): 8}
    step = play(PipelineTiming("1f1b", chunks, [0.0], [0.0], 3), sizes)
    return {"line": step, "seconds": 15.0, "contention": 1.0}


def test_parts_of_a_step_by_hand() -> None:
    first, second = two_stages()
    assert part_seconds(first["events"]) == {
        "step": 8.0,
        "forward": 1.0,
        "data": 0.25,
        "in pp": 4.0,
        "backward": 2.0,
        "optimizer": 0.5,
        "status": 0.5,
        "in world": 0.5,
        "after the schedule": 1.0,
    }
    assert part_seconds(second["events"]) == {
        "step": 8.0,
        "forward": 1.0,
        "backward": 2.0,
        "in world": 2.75,
        "after the schedule": 3.5,
    }
    assert part_seconds([event("forward", 1.0, 2.0)]) == {}


def test_passes_whose_weights_come_later_are_two_parts() -> None:
    events = [event("step", 0, 9), event("backward_input", 1, 3), event("backward_weight", 4, 8)]
    parts = part_seconds(events)
    assert (parts["backward"], parts["weight gradients"]) == (2, 4)
    assert parts["after the schedule"] == 1


def test_the_plans_parts_by_hand() -> None:
    """Stage 1 ends its last backward at 10, stage 0 at 12; the step without contention at 14."""
    parts = [dict(planned_parts(planned(), stage)) for stage in (0, 1, 2)]
    passes = {"step": 15.0, "forward": 3.0, "backward": 6.0}
    assert parts == [{**passes, "after the schedule": 2.0}, {**passes, "after the schedule": 4.0}, {"step": 15.0}]
    assert planned_parts(NO_PLAN, 0) == {}


def test_rows_are_means_of_ranks_and_medians_of_steps() -> None:
    """Forwards of 1 and 3 s, then 3 and 3 s: 2 and 3 s, of steps of 10 s."""
    lines = [
        line(rank, step, event("step", 0, 10), event("forward", 1, 1 + seconds), coords={"tp": rank})
        for step, both in ((1, (1, 3)), (2, (3, 3)))
        for rank, seconds in enumerate(both)
    ]
    rows = {row["name"]: row for row in trace_rows(profile_of(*lines), NO_PLAN)}
    assert list(rows) == ["stage 0 step", "stage 0 forward", "stage 0 after the schedule"]
    forward = rows["stage 0 forward"]
    assert (forward["seconds"], forward["seconds_min"], forward["seconds_max"]) == (2.5, 2, 3)
    assert (forward["rounds"], forward["ranks"], forward["share"]) == (2, 2, 0.25)


def test_a_report_says_what_is_incomplete() -> None:
    first, second = two_stages()
    whole = trace_report(profile_of(first, second), planned(), job="x", command="c", file="f")
    assert whole["is_complete"] and whole["findings"]["steps"] == [3]
    assert whole["environment"]["host"] == "a"
    names = [row["name"] for row in whole["results"]]
    assert len(names) == len(set(names))
    half = trace_report(profile_of(first), NO_PLAN, job="x", command="c", file="f")
    assert (half["is_complete"], half["findings"]["missing"]) == (False, [1])
    assert all(row["predicted_seconds"] is None for row in half["results"])
    assert sum(row["share"] for row in half["results"] if row["part"] == "step") == pytest.approx(1)
