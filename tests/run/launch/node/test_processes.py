"""Processes are killed with what they started, and nobody waits forever for one that stays.

Stacks that a rank writes to its log when it gets the signal, and what is read from them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from mpctl.records.rundir.breadcrumb import STACK_SIGNAL
from mpctl.run.launch.node.processes import Frame, innermost, kill_tree, main_stack

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


WAITING = """
import sys, threading, time
from pathlib import Path
from mpctl.train.runtime.process import redirect_output, write_stacks_on_signal
redirect_output(Path(sys.argv[1]))
write_stacks_on_signal()
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()

def waits_for_peers():
    print("ready", flush=True)
    time.sleep(60)

waits_for_peers()
"""

DUMP = """step 3: loss 1.2
Thread 0x00007f8a (most recent call first):
  File "/lib/threading.py", line 320 in wait

Current thread 0x00007f8b (most recent call first):
  File "/lib/numpy/core.py", line 8 in stack
  File "/src/mpctl/train/data/samples.py", line 71 in stack
  File "/src/mpctl/train/runtime/worker.py", line 70 in main
"""


def test_the_main_thread_and_where_it_is() -> None:
    stack = main_stack("Thread 0x1 (most recent call first):\n" + DUMP)
    assert stack[0] == Frame("/lib/numpy/core.py", 8, "stack") and len(stack) == 3
    assert innermost(stack) == ("mpctl/train/data/samples.py:71 in stack, in /lib/numpy/core.py:8 in stack")
    assert innermost(stack[1:]) == "mpctl/train/data/samples.py:71 in stack"
    assert main_stack("step 3\n") == () and innermost(()) == ""


def test_a_process_that_sleeps_writes_its_stack_and_sleeps_on(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    process = subprocess.Popen([sys.executable, "-c", WAITING, str(log)])
    try:
        _wait_for(log, "ready")
        os.kill(process.pid, STACK_SIGNAL)
        _wait_for(log, "in <module>")
        assert [frame.function for frame in main_stack(log.read_text())] == ["waits_for_peers", "<module>"]
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def _wait_for(log: Path, text: str) -> None:
    deadline = time.monotonic() + 60
    while not (log.exists() and text in log.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
