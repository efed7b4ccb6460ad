"""Where the time of a run went, by the records of its steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpctl.records.rundir.goodput import Pause, recorded_goodput, time_spent
from mpctl.records.rundir.launches import num_launches, read_times_away


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


LOG = """\
1970-01-01T00:01:30Z $ mpctl launch job.toml
1970-01-01T00:01:46Z stopped after step 2
1970-01-01T00:11:46Z $ mpctl launch --resume --run-dir runs/a
a line without a time
1970-01-01T00:11:50Z finished after step 3
"""


def test_nobody_trains_between_two_launches(tmp_path: Path) -> None:
    """Ten minutes after the end of the first launch, and 8 s that the second one took to its first step."""
    log = tmp_path / "launcher.log"
    log.write_text(LOG)
    records = [step(1, 102.0), step(2, 104.0), step(3, 716.0)]
    away = read_times_away(log, records)
    assert away == [(106.0, 706.0)] and num_launches(log) == 2
    assert recorded_goodput(records) == pytest.approx(6 / 616)
    assert recorded_goodput(records, away) == pytest.approx(6 / 16)
    spent = time_spent(records, away)
    assert spent is not None and (spent.wall, spent.away, spent.paused) == (16.0, 600.0, 10.0)
    assert spent.pauses == [Pause(2, 0.0), Pause(3, 10.0)]
    killed = [*records[:2], step(3, 300.0), step(4, 716.0)]  # which wrote no last line
    assert read_times_away(log, killed) == [(300.0, 706.0)]
    assert read_times_away(tmp_path / "none", records) == []


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
