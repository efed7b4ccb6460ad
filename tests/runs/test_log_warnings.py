"""A warning that every rank prints is told once, with the ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpctl.runs.follow_logs import QUIET_SECONDS
from mpctl.runs.log_warnings import MOST_WARNINGS, WARNING, WarningWatch


def add(run: Path, rank: int, *lines: str) -> None:
    path = run / "logs" / f"rank-{rank}.log"
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as stream:
        stream.writelines(line + "\n" for line in lines)


def test_each_warning_once(tmp_path: Path) -> None:
    told: list[str] = []
    add(tmp_path, 0, "x.py:3: UserWarning: of an earlier launch")
    with WarningWatch(tmp_path, told.append):
        for rank in range(8):
            warning = f"[rank{rank}]: x.py:7: UserWarning: rank {rank} is slow"
            add(tmp_path, rank, "building", warning,
                "  warn(", "step 1: loss 5")  # fmt: skip
    assert told == ["ranks 0-7: x.py:7: UserWarning: rank … is slow"]


def test_a_warning_that_comes_again_is_not_told_again(tmp_path: Path) -> None:
    told: list[str] = []
    watch = WarningWatch(tmp_path, told.append)
    watch.follower.clock = iter(range(0, 1000, int(QUIET_SECONDS + 1))).__next__
    for step in range(5):
        add(
            tmp_path,
            1,
            f"step {step}: loss 5",
            "WARNING: slow",
            f"WARNING: layer {step} overflowed",
        )
        watch.look(is_last=True)
    assert told == ["rank 1: WARNING: slow"] + [
        f"rank 1: WARNING: layer {step} overflowed" for step in range(5)
    ]


def test_there_is_an_end_to_different_warnings(tmp_path: Path) -> None:
    told: list[str] = []
    watch = WarningWatch(tmp_path, told.append)
    add(tmp_path, 0, *(f"WARNING: number {n} of many" for n in range(100)))
    watch.look(is_last=True)
    assert len(told) == MOST_WARNINGS + 1 and "mpctl logs" in told[-1]


@pytest.mark.parametrize(
    ("line", "is_warning"),
    [
        ("/a/b.py:12: FutureWarning: soon", True),
        ("[W1122 02:39:50.194 socket.cpp:752] no address", True),
        ("W1122 02:39:50.194000 5813 torch/x.py:10] late", True),
        ("2026-11-22 02:39:50 WARNING slow", True),
        ("step 1: loss 5.1", False),
        ("NCCL WARN Call to connect failed", True),
        ("forewarning of nothing", False),
    ],
)
def test_what_looks_like_a_warning(line: str, *, is_warning: bool) -> None:
    assert bool(WARNING.search(line)) == is_warning
