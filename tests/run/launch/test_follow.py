"""metrics.csv and TensorBoard's events have the values of metrics.jsonl, each step once.

The launcher's messages are in RUN/logs/launcher.log, a line each.
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from mpctl.cli.app import run as mpctl
from mpctl.records.rundir.directory import RunDir
from mpctl.records.rundir.metrics import missing_tensorboard
from mpctl.run.launch.follow import EventLog, MetricsFollower, follow
from mpctl.spec.load import load_job

BOTH = {"launch.csv": True, "launch.tensorboard": True, "data.validation": {"old": "somewhere"}}


def record(step: int, **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "loss": 9.0 - step,
        "tokens": 100 * step,
        "step_seconds": 0.5,
        "cpu_seconds": 0.4,
        "tokens_per_second": 200.0,
        "grad_norm": 1.5,
        "learning_rate": 1e-3,
        "memory_bytes": [5, 7],
        "predicted_step_seconds": None,
        "time": 1.7e9 + step,
        **more,
    }


class Run:
    """A run directory whose worker writes the records of a test."""

    def __init__(self, path: Path) -> None:
        self.dir = RunDir(path)
        path.mkdir(exist_ok=True)
        self.events: list[str] = []
        self.seen: list[int] = []

    def follower(self, **settings: Any) -> MetricsFollower:
        job = load_job(None, {**BOTH, **settings})
        return follow(self.dir, job, self.events.append, lambda r: self.seen.append(r["step"]))

    def train(self, follower: MetricsFollower, *records: dict[str, Any]) -> None:
        for one in records:
            with self.dir.metrics.open("a") as stream:
                stream.write(json.dumps(one) + "\n")
            follower.record(one)

    def rewind(self, step: int) -> None:
        """As a new attempt does, which starts from the checkpoint of `step`."""
        kept = [r for r in self.dir.records() if r["step"] <= step]
        self.dir.metrics.write_text("".join(json.dumps(r) + "\n" for r in kept))

    @property
    def rows(self) -> list[dict[str, str]]:
        return list(csv.DictReader((self.dir.path / "metrics.csv").open()))

    @property
    def scalars(self) -> dict[str, list[tuple[int, float]]]:
        """Every scalar in the order of the event files, not sorted."""
        found: dict[str, list[tuple[int, float]]] = {}
        for path in sorted((self.dir.path / "tensorboard").iterdir()):
            for event in EventFileLoader(str(path)).Load():
                for value in event.summary.value:
                    number = value.tensor.float_val[0]
                    found.setdefault(value.tag, []).append((event.step, number))
        return found


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


def test_both_have_the_values_of_the_records(run: Run) -> None:
    first = record(1, initial_validation_loss=8.5, initial_validation_losses={"old": 8.25})
    second = record(2, validation_loss=7.5, validation_losses={"old": 7.25})
    run.train(run.follower(), first, second)
    assert [row["step"] for row in run.rows] == ["0", "1", "2"]
    assert [row["validation_loss/old"] for row in run.rows] == ["8.25", "", "7.25"]
    assert [row["loss"] for row in run.rows] == ["", "8.0", "7.0"]
    assert [row["memory_bytes"] for row in run.rows] == ["", "7", "7"]
    assert run.scalars["loss"] == [(1, 8.0), (2, 7.0)]
    assert run.scalars["validation_loss"] == [(0, 8.5), (2, 7.5)]
    assert run.scalars["validation_loss/old"] == [(0, 8.25), (2, 7.25)]
    names = {"learning_rate", "grad_norm", "tokens_per_second", "step_seconds"}
    assert names <= run.scalars.keys()
    assert run.seen == [1, 2]


def test_every_record_is_on_disk_before_the_next(run: Run) -> None:
    """Nothing is buffered: delivered records are on disk, whatever happens to the launcher."""
    follower = run.follower()
    for step in (1, 2, 3):
        run.train(follower, record(step))
        assert [row["step"] for row in run.rows] == [str(s) for s in range(1, step + 1)]
        assert [s for s, _ in run.scalars["loss"]] == list(range(1, step + 1))


def test_columns_do_not_move(run: Run) -> None:
    follower = run.follower()
    run.train(follower, record(1))
    header = (run.dir.path / "metrics.csv").read_text().splitlines()[0]
    run.train(follower, record(2, validation_loss=1.0, validation_losses={"old": 2.0}))
    assert (run.dir.path / "metrics.csv").read_text().splitlines()[0] == header
    assert header.startswith("step,tokens,loss,validation_loss,learning_rate,grad_norm,")


def test_a_failed_attempt_leaves_no_step_twice(run: Run) -> None:
    follower = run.follower()
    run.train(follower, *(record(step) for step in (1, 2, 3, 4)))
    run.rewind(2)
    run.train(follower, record(3, loss=1.0), record(4, loss=0.5))
    assert [row["loss"] for row in run.rows] == ["8.0", "7.0", "1.0", "0.5"]
    assert run.scalars["loss"] == [(1, 8.0), (2, 7.0), (3, 1.0), (4, 0.5)]


def test_a_resumed_run_is_made_good(run: Run) -> None:
    """The launcher was killed before it saw step 3, and steps 4 and 5 come from another launch,
    which adds a metric."""
    run.train(run.follower(), record(1), record(2))
    with run.dir.metrics.open("a") as stream:
        stream.write(json.dumps(record(3)) + "\n")
    run.train(run.follower(), record(4, loss_scale=65536.0), record(5))
    assert [row["step"] for row in run.rows] == ["1", "2", "3", "4", "5"]
    assert [row["loss_scale"] for row in run.rows] == ["", "", "", "65536.0", ""]
    assert [step for step, _ in run.scalars["loss"]] == [1, 2, 3, 4, 5]


def test_an_open_tensorboard_forgets_rewound_steps(run: Run) -> None:
    follower = run.follower()
    run.train(follower, *(record(step) for step in (1, 2, 3)))
    board = EventAccumulator(str(run.dir.path / "tensorboard"))
    board.Reload()
    run.rewind(1)
    run.train(follower, record(2, loss=0.25))
    board.Reload()
    shown = [(event.step, event.value, event.wall_time) for event in board.Scalars("loss")]
    assert shown == [(1, 8.0, 1.7e9 + 1), (2, 0.25, 1.7e9 + 2)]


def test_neither_is_written_unasked(run: Run) -> None:
    follower = run.follower(**{"launch.csv": False, "launch.tensorboard": False})
    run.train(follower, record(1))
    assert sorted(path.name for path in run.dir.path.iterdir()) == ["metrics.jsonl"]
    assert run.seen == [1]


def test_a_sink_that_cannot_be_written_is_dropped_with_a_message(run: Run) -> None:
    (run.dir.path / "tensorboard").write_text("in the way")
    run.train(run.follower(), record(1), record(2))
    assert len(run.events) == 1 and "tensorboard can no longer be written" in run.events[0]
    assert [row["step"] for row in run.rows] == ["1", "2"]
    assert run.seen == [1, 2]


def test_a_new_run_clears_them(run: Run) -> None:
    """And files of older versions; what the hosts of this launch share stays."""
    run.train(run.follower(), record(1))
    run.dir.claim()
    for name in ("stop", "failures/rank-0.json", "nodes/status.json"):
        (run.dir.path / name).parent.mkdir(exist_ok=True)
        (run.dir.path / name).touch()
    run.dir.clear()
    assert [path.name for path in run.dir.path.iterdir()] == ["nodes"]


def test_a_missing_package_is_reported_before_the_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert missing_tensorboard("launch.tensorboard") == []
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    (issue,) = missing_tensorboard("launch.tensorboard")
    assert issue.where == "launch.tensorboard" and "mpctl[tensorboard]" in issue.hint
    assert mpctl(["launch", "demo", "--tensorboard", "--dry-run", "--json"]) == 2
    issues = json.loads(capsys.readouterr().out)["issues"]
    assert "extra-missing" in {issue["rule"] for issue in issues}
    assert mpctl(["launch", "demo", "--csv", "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["job"]["launch"]["csv"] is True


def test_a_rehearsal_writes_no_metrics(capsys: pytest.CaptureFixture[str]) -> None:
    assert mpctl(["launch", "demo", "--rehearse", "--csv", "--json"]) == 2
    assert "--csv" in json.loads(capsys.readouterr().out)["issues"][0]["message"]


def test_a_message_is_a_line_with_its_time(tmp_path: Path) -> None:
    told: list[str] = []
    log = EventLog(tmp_path / "logs" / "launcher.log", told.append, clock=lambda: 0.0)
    log.event("first\nsecond")
    log.write("third")
    assert log.path.read_text().splitlines() == ["1970-01-01T00:00:00Z first second", "1970-01-01T00:00:00Z third"]
    assert told == ["first\nsecond"]


def test_a_file_that_cannot_be_written_is_no_reason_to_fail(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file")
    told: list[str] = []
    EventLog(tmp_path / "logs" / "launcher.log", told.append).event("told")
    assert told == ["told"]
