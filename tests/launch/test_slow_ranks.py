"""Real ranks of which one does not get its core, or hangs: what the launch says, and when."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from mpctl.launch.learnt_timeout import LEARNT_STEPS, LEAST_SECONDS
from mpctl.launch.stragglers import WINDOW
from mpctl.rundir.slow import SlowPart, read_slow
from mpctl.runs.status import status_of
from tests.launch.command import Launched, endless, wait_for
from tests.launch.test_hang import SPIN

GROUPS = Path("/sys/fs/cgroup")
PERIOD, QUOTA = 10_000, 1_500
"""Microseconds: a rank in the group gets 15 % of a core."""
# dp 4 with steps of more than the launcher's second between two looks, over the window
FOUR = ("--dp", "4", "--set", "training.global_batch_size=32")
pytestmark = pytest.mark.slow


@pytest.fixture
def slow_group() -> Iterator[Path]:
    """A group of processes that share 15 % of a core; by version 2 of cgroups or version 1."""
    v2 = (GROUPS / "cgroup.controllers").exists()
    group = (GROUPS if v2 else GROUPS / "cpu") / "mpctl-test-straggler"
    try:
        group.mkdir(exist_ok=True)
        if v2:
            (group / "cpu.max").write_text(f"{QUOTA} {PERIOD}")
        else:
            (group / "cpu.cfs_period_us").write_text(str(PERIOD))
            (group / "cpu.cfs_quota_us").write_text(str(QUOTA))
    except OSError as error:
        with suppress(OSError):
            group.rmdir()
        pytest.skip(f"no group of processes with a limit can be made: {error}")
    yield group
    wait_for(lambda: not (group / "cgroup.procs").read_text())
    group.rmdir()


def named(run: Launched) -> list[SlowPart]:
    return list(read_slow(run.run_dir / "slow.jsonl"))


def test_a_rank_that_does_not_get_its_core_is_named_within_20_steps(
    data: Path, tmp_path: Path, slow_group: Path
) -> None:
    run = endless(data, tmp_path / "run", *FOUR).at_step(WINDOW + 5)
    onset = len(run.records)
    (slow_group / "cgroup.procs").write_text(str(run.worker(3).pid))
    (part,) = wait_for(lambda: named(run))
    status = status_of(run.run_dir, "run")
    (slow_group.parent / "cgroup.procs").write_text(str(run.worker(3).pid))
    assert part.ranks == (3,) and part.ratio > 1.2
    print(f"slowed down at step {onset}, named at step {part.named}, since {part.since}")
    assert onset - 5 < part.since and part.named <= onset + 20
    assert "rank 3 computes" in run.stderr and "it uses no more processor time" in part.text
    wait_for(lambda: status_of(run.run_dir, "run")["slow"] or named(run)[0].until)
    assert status["status"] == "running"
    wait_for(lambda: named(run)[0].until)  # it has its core again
    assert "rank 3 is no longer slow at step" in run.stderr


def test_a_run_that_nothing_disturbs_names_nobody(data: Path, tmp_path: Path) -> None:
    run = endless(data, tmp_path / "run", *FOUR).at_step(60 + WINDOW)
    assert named(run) == [], run.stderr


def test_a_hang_is_reported_after_a_limit_that_was_learnt(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """launch.timeout_seconds is not set; the first step takes seconds, the others do not."""
    (site := tmp_path / "site").mkdir()
    (site / "sitecustomize.py").write_text(SPIN)
    monkeypatch.setenv("PYTHONPATH", str(site))
    run = endless(data, tmp_path / "run", "--tp", "2").at_step(LEARNT_STEPS + 5)
    began = time.monotonic()
    run.worker(1).send_signal(signal.SIGWINCH)
    run.ended()
    took = time.monotonic() - began
    failure = run.summary["failure"]
    assert failure["rank"] == 1 and "was learnt from " in failure["error"], json.dumps(failure)
    print(f"ended {took:.1f} s after it began to compute")
    assert LEAST_SECONDS < took < 300
