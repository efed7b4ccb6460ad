"""`mpctl status`, `logs --follow` and `stop` on a run that trains."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from mpctl.records.checkpoint.folder import list_checkpoints
from tests.cli.calls import Said, spawn
from tests.run.launch.command import Launched, end_all, endless
from tests.train.runtime.tiny import make_data

pytestmark = pytest.mark.slow  # a training of two ranks


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    folder = tmp_path_factory.mktemp("live")
    yield endless(make_data(folder), folder / "run", "--tp", "2").at_step(2)
    end_all()


@pytest.fixture(scope="module")
def followed(training: Launched) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "mpctl", "logs", str(training.run_dir), "-f", "-n", "1"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_the_status_of_a_run_that_trains(training: Launched) -> None:
    document = spawn("status", training.run_dir, "--json").document
    assert document["status"] == "running" and document["step"] >= 2
    assert document["launcher"]["pid"] == training.process.pid
    assert document["launcher"]["backend"] == "local" and document["launcher"]["is_alive"]
    assert [rank["rank"] for rank in document["ranks"]] == [0, 1]
    assert all(rank["doing"] and rank["heartbeat_seconds"] < 30 for rank in document["ranks"])


def test_stop_saves_and_ends_the_run_and_who_follows_it(training: Launched, followed: subprocess.Popen[str]) -> None:
    assert followed.stdout is not None
    first = followed.stdout.readline()
    step = json.loads((training.run_dir / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    said: Said = spawn("stop", training.run_dir)
    assert said.code == 0, said.err
    saved = list_checkpoints(training.run_dir / "checkpoints")[-1][0]
    assert saved >= step and f"stopped after step {saved:,} of 100,000" in said.out
    assert f"saved as step {saved:,} (" in said.out and "mpctl launch --resume" in said.out
    assert training.ended().process.returncode == 143 and not training.left_behind(3)
    lines = [first, *followed.communicate(timeout=30)[0].splitlines(keepends=True)]
    assert followed.returncode == 0
    steps = [line.split()[3].rstrip(":") for line in lines if line.startswith("ranks 0-1: step")]
    assert steps[-1] == str(saved)
    assert steps == [str(number) for number in range(int(steps[0]), saved + 1)]


def test_after_the_end(training: Launched) -> None:
    assert spawn("status", training.run_dir).out.startswith("run  stopped")
    again = spawn("stop", training.run_dir)
    assert again.code == 0 and "was not running: stopped" in again.out
    one = spawn("logs", training.run_dir, "--rank", "1", "-n", "1", "--follow")
    assert one.code == 0 and one.out.startswith("step ")
