"""Files that are replaced completely, even with several writers at the same moment."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mpctl.durable import temporary_path, write_whole


def test_two_pods_may_write_one_file_at_once(tmp_path: Path, monkeypatch) -> None:
    """Both are process 1 of their pod; the second writes while the first synchronises."""
    path, sync, others = tmp_path / "stop-request", os.fsync, ["second"]

    def slow_sync(handle: int) -> None:
        if others:
            write_whole(path, others.pop())
            assert path.read_text() == "second"
        sync(handle)

    monkeypatch.setattr(os, "getpid", lambda: 1)
    monkeypatch.setattr(os, "fsync", slow_sync)
    write_whole(path, "first")
    assert path.read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "summary.json"
    write_whole(path, "old")

    def full_disk(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_temporary_names_are_hidden_and_never_the_same(tmp_path: Path) -> None:
    names = {temporary_path(tmp_path / "job.json") for _ in range(100)}
    assert len(names) == 100
    assert all(name.parent == tmp_path and name.name.startswith(".job.json.") for name in names)
