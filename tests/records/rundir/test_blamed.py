"""The record of failures that hosts are blamed for: it outlives launches, and is not trusted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpctl.records.rundir.blamed import MOST_BYTES, MOST_ERROR, BlamedHosts, BlameRecord, read_blamed


def test_failures_are_counted_over_launches(tmp_path: Path) -> None:
    path = tmp_path / "blamed.json"
    assert BlameRecord.of(path, 2).add("n2", "killed by signal 9", 10.0) == 1
    record = BlameRecord.of(path, 2)
    assert not record.is_excluded("n2")
    assert record.add("n2", "x" * 9999, 20.0) == 2 and record.add("n1", "lost", 30.0) == 1
    assert record.is_excluded("n2") and not record.is_excluded("n1")
    assert not record.is_excluded("n3")
    blamed = read_blamed(path)
    assert blamed is not None
    assert {host: blame.failures for host, blame in blamed.hosts.items()} == {"n2": 2, "n1": 1}
    assert (blamed.hosts["n2"].last, len(blamed.hosts["n2"].error)) == (20.0, MOST_ERROR)


def test_without_a_limit_failures_are_counted_and_no_host_is_excluded(tmp_path: Path) -> None:
    record = BlameRecord.of(tmp_path / "blamed.json", None)
    assert [record.add("n2", "lost", 0.0) for _ in range(3)] == [1, 2, 3]
    assert not record.is_excluded("n2")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"hosts": {"n2": {"failures": "two"}}}',
        b'{"hosts": {"n2": {"failures": 0, "last": 0, "error": ""}}}',
        b'{"hosts": {"n2\\nn3": {"failures": 2, "last": 0, "error": ""}}}',
        b'{"schema": "mpctl.blamed/9", "hosts": {}}',
        b" " * (MOST_BYTES + 1),
    ],
)
def test_any_other_content_counts_as_none(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "blamed.json"
    assert read_blamed(path) == BlamedHosts()
    path.write_bytes(content)
    assert read_blamed(path) is None
    record = BlameRecord.of(path, 1)
    assert record.blamed == BlamedHosts() and record.add("n1", "lost", 1.0) == 1
    assert json.loads(path.read_text())["hosts"] == {"n1": {"failures": 1, "last": 1.0, "error": "lost"}}


def test_a_file_that_cannot_be_written_is_counted_all_the_same(tmp_path: Path) -> None:
    record = BlameRecord.of(tmp_path / "gone" / "blamed.json", 1)
    with pytest.raises(OSError):
        record.add("n1", "lost", 1.0)
    assert record.is_excluded("n1")
