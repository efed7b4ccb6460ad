"""Real ranks of which one does not get its core, or hangs: what the launch says, and when."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from mpctl.core.cores import usable_cores
from mpctl.records.rundir.slow import SlowPart, read_slow
from mpctl.run.history.status import status_of
from mpctl.run.launch.learnt_timeout import LEARNT_STEPS, LEAST_SECONDS
from mpctl.run.launch.stragglers import WINDOW
from tests.run.launch.command import PATIENCE, Launched, endless, wait_for
from tests.run.launch.test_hang import SPIN

GROUPS = Path("/sys/fs/cgroup")
PERIOD, QUOTA = 40_000, 1_200
"""Microseconds: a rank in the group gets 3 % of a core, less than the others on a busy machine."""
REPORT_SECONDS = 2.0
"""How long it may take until the launcher looks at a step that is done."""
RANKS = 4 if len(usable_cores()) >= 4 else 2
"""A core each: ranks that share one are slow in turn."""
EQUAL, LAST = ("--dp", str(RANKS)), RANKS - 1
pytestmark = pytest.mark.slow


@pytest.fixture
def slow_group() -> Iterator[Path]:
    """A group of processes that share 3 % of a core; by version 2 of cgroups or version 1."""
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
    for pid in (group / "cgroup.procs").read_text().split():
        (group.parent / "cgroup.procs").write_text(pid)
    group.rmdir()


@pytest.fixture(autouse=True)
def quiet_machine() -> None:
    """Other programs that take the cores are what these tests would see."""
    load, cores = os.getloadavg()[0], len(usable_cores())
    if load > 3 * cores:
        pytest.skip(f"the load is {load:.0f} on {cores} cores: other programs slow ranks down")


def named(run: Launched) -> list[SlowPart]:
    return list(read_slow(run.run_dir / "slow.jsonl"))


def test_a_rank_that_does_not_get_its_core_is_named_within_20_steps(
    data: Path, tmp_path: Path, slow_group: Path
) -> None:
    run = endless(data, tmp_path / "run", *EQUAL).at_step(WINDOW + 5)
    onset = len(run.records)
    (slow_group / "cgroup.procs").write_text(str(run.worker(LAST).pid))
    (part,) = wait_for(lambda: named(run), 2 * PATIENCE)
    run.at_step(onset + 20)
    status = status_of(run.run_dir, "run")
    (slow_group.parent / "cgroup.procs").write_text(str(run.worker(LAST).pid))
    assert part.ranks == (LAST,) and part.ratio > 1.2
    done = {record["step"]: record["time"] for record in run.records}
    report = sum(0 < ended - done[onset + 20] < REPORT_SECONDS for ended in done.values())
    print(f"slowed down at step {onset}, named at step {part.named}, since {part.since}")
    assert onset - 5 < part.since and part.named <= onset + 20 + report
    wait_for(lambda: f"rank {LAST} computes" in run.stderr)
    assert "it uses no more processor time" in part.text
    assert status["status"] == "running"
    # It has its core again.
    wait_for(lambda: f"rank {LAST} is no longer slow at step" in run.stderr)
    assert named(run)[0].until


def test_a_run_that_nothing_disturbs_names_nobody(data: Path, tmp_path: Path) -> None:
    run = endless(data, tmp_path / "run", *EQUAL).at_step(60)
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
    assert failure["rank"] == 1 and "was set from " in failure["error"], json.dumps(failure)
    print(f"ended {took:.1f} s after it began to compute")
    assert LEAST_SECONDS < took < 300
