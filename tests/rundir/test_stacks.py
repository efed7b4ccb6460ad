"""Stacks that a rank writes to its log when it gets the signal, and what is read from them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from mpctl.rundir.stacks import STACK_SIGNAL, Frame, innermost, main_stack

WAITING = """
import sys, threading, time
from pathlib import Path
from mpctl.runtime.process import redirect_output, write_stacks_on_signal
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
  File "/src/mpctl/data/samples.py", line 71 in stack
  File "/src/mpctl/runtime/worker.py", line 70 in main
"""


def test_the_main_thread_and_where_it_is() -> None:
    stack = main_stack("Thread 0x1 (most recent call first):\n" + DUMP)
    assert stack[0] == Frame("/lib/numpy/core.py", 8, "stack") and len(stack) == 3
    assert innermost(stack) == (
        "mpctl/data/samples.py:71 in stack, in /lib/numpy/core.py:8 in stack"
    )
    assert innermost(stack[1:]) == "mpctl/data/samples.py:71 in stack"
    assert main_stack("step 3\n") == () and innermost(()) == ""


def test_a_process_that_sleeps_writes_its_stack_and_sleeps_on(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    process = subprocess.Popen([sys.executable, "-c", WAITING, str(log)])
    try:
        _wait_for(log, "ready")
        os.kill(process.pid, STACK_SIGNAL)
        _wait_for(log, "in <module>")
        assert [frame.function for frame in main_stack(log.read_text())] == [
            "waits_for_peers",
            "<module>",
        ]
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def _wait_for(log: Path, text: str) -> None:
    deadline = time.monotonic() + 60
    while not (log.exists() and text in log.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
