"""RUN/stop-request: whatever the file holds, it asks for a stop; only `now` asks for more."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpctl.rundir.stop_request import requested_signals, write_stop_request


def test_an_urgent_request_counts_as_a_repeated_signal(tmp_path: Path) -> None:
    path = tmp_path / "stop-request"
    assert requested_signals(path) == 0
    write_stop_request(path, now=False)
    assert requested_signals(path) == 1
    write_stop_request(path, now=True)
    assert requested_signals(path) == 2


@pytest.mark.parametrize(
    "content", [b"", b"now", b"[1]", b'{"now": "yes"}', b"\xff\xfe", b"[" * 9999]
)
def test_any_file_is_a_request(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "stop-request"
    path.write_bytes(content)
    assert requested_signals(path) == 1


def test_what_cannot_be_read_is_a_request(tmp_path: Path) -> None:
    assert requested_signals(tmp_path) == 1  # a directory
