"""One launch has a run directory, also where locks are those of a host alone."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

import pytest

from mpctl.core import locks
from mpctl.core.errors import InputError
from mpctl.core.locks import LOCK
from mpctl.records.rundir.directory import RunDir
from mpctl.records.rundir.launcher import LauncherRecord, process_start, write_launcher


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    for name, seconds in (("LEAST_WATCH", 0.3), ("LONGEST_WATCH", 0.3), ("POLL_SECONDS", 0.02)):
        monkeypatch.setattr(locks, name, seconds)
    run = RunDir(tmp_path / "run")
    run.claim()
    run.nodes.mkdir()
    run.status.write_text("{}")
    return run


def launched_by(run: RunDir, **who: object) -> None:
    record = {"host": "n9", "pid": 4711, "process_started": 1_790_000_000.0} | who
    write_launcher(run.launcher, LauncherRecord(**record, started=1_790_000_001.0))  # type: ignore[arg-type]


@contextmanager
def reporting(path: Path) -> Iterator[None]:
    """A launcher elsewhere that writes its status."""
    ended = Event()

    def report() -> None:
        while not ended.wait(0.05):
            os.utime(path)

    thread = Thread(target=report)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_a_launcher_of_another_host_that_reports_is_not_joined(run: RunDir) -> None:
    launched_by(run)
    with reporting(run.status), pytest.raises(InputError) as caught, run.locked():
        pass
    (issue,) = caught.value.issues
    assert issue.rule == "run-dir-busy"
    assert "process 4711 on n9, since 2026-09-21" in issue.message
    with run.locked() as warnings:  # it has ended
        assert warnings == []


def test_who_is_known_to_have_ended_is_not_waited_for(run: RunDir) -> None:
    began = time.monotonic()
    launched_by(run)
    run.summary.write_text("{}")
    with reporting(run.status), run.locked():
        pass
    run.summary.unlink()
    launched_by(run, host=platform.node(), pid=2**22 + 1)
    with reporting(run.status), run.locked():
        pass
    launched_by(run, process_started=None)  # a submission: no launcher yet
    with reporting(run.status), run.locked():
        pass
    assert time.monotonic() - began < 0.3


def test_a_launcher_of_this_host_that_holds_no_file(run: RunDir) -> None:
    """One of a version that locked the directory itself."""
    launched_by(run, host=platform.node(), pid=os.getppid(), process_started=process_start(os.getppid()))
    with reporting(run.status), pytest.raises(InputError, match="another launch"), run.locked():
        pass


def test_a_killed_launch_is_named(run: RunDir) -> None:
    (run.path / LOCK).write_text(
        '{"schema": "mpctl.lock/1", "host": "n9", "pid": 4711, "since": 1790000000, "kernel": ""}'
    )
    with run.locked() as warnings:
        (warning,) = warnings
        assert "was killed: process 4711 on n9, since 2026-09-21" in warning


def test_keys_of_killed_launches_are_removed(run: RunDir) -> None:
    (run.nodes / "key-0123abcd").touch(0o600)
    with run.locked():
        assert [path.name for path in run.nodes.iterdir()] == ["status.json"]
        (run.nodes / "key-4567cdef").touch(0o600)
        with pytest.raises(InputError), run.locked():
            pass
        assert (run.nodes / "key-4567cdef").exists()


def test_a_lock_is_no_content(tmp_path: Path) -> None:
    """An empty directory stays free and as it was; one that a launch made goes again."""
    tmp_path.chmod(0o750)
    with RunDir(tmp_path).locked():
        assert not RunDir(tmp_path).is_occupied and (tmp_path / LOCK).exists()
        RunDir(tmp_path).require_free()
    assert list(tmp_path.iterdir()) == []
    new = RunDir(tmp_path / "a/run")
    with new.locked():
        assert new.path.is_dir()
    assert not new.path.exists()
    (tmp_path / "notes").touch()
    with RunDir(tmp_path).locked():
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "notes"]


def test_a_run_that_never_started_leaves_no_lock(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    with run.locked():
        run.claim()
        run.abandon()
        assert not run.path.exists()


def test_what_cannot_be_locked_says_so(tmp_path: Path) -> None:
    (tmp_path / LOCK).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match=r"\.lock cannot be written"), RunDir(tmp_path).locked():
        pass
    assert not (tmp_path / "elsewhere").exists()
