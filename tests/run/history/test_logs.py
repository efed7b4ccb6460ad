"""The last lines of a run's logs, from the end of each file alone.

New lines of many ranks are merged as they come, and held back until the other ranks had time.

A warning that every rank prints is reported once, with the ranks.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from mpctl.core.errors import InputError
from mpctl.records.rundir.logs import MOST_LINES, split_entries
from mpctl.run.history.logs import (
    FIRST_BYTES,
    LEAST_WARNED_BYTES,
    LONGEST_SECONDS,
    LONGEST_WARNING,
    MOST_WARNINGS,
    QUIET_SECONDS,
    WARNED_BYTES,
    WARNING,
    MergedFollower,
    WarningWatch,
    chosen_logs,
    last_lines,
    launcher_logs,
    merged_tail,
    rank_logs,
    read_tail,
)


def write(run: Path, name: str, lines: list[str]) -> Path:
    path = run / "logs" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(line + "\n" for line in lines))
    return path


def steps(count: int, *, width: int = 0) -> list[str]:
    return [f"step {step}: loss {step / 10}".ljust(width, ".") for step in range(1, count + 1)]


def test_logs_are_known_by_rank(tmp_path: Path) -> None:
    for name in ("rank-10.log", "rank-2.log", "torchrun.log", "rank-x.log", "rank-1.txt"):
        write(tmp_path, name, [])
    assert list(rank_logs(tmp_path)) == [2, 10]
    assert [path.name for path in launcher_logs(tmp_path)] == ["rank-x.log", "torchrun.log"]
    assert list(chosen_logs(tmp_path, [10])) == [10]
    assert rank_logs(tmp_path / "none") == {} and launcher_logs(tmp_path / "none") == []


def test_a_rank_without_a_log_is_named(tmp_path: Path) -> None:
    write(tmp_path, "rank-0.log", [])
    write(tmp_path, "rank-1.log", [])
    with pytest.raises(InputError, match=r"rank 7 has no log.*ranks 0-1 have one"):
        chosen_logs(tmp_path, [0, 7])


def test_a_tail_has_whole_lines(tmp_path: Path) -> None:
    path = write(tmp_path, "rank-0.log", ["first", "second"])
    assert read_tail(path, 9).lines == ["second", ""]
    assert read_tail(path, 9).is_cut and not read_tail(path, 100).is_cut
    assert read_tail(path, 100, end=6).lines == ["first", ""]
    assert read_tail(tmp_path / "logs", 9).lines == []  # a folder


def test_as_many_lines_as_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path, "rank-0.log", steps(5000, width=80))
    assert last_lines(path, 2) == steps(5000, width=80)[-2:]
    assert len(last_lines(path, 1000)) == 1000 > FIRST_BYTES / 80
    assert len(last_lines(path, None)) == 5000 and last_lines(path, 0) == []


def test_a_cut_log_never_takes_a_rank_from_an_entry(tmp_path: Path) -> None:
    """Rank 1 prints so much that the end of its log has the last steps only: what is shown of
    earlier steps must not look as though rank 1 had not printed it."""
    write(tmp_path, "rank-0.log", steps(60))
    noisy = [line for step in steps(60) for line in (step, *["debug " + "x" * 500] * 5)]
    write(tmp_path, "rank-1.log", noisy)
    for count in (1, 10, 50):
        merged = merged_tail(rank_logs(tmp_path), count)
        assert sum(len(entry.lines) for entry in merged) == count
        assert all(e.ranks == (0, 1) for e in merged if e.text.startswith("step"))
    assert len(merged_tail(rank_logs(tmp_path), None)) == 120


def test_a_line_longer_than_what_is_read_first(tmp_path: Path) -> None:
    write(tmp_path, "rank-0.log", ["step 1: loss 5", "x" * 10 * FIRST_BYTES])
    write(tmp_path, "rank-1.log", ["step 1: loss 5"])
    merged = merged_tail(rank_logs(tmp_path), 2)
    assert [entry.ranks for entry in merged] == [(0, 1), (0,)]


def add(run: Path, rank: int, text: str) -> None:
    path = run / "logs" / f"rank-{rank}.log"
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as stream:
        stream.write(text)


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def shown(follower: MergedFollower, *, is_last: bool = False) -> list[tuple[str, tuple[int, ...]]]:
    return [(entry.text, entry.ranks) for entry in follower.poll(is_last)]


def test_what_was_there_before_is_not_shown_and_what_comes_is_merged(tmp_path: Path) -> None:
    clock = Clock()
    add(tmp_path, 0, "old\n")
    follower = MergedFollower(tmp_path, (), clock)
    add(tmp_path, 0, "step 1: loss 5\n")
    assert shown(follower) == []  # others may still print it
    add(tmp_path, 1, "step 1: loss 5\n")  # a log that did not exist before
    assert shown(follower) == []
    clock.now += QUIET_SECONDS
    assert shown(follower) == [("step 1: loss 5", (0, 1))]
    clock.now += QUIET_SECONDS
    assert shown(follower) == []


def test_steps_that_every_rank_has_left_are_shown_while_they_print_on(tmp_path: Path) -> None:
    clock = Clock()
    follower = MergedFollower(tmp_path, (), clock)
    for rank in (0, 1):
        add(tmp_path, rank, "".join(f"step {step}: loss 5\n" for step in range(1, 5 + rank)))
    assert [ranks for _, ranks in shown(follower)] == [(0, 1)] * 2  # the last entry may go on
    add(tmp_path, 0, "step 5: loss 5\nstep 6: loss 5\n")
    assert [text for text, _ in shown(follower)] == ["step 3: loss 5"]


def test_a_rank_that_is_far_behind_does_not_hold_back_for_long(tmp_path: Path) -> None:
    clock = Clock(10.0)
    follower = MergedFollower(tmp_path, (), clock)
    add(tmp_path, 1, "step 1: loss 5\nstuck\nnot complete")
    waited = []
    for step in range(1, 30):
        add(tmp_path, 0, f"step {step}: loss 5\n")
        if shown(follower):
            waited.append(clock.now - 10.0)
        clock.now += QUIET_SECONDS / 2
    assert waited and waited[0] <= LONGEST_SECONDS + QUIET_SECONDS


def test_half_a_line_waits_and_a_new_file_begins_again(tmp_path: Path) -> None:
    clock = Clock()
    follower = MergedFollower(tmp_path, [0], clock)
    add(tmp_path, 0, "one\ntw")
    add(tmp_path, 1, "not asked for\n")
    assert shown(follower) == []
    clock.now += QUIET_SECONDS
    assert shown(follower) == [("one", (0,))]
    add(tmp_path, 0, "o\n")
    assert shown(follower, is_last=True) == [("two", (0,))]
    (tmp_path / "logs" / "rank-0.log").unlink()
    assert shown(follower) == []
    add(tmp_path, 0, "another run\n")
    assert shown(follower, is_last=True) == [("another run", (0,))]


def test_each_warning_once(tmp_path: Path) -> None:
    reported: list[str] = []
    add(tmp_path, 0, "x.py:3: UserWarning: of an earlier launch\n")
    with WarningWatch(tmp_path, reported.append):
        for rank in range(8):
            warning = f"[rank{rank}]: x.py:7: UserWarning: rank {rank} is slow"
            add(tmp_path, rank, f"building\n{warning}\n  warn(\nstep 1: loss 5\n")
    assert reported == ["ranks 0-7: x.py:7: UserWarning: rank … is slow"]


def test_a_warning_that_comes_again_is_not_told_again(tmp_path: Path) -> None:
    reported: list[str] = []
    watch = WarningWatch(tmp_path, reported.append)
    watch.follower.clock = iter(range(0, 1000, int(QUIET_SECONDS + 1))).__next__
    for step in range(5):
        warnings = f"WARNING: slow\nWARNING: layer {step} overflowed\n"
        add(tmp_path, 1, f"step {step}: loss 5\n{warnings}")
        watch.poll(is_last=True)
    assert reported == ["rank 1: WARNING: slow"] + [f"rank 1: WARNING: layer {step} overflowed" for step in range(5)]


def test_there_is_an_end_to_different_warnings(tmp_path: Path) -> None:
    reported: list[str] = []
    watch = WarningWatch(tmp_path, reported.append)
    add(tmp_path, 0, "".join(f"WARNING: number {n} of many\n" for n in range(100)))
    watch.poll(is_last=True)
    assert len(reported) == MOST_WARNINGS + 1 and "mpctl logs" in reported[-1]


def test_warnings_are_looked_for_in_a_bounded_part_of_what_ranks_print(tmp_path: Path) -> None:
    """A launcher beside a rank that prints 10 GB reads what a poll may, and the next warning."""
    reported: list[str] = []
    watch = WarningWatch(tmp_path, reported.append)
    watch.follower.clock = iter(range(0, 1000, int(QUIET_SECONDS + 1))).__next__
    add(tmp_path, 0, "WARNING: first\n")
    add(tmp_path, 1, "WARNING: " + "x" * 2 * LONGEST_WARNING + "\n")
    os.truncate(tmp_path / "logs" / "rank-0.log", 10**10)
    for words in ("end of the long line\nWARNING: second\n", "WARNING: third\n", ""):
        watch.poll()
        add(tmp_path, 0, words)
    assert [text[:22] for text in reported] == [
        "rank 1: WARNING: xxxxx",
        "rank 0: WARNING: first",
        "rank 0: WARNING: secon",
        "rank 0: WARNING: third",
    ]
    assert len(reported[0]) < LONGEST_WARNING + 20
    assert all(len(log.rest) <= WARNED_BYTES for log in watch.follower.logs.values())


def test_a_line_that_grows_without_an_end_is_not_kept(tmp_path: Path) -> None:
    follower = MergedFollower(tmp_path, (), Clock(), most=LEAST_WARNED_BYTES)
    for _ in range(5):
        add(tmp_path, 0, "x" * LEAST_WARNED_BYTES)
        assert shown(follower) == []
        assert len(follower.logs[0].rest) <= LEAST_WARNED_BYTES
    add(tmp_path, 0, "\nnext\n")
    assert shown(follower, is_last=True) == [("next", (0,))]


def test_an_entry_has_an_end() -> None:
    """A rank may print nothing but indented lines, which all belong to the one above them."""
    entries = list(split_entries(["  x"] * (2 * MOST_LINES + 1)))
    assert [entry.text.count("\n") + 1 for entry in entries] == [MOST_LINES, MOST_LINES, 1]


def test_what_looks_like_a_warning() -> None:
    for line, is_warning in (
        ("/a/b.py:12: FutureWarning: soon", True),
        ("[W1122 02:39:50.194 socket.cpp:752] no address", True),
        ("W1122 02:39:50.194000 5813 torch/x.py:10] late", True),
        ("2026-11-22 02:39:50 WARNING slow", True),
        ("step 1: loss 5.1", False),
        ("NCCL WARN Call to connect failed", True),
        ("forewarning of nothing", False),
    ):
        assert bool(WARNING.search(line)) == is_warning, line
