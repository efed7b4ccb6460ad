"""The last lines of a run's logs, from the end of each file alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpctl.errors import InputError
from mpctl.runs.logs import (
    FIRST_BYTES,
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
