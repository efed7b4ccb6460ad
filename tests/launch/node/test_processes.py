"""Processes are killed with what they started, and nobody waits forever for one that stays."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import psutil
import pytest

from mpctl.launch.node.processes import kill_tree

PARENT = (
    "import subprocess, sys\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
    "print(child.pid, flush=True)\n"
    "child.wait()\n"
)


class Uninterruptible(subprocess.Popen[bytes]):
    """A process that SIGKILL does not reach, as one that waits for a file system (state D)."""

    def send_signal(self, sig: int) -> None:
        """The kernel keeps it for later."""


def test_everything_below_a_process_is_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    assert kill_tree(parent) == ()
    assert parent.returncode == -9
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    assert kill_tree(parent) == ()  # nothing is left to kill


def test_a_process_that_cannot_be_killed_is_named_and_left() -> None:
    stays = Uninterruptible([sys.executable, "-c", "import time; time.sleep(20)"])
    began = time.monotonic()
    try:
        assert kill_tree(stays, 0.3) == (stays.pid,)
        assert 0.3 <= time.monotonic() - began < 5
        assert stays.poll() is None
    finally:
        subprocess.Popen.send_signal(stays, 9)
        stays.wait()


@pytest.mark.parametrize("state", [psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD])
def test_a_child_that_nobody_reaps_has_ended(monkeypatch: Any, state: str) -> None:
    """Process 1 of a container may not wait for orphans."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    parent.stdout.readline()
    monkeypatch.setattr(psutil.Process, "status", lambda self: state)
    began = time.monotonic()
    assert kill_tree(parent, 10) == ()
    assert time.monotonic() - began < 5
