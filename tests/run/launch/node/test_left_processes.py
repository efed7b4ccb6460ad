"""What a program left is found by its variables alone, and nothing else is ended."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from mpctl.run.launch.node import left_processes
from mpctl.run.launch.node.left_processes import end_processes_with, find_processes, has_ended, left_by, orphaned
from tests.run.launch.command import wait_for

NOT_A_PROCESS = 2**22 + 1
SLEEP = "import time; time.sleep(60)"
DEAF = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); {SLEEP}"


class Started:
    """Processes of a test, each in a session of its own."""

    def __init__(self, stack: ExitStack) -> None:
        self.stack = stack

    def __call__(self, variables: Mapping[str, str], *words: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            words or (sys.executable, "-c", SLEEP),
            env={**os.environ, **variables},
            start_new_session=True,
            stdout=subprocess.PIPE,
        )
        self.stack.callback(process.wait)
        self.stack.callback(process.kill)
        return process


@pytest.fixture
def started() -> Iterator[Started]:
    with ExitStack() as stack:
        yield Started(stack)


def rank_of(run: Path, torchrun: int) -> dict[str, str]:
    return {"MPCTL_RUN_DIR": str(run), "MPCTL_TORCHRUN": str(torchrun)}


def pids(is_left: Any) -> set[int]:
    return {process.pid for process, _ in find_processes(is_left)}


def test_a_daemon_of_this_run_is_ended_and_named(tmp_path: Path, started: Started) -> None:
    daemon = started(rank_of(tmp_path, 4711))
    others = [
        started(rank_of(tmp_path / "other", 4711)),
        started(rank_of(tmp_path, 4712)),  # another host's, or of another attempt
        started({"MPCTL_RUN_DIR": str(tmp_path)}),
        started({}),
    ]
    name = psutil.Process(daemon.pid).name()
    assert end_processes_with(left_by(tmp_path, 4711)) == [f"{name} ({daemon.pid})"]
    assert daemon.wait(5) == -15
    assert all(other.poll() is None for other in others)
    assert end_processes_with(left_by(tmp_path, 4711)) == []


def test_one_that_does_not_hear_is_killed(tmp_path: Path, started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(left_processes, "END_SECONDS", 0.2)
    deaf = started(rank_of(tmp_path, 4711), sys.executable, "-c", DEAF)
    assert deaf.stdout is not None and deaf.stdout.readline()
    assert len(end_processes_with(left_by(tmp_path, 4711))) == 1
    assert deaf.wait(5) == -9


def test_commands_of_mpctl_and_what_they_started_are_left_alone(tmp_path: Path, started: Started) -> None:
    """`mpctl status` in a shell of the program, a nested launch, its hook."""
    command = tmp_path / "mpctl"
    text = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SLEEP!r}])"
    command.write_text(text)
    nested = started(rank_of(tmp_path, 4711), sys.executable, str(command))
    deadline = time.monotonic() + 20
    while not (below := psutil.Process(nested.pid).children()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    left = started(rank_of(tmp_path, 4711))
    assert pids(left_by(tmp_path, 4711)) == {left.pid}
    assert not any(map(has_ended, below))
    below[0].kill()


def test_orphans_are_those_whose_torchrun_is_gone(tmp_path: Path, started: Started) -> None:
    orphan = started(rank_of(tmp_path, NOT_A_PROCESS))
    started(rank_of(tmp_path, os.getpid()))  # of another agent on this host, which is alive
    started(rank_of(tmp_path / "other", NOT_A_PROCESS))
    assert pids(orphaned(tmp_path)) == {orphan.pid}


def test_a_torchrun_that_nobody_waited_for_is_gone(tmp_path: Path, started: Started) -> None:
    zombie = started({}, sys.executable, "-c", "")
    wait_for(lambda: psutil.Process(zombie.pid).status() == psutil.STATUS_ZOMBIE)
    orphan = started(rank_of(tmp_path, zombie.pid))
    assert pids(orphaned(tmp_path)) == {orphan.pid}


def test_this_process_is_never_found() -> None:
    assert os.getpid() not in pids(lambda variables: True)


def test_processes_of_other_users_are_not_found(
    tmp_path: Path, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = started(rank_of(tmp_path, 4711))
    assert pids(left_by(tmp_path, 4711)) == {daemon.pid}
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert pids(left_by(tmp_path, 4711)) == set()
