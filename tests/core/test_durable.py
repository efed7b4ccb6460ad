"""Files that are replaced completely, even with several writers at the same moment."""

from __future__ import annotations

import os
import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mpctl.core.durable import LineFile, temporary_path, write_whole


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


@contextmanager
def full_at(size: int) -> Iterator[None]:
    """A disk on which no file grows beyond so many bytes: the last write is a part of the line."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_that_is_not_synchronised_leaves_nothing_on_a_full_disk(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    write_whole(path, "old", sync=False)
    with full_at(10), pytest.raises(OSError, match="too large"):
        write_whole(path, "n" * 100, sync=False)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_mode_is_given_less_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        write_whole(tmp_path / "job.json", "{}", mode=0o644)
        write_whole(tmp_path / "table.csv", "x")
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {"job.json": 0o644, "table.csv": 0o664}


def test_lines_wait_until_the_disk_has_space_and_none_is_torn(tmp_path: Path) -> None:
    file = LineFile(tmp_path / "metrics.jsonl")
    assert file.append('{"step": 1}') is None
    with full_at(20):
        assert file.append('{"step": 2}') is not None
        assert file.path.read_text() == '{"step": 1}\n'
        assert file.append('{"step": 3}') is not None
    assert len(file.waiting) == 2
    assert file.append('{"step": 4}') is None and not file.waiting
    assert file.path.read_text().splitlines() == [f'{{"step": {n}}}' for n in (1, 2, 3, 4)]
