"""Processes are killed with what they started, and nobody waits forever for one that stays."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import psutil

from mpctl.launch.node.processes import kill_tree

PARENT = (
    "import subprocess, sys\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
    "print(child.pid, flush=True)\n"
    "child.wait()\n"
)


def family() -> tuple[subprocess.Popen[bytes], psutil.Process]:
    """A process and its child."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    return parent, psutil.Process(int(parent.stdout.readline()))


class Uninterruptible(subprocess.Popen[bytes]):
    """A process that SIGKILL does not reach, as one that waits for a file system (state D)."""

    def send_signal(self, sig: int) -> None:
        """The kernel keeps it for later."""


def test_everything_below_a_process_is_gone() -> None:
    parent, child = family()
    assert kill_tree(parent) == ()
    assert parent.returncode == -9
    assert not child.is_running()  # nor a zombie, where process 1 waits for orphans
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


def test_a_child_that_nobody_waits_for_has_ended(monkeypatch: Any) -> None:
    """Process 1 of a container may leave orphans as zombies."""
    parent, child = family()
    monkeypatch.setattr(psutil, "wait_procs", lambda tree, timeout: ([], tree))
    monkeypatch.setattr(psutil.Process, "status", lambda self: psutil.STATUS_ZOMBIE)
    assert kill_tree(parent) == ()
    monkeypatch.setattr(psutil.Process, "status", lambda self: psutil.STATUS_DISK_SLEEP)
    parent, child = family()
    assert kill_tree(parent) == (child.pid,)
