"""RUN/launcher.json names a process for good, although process ids are used again."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

from mpctl.rundir.launcher import (
    START_TOLERANCE,
    is_same_process,
    process_start,
    this_launcher,
    write_launcher,
)

NO_PID = 2**31 - 1


def test_the_record_names_this_process(tmp_path: Path) -> None:
    write_launcher(tmp_path / "launcher.json", this_launcher("ssh", hosts=("n1", "n2")))
    record = json.loads((tmp_path / "launcher.json").read_text())
    assert record["schema"] == "mpctl.launcher/1" and record["backend"] == "ssh"
    assert (record["host"], record["pid"]) == (platform.node(), os.getpid())
    assert (record["hosts"], record["job_id"]) == (["n1", "n2"], None)
    assert is_same_process(record["pid"], record["process_started"])


def test_a_process_id_that_was_used_again_is_another_process() -> None:
    started = process_start(os.getpid())
    assert started is not None
    assert not is_same_process(os.getpid(), started - 2 * START_TOLERANCE)
    assert not is_same_process(NO_PID, started) and process_start(NO_PID) is None


def test_a_process_that_ended_and_was_not_waited_for_has_ended() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = process_start(child.pid)
    assert started is not None and is_same_process(child.pid, started)
    assert child.stdin is not None
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not is_same_process(child.pid, started)
    child.wait()
