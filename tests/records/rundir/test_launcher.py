"""RUN/launcher.json names a process for good, although process ids are used again.

RUN/stop-request: whatever the file holds, it asks for a stop; only `now` asks for more. A file that
cannot be read asks for nothing.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from mpctl.records.rundir.launcher import (
    START_TOLERANCE,
    is_same_process,
    process_start,
    requested_signals,
    stop_signal,
    this_launcher,
    write_launcher,
    write_stop_request,
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


def test_an_urgent_request_counts_as_a_repeated_signal(tmp_path: Path) -> None:
    path = tmp_path / "stop-request"
    assert requested_signals(path) == 0
    write_stop_request(path, now=False)
    assert requested_signals(path) == 1
    write_stop_request(path, now=True)
    assert requested_signals(path) == 2


@pytest.mark.parametrize("content", [b"", b"now", b"[1]", b'{"now": "yes"}', b"\xff\xfe", b"[" * 9999])
def test_any_file_is_a_request(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "stop-request"
    path.write_bytes(content)
    assert requested_signals(path) == 1


@pytest.mark.parametrize("code", ["EIO", "ESTALE", "EACCES", "ETIMEDOUT", "ENOTCONN", "ELOOP", "EISDIR"])
def test_what_cannot_be_read_is_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """A file server that fails for a moment must not end a run of weeks."""
    path = tmp_path / "stop-request"
    write_stop_request(path, now=True)

    def fail(self: Path) -> bytes:
        raise OSError(getattr(errno, code), code)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", fail)
        assert requested_signals(path) == 0
    assert requested_signals(path) == 2


def test_neither_a_loop_of_links_nor_a_directory_is_a_request(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert requested_signals(tmp_path / "loop") == requested_signals(tmp_path) == 0


@pytest.mark.parametrize(
    ("status", "relayed", "number"),
    [("stopped", None, 15), ("stopped", True, 15), ("stopped", False, None), ("failed", None, None)],
)
def test_the_signal_that_stopped_a_run(tmp_path: Path, status: str, relayed: bool | None, number: int | None) -> None:
    """A request that passes a signal on is a signal; one of `mpctl stop` is none."""
    summary, request = tmp_path / "summary.json", tmp_path / "stop-request"
    assert stop_signal(summary, request) is None
    summary.write_text(json.dumps({"status": status, "signal": 15}))
    if relayed is not None:
        write_stop_request(request, now=False, relayed=relayed)
    assert stop_signal(summary, request) == number
