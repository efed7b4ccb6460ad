"""One failure of 512 ranks is told once: who failed first, and how many lost their peers."""

from __future__ import annotations

import pytest

from mpctl.launch.attempt import AttemptState, NodeState
from mpctl.launch.diagnose import Failure
from mpctl.launch.other_failures import OtherFailure, other_failures
from mpctl.render.run import print_failure
from mpctl.rundir.rank_files import FailureRecord


def failed(rank: int, error: str, *, is_echo: bool = False) -> FailureRecord:
    return {"rank": rank, "coords": {"tp": rank % 2}, "doing": "step 3", "error": error,
            "is_echo": is_echo, "time": 100.0 + rank, "traceback": []}  # type: ignore[typeddict-item]  # fmt: skip


def state(records: list[FailureRecord], **codes: int) -> AttemptState:
    exit_codes = {int(rank.removeprefix("rank_")): code for rank, code in codes.items()}
    terminated = [rank for rank, code in exit_codes.items() if code == -15]
    node = NodeState(failures=records, exit_codes=exit_codes, terminated=terminated)
    return AttemptState([node])


LOST = "RuntimeError: Connection closed by peer [10.0.0.{}]:29500"


def test_echoes_are_one_number() -> None:
    records = [failed(rank, LOST.format(rank), is_echo=True) for rank in range(512) if rank != 7]
    (echo,) = other_failures(state([failed(7, "ValueError: bad token"), *records]), 7)
    assert echo == OtherFailure(
        (*range(7), *range(8, 512)),
        "RuntimeError: Connection closed by peer […]:29500",
        is_echo=True,
    )
    assert str(echo).startswith("511 ranks lost their peers (ranks 0-6, 8-511): RuntimeError")


def test_other_causes_come_before_echoes() -> None:
    records = [
        failed(0, LOST.format(0), is_echo=True),
        failed(1, "ValueError: rank 1 has a bad token"),
        failed(2, "ValueError: rank 2 has a bad token"),
    ]
    others = other_failures(state(records, rank_3=-9, rank_4=-15, rank_5=1, rank_0=1), 5)
    assert [str(other) for other in others] == [
        "ranks 1-2: ValueError: rank … has a bad token",
        "rank 3: killed by signal 9",
        "1 rank lost its peer (rank 0): RuntimeError: Connection closed by peer [10.0.0.0]:29500",
    ]


def test_nothing_else_failed() -> None:
    assert other_failures(state([failed(1, "ValueError")], rank_1=1, rank_0=-15), 1) == ()
    assert other_failures(AttemptState(), None) == ()


def test_an_error_without_words() -> None:
    (other,) = other_failures(state([failed(1, "", is_echo=True)]), None)
    assert str(other) == "1 rank lost its peer (rank 1): an error without words"


@pytest.mark.parametrize("columns", [80, 120])
def test_the_first_failure_stands_on_top(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    others = (OtherFailure(tuple(range(1, 512)), "Connection closed by peer", is_echo=True),)
    failure = Failure(
        rank=0,
        coords={"tp": 0, "dp": 3},
        error="ValueError: token \x1b[2J60000",
        doing="step 3, forward",
        log="runs/demo/logs/rank-0.log",
        last_lines=("Traceback ...", "ValueError"),
        host="n2",
        others=others,
    )
    print_failure(failure, run="runs/demo", step=2)
    assert capsys.readouterr().err.splitlines() == [
        "✗ rank 0 on host n2 (tp 0, dp 3) failed at step 3, forward: ValueError: token [2J60000",
        "  │ Traceback ...",
        "  │ ValueError",
        "  and 511 ranks lost their peers (ranks 1-511): Connection closed by peer",
        "  → whole log: runs/demo/logs/rank-0.log",
        "  → go on from step 2: mpctl launch --resume --run-dir runs/demo",
    ]
