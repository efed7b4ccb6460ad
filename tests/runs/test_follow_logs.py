"""New lines of many ranks are merged as they come, and held back until the other ranks had time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mpctl.runs.follow_logs import LONGEST_SECONDS, QUIET_SECONDS, MergedFollower


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Logs:
    run: Path

    def add(self, rank: int, text: str) -> None:
        path = self.run / "logs" / f"rank-{rank}.log"
        path.parent.mkdir(exist_ok=True)
        with path.open("a") as stream:
            stream.write(text)


def shown(follower: MergedFollower, *, is_last: bool = False) -> list[tuple[str, tuple[int, ...]]]:
    return [(entry.text, entry.ranks) for entry in follower.poll(is_last)]


def test_what_was_there_before_is_not_shown_and_what_comes_is_merged(tmp_path: Path) -> None:
    logs, clock = Logs(tmp_path), Clock()
    logs.add(0, "old\n")
    follower = MergedFollower(tmp_path, (), clock)
    logs.add(0, "step 1: loss 5\n")
    assert shown(follower) == []  # others may still print it
    logs.add(1, "step 1: loss 5\n")  # a log that did not exist before
    assert shown(follower) == []
    clock.now += QUIET_SECONDS
    assert shown(follower) == [("step 1: loss 5", (0, 1))]
    clock.now += QUIET_SECONDS
    assert shown(follower) == []


def test_steps_that_every_rank_has_left_are_shown_while_they_print_on(tmp_path: Path) -> None:
    logs, clock = Logs(tmp_path), Clock()
    follower = MergedFollower(tmp_path, (), clock)
    for rank in (0, 1):
        logs.add(rank, "".join(f"step {step}: loss 5\n" for step in range(1, 5 + rank)))
    assert [ranks for _, ranks in shown(follower)] == [(0, 1)] * 2  # the last entry may go on
    logs.add(0, "step 5: loss 5\nstep 6: loss 5\n")
    assert [text for text, _ in shown(follower)] == ["step 3: loss 5"]


def test_a_rank_that_is_far_behind_does_not_hold_back_for_long(tmp_path: Path) -> None:
    logs, clock = Logs(tmp_path), Clock(10.0)
    follower = MergedFollower(tmp_path, (), clock)
    logs.add(1, "step 1: loss 5\nstuck\nnot complete")
    waited = []
    for step in range(1, 30):
        logs.add(0, f"step {step}: loss 5\n")
        if shown(follower):
            waited.append(clock.now - 10.0)
        clock.now += QUIET_SECONDS / 2
    assert waited and waited[0] <= LONGEST_SECONDS + QUIET_SECONDS


def test_half_a_line_waits_and_a_new_file_begins_again(tmp_path: Path) -> None:
    logs, clock = Logs(tmp_path), Clock()
    follower = MergedFollower(tmp_path, [0], clock)
    logs.add(0, "one\ntw")
    logs.add(1, "not asked for\n")
    assert shown(follower) == []
    clock.now += QUIET_SECONDS
    assert shown(follower) == [("one", (0,))]
    logs.add(0, "o\n")
    assert shown(follower, is_last=True) == [("two", (0,))]
    (tmp_path / "logs" / "rank-0.log").unlink()
    assert shown(follower) == []
    logs.add(0, "another run\n")
    assert shown(follower, is_last=True) == [("another run", (0,))]
