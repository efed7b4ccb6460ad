"""Where the time of a run went, by the records of its steps."""

from __future__ import annotations

import pytest

from mpctl.records.rundir.goodput import Pause, recorded_goodput, time_spent


def step(number: int, ended: float, **more: object) -> dict[str, object]:
    return {"step": number, "time": ended, "step_seconds": 2.0, **more}


def test_steps_saves_and_pauses_fill_the_time() -> None:
    records = [
        step(1, 102.0, save_stall_seconds=9.0),  # before the first step: not of this time
        step(2, 104.5, save_stall_seconds=0.5),
        step(3, 130.5),  # 24 s: a restart
    ]
    spent = time_spent(records)
    assert spent is not None
    assert (spent.wall, spent.steps, spent.saves, spent.paused) == (30.5, 6.0, 0.5, 24.0)
    assert spent.pauses == [Pause(2, 0.0), Pause(3, 24.0)]
    assert recorded_goodput(records) == pytest.approx(spent.steps / spent.wall)


@pytest.mark.parametrize(
    "records",
    [
        [],
        [{"step": 1, "step_seconds": 2.0}],
        [step(1, 102.0), step(2, 101.0)],  # the clock went back
        [step(1, 102.0), step(2, 105.0, time="yesterday")][1:],
    ],
)
def test_nothing_is_said_without_times(records: list[dict[str, object]]) -> None:
    assert time_spent(records) is None
