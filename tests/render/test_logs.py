"""Merged logs in words: names of ranks in a column, nothing that a terminal would obey."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from mpctl.core.units import ranges_text, ranks_text
from mpctl.records.rundir.logs import MergedEntry
from mpctl.render.logs import FileView, MergedView
from tests.cli.calls import Mpctl
from tests.run.history.made import make_run


def test_names_stand_in_a_column_that_widens(capsys: pytest.CaptureFixture[str]) -> None:
    view = MergedView()
    for entry in (
        MergedEntry("alone", (3,)),
        MergedEntry("Traceback\n  File x", tuple(range(8)), repeats=12),
        MergedEntry("again", (3,)),
    ):
        view.show(entry)
    view.end()
    assert capsys.readouterr().out.splitlines() == [
        "rank 3: alone",
        "ranks 0-7: Traceback (12 times)",
        "             File x",
        "rank 3:    again",
    ]


def test_control_characters_of_a_log_do_not_reach_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    MergedView().show(MergedEntry("\x1b]0;title\x07red \x9b31m", (0,)))
    FileView(tmp_path, with_headings=False).show(tmp_path / "a.log", ["\x1b[2Jgone"])
    assert capsys.readouterr().out == "rank 0: ]0;titlered 31m\n[2Jgone\n"


def test_ranks_as_ranges() -> None:
    ranks: Iterable[int]
    for ranks, text in (
        ([3], "rank 3"),
        ([2, 0, 1], "ranks 0-2"),
        ([0, 1, 5], "ranks 0-1, 5"),
        (range(0, 100, 2), "ranks 0, 2, 4 and 47 more"),
    ):
        assert ranks_text(ranks, most=3) == text
    assert ranges_text([]) == ""


def logged(run: Path) -> Path:
    make_run(run)
    for rank in range(2):
        lines = [f"rank {rank} of 2, coordinates {{'tp': {rank}}}", "step 1: loss 5", "bye"]
        (run / "logs" / f"rank-{rank}.log").write_text("\n".join(lines[: 3 - rank]) + "\n")
    (run / "logs" / "torchrun.log").write_text("\n$ torchrun\nended\n")
    return run


def test_the_command(tmp_path: Path, mpctl: Mpctl) -> None:
    run = logged(tmp_path / "run")
    assert mpctl("logs", run).out.splitlines() == [
        "ranks 0-1: rank … of 2, coordinates {'tp': …}",
        "ranks 0-1: step 1: loss 5",
        "rank 0:    bye",
    ]
    assert mpctl("logs", run, "-n", "1").out == "rank 0: bye\n"
    assert mpctl("logs", run, "--rank", "1", "-n", "1").out == "step 1: loss 5\n"
    assert mpctl("logs", run, "--launcher").out == "\n$ torchrun\nended\n"
    each = mpctl("logs", run, "--each", "-n", "1").out
    assert each == "==> logs/rank-0.log <==\nbye\n\n==> logs/rank-1.log <==\nstep 1: loss 5\n"


def test_what_the_command_refuses(tmp_path: Path, mpctl: Mpctl) -> None:
    run = logged(tmp_path / "run")
    assert "no-log" in mpctl("logs", run, "--rank", "2", "--json").err + mpctl("logs", run, "--rank", "2").err
    for words in (["--launcher", "--each"], ["--each", "--follow"], ["--launcher", "--rank", "0"]):
        assert mpctl("logs", run, *words).code == 2
    assert mpctl("logs", tmp_path / "none").code == 2


def test_a_run_without_logs(tmp_path: Path, mpctl: Mpctl) -> None:
    said = mpctl("logs", make_run(tmp_path / "run"))
    assert (said.code, said.out) == (0, "") and "no rank has printed anything" in said.err
