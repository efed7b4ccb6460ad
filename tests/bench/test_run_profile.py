"""Reading a run's profile: clocks of several hosts, repeated steps, damage."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpctl.bench.trace import clock_offsets, read_run_profile
from mpctl.errors import InputError
from mpctl.rundir.profile_files import ProfiledStep, profile_path
from tests.bench.profiles import event, line, two_stages, write


def meeting(rank: int, step: int, clock: str, end: float) -> ProfiledStep:
    """A step whose last all-reduce over the world ends at `end`, and one after it."""
    whole = {"axis": "world", "bytes": 8, "dtype": "float64", "phase": "start"}
    events = [event("all_reduce", at - 0.5, at, **whole) for at in (end, end + 4)]
    return line(rank, step, event("step", end - 1, end), *events, clock=clock, host=clock)


def test_hosts_are_aligned_by_the_first_end_of_each_steps_meeting() -> None:
    """By hand: 12.0 on a against 905.0 on b, and 20.0 against 912.8; between them -892.9."""
    steps = {
        1: {0: meeting(0, 1, "a", 12.0), 1: meeting(1, 1, "a", 12.3),
            2: meeting(2, 1, "b", 905.1), 3: meeting(3, 1, "b", 905.0)},
        2: {0: meeting(0, 2, "a", 20.0), 2: meeting(2, 2, "b", 912.8)},
    }  # fmt: skip
    offsets = clock_offsets(steps)
    assert offsets == {"a": 0.0, "b": pytest.approx(-892.9)}


def test_a_host_without_a_common_step_is_left_as_it_is() -> None:
    steps = {1: {0: meeting(0, 1, "a", 12.0)}, 2: {1: meeting(1, 2, "b", 905.0)}}
    assert clock_offsets(steps) == {"a": 0.0, "b": 0.0}
    assert clock_offsets({1: {0: line(0, 1)}}) == {"a": 0.0}


def test_times_are_moved_to_one_clock(tmp_path: Path) -> None:
    write(tmp_path, meeting(0, 1, "a", 12.0), meeting(1, 1, "b", 905.0))
    profile = read_run_profile(tmp_path)
    ends = [[e["ended"] for e in profile.events(one) if e["name"] == "step"]
            for one in profile.lines]  # fmt: skip
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
