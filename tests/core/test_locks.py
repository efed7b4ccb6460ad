"""One process has a directory: by the kernel's lock on a file, and by signs of life without one."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

import pytest

from mpctl.core import locks
from mpctl.core.locks import LOCK, SCHEMA, Holder, LockHeld, hold_lock, is_held


@pytest.fixture(autouse=True)
def _short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "LEAST_WATCH", 0.3)
    monkeypatch.setattr(locks, "LONGEST_WATCH", 0.6)
    monkeypatch.setattr(locks, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(locks, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(locks, "READER_SECONDS", 0.2)


def left(folder: Path, *, kernel: str = "another", age: float = 0.0) -> Path:
    """The file of a process on another host that has not released its lock."""
    path = folder / LOCK
    holder = {"host": "n9", "pid": 4711, "since": 1_790_000_000, "kernel": kernel}
    path.write_text(json.dumps({"schema": SCHEMA, **holder}))
    os.utime(path, (time.time() - age,) * 2)
    return path


@contextmanager
def touched(path: Path) -> Iterator[None]:
    """A process elsewhere that is alive."""
    ended = Event()

    def touch() -> None:
        while not ended.wait(0.05):
            os.utime(path)

    thread = Thread(target=touch)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_what_is_locked_is_a_file_open_for_writing(tmp_path: Path) -> None:
    """On NFS a lock of a directory is one of the host alone, and an exclusive lock needs a file
    that is open for writing."""
    with hold_lock(tmp_path) as lock:
        assert lock.refusal is None and lock.left_by is None
        opened = list(Path("/proc/self/fd").iterdir())
        (handle,) = (fd for fd in opened if os.path.realpath(fd) == str(tmp_path / LOCK))
        flags = Path(f"/proc/self/fdinfo/{handle.name}").read_text().split("flags:")[1].split()[0]
        assert int(flags, 8) & os.O_ACCMODE == os.O_RDWR and int(flags, 8) & os.O_CLOEXEC
        with (tmp_path / LOCK).open("r+b") as second, pytest.raises(BlockingIOError):
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert list(tmp_path.iterdir()) == []


def test_a_second_holder_hears_who_the_first_is(tmp_path: Path) -> None:
    with hold_lock(tmp_path):
        assert is_held(tmp_path)
        with pytest.raises(LockHeld, match=f"process {os.getpid()} on .*, since 20"), hold_lock(tmp_path):
            pass
        assert is_held(tmp_path)
    assert not is_held(tmp_path)
    with hold_lock(tmp_path):
        pass


def test_asking_who_has_it_turns_nobody_away(tmp_path: Path) -> None:
    reader = os.open(tmp_path / LOCK, os.O_RDONLY | os.O_CREAT)
    fcntl.flock(reader, fcntl.LOCK_SH)
    thread = Thread(target=lambda: (time.sleep(0.05), os.close(reader)))
    thread.start()
    with hold_lock(tmp_path):
        pass
    thread.join()


def test_a_killed_holder_is_named(tmp_path: Path) -> None:
    """Its kernel, which is this one, has released the lock: nothing is waited for."""
    code = "import sys, signal, os; from pathlib import Path; from mpctl.core.locks import hold_lock\n"
    code += "with hold_lock(Path(sys.argv[1])): os.kill(os.getpid(), signal.SIGKILL)"
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
    assert child.wait() == -signal.SIGKILL
    began = time.monotonic()
    with hold_lock(tmp_path) as lock:
        assert time.monotonic() - began < 0.25
        assert lock.left_by is not None and lock.left_by.pid == child.pid
    assert not (tmp_path / LOCK).exists()


def test_a_holder_on_another_host_that_is_alive(tmp_path: Path) -> None:
    """As where the file system grants locks on each host by itself (NFS nolock)."""
    path = left(tmp_path, age=3600.0)
    began = time.monotonic()
    with touched(path), pytest.raises(LockHeld, match="process 4711 on n9"), hold_lock(tmp_path):
        pass
    assert time.monotonic() - began < 0.3
    assert json.loads(path.read_text())["host"] == "n9"


@pytest.mark.parametrize(("age", "least", "most"), [(3600, 0.3, 0.5), (-3600, 0.6, 1.0)])
def test_a_holder_on_another_host_that_is_dead(tmp_path: Path, age: float, least: float, most: float) -> None:
    """Clocks may differ: one that seems to be of the future is watched for longer."""
    left(tmp_path, age=age)
    began = time.monotonic()
    with hold_lock(tmp_path) as lock:
        assert least <= time.monotonic() - began < most + 0.5
        assert lock.left_by is not None and lock.left_by.host == "n9"


def test_a_process_without_the_lock_is_known_by_what_it_writes(tmp_path: Path) -> None:
    sign, other = tmp_path / "status.json", Holder("n9", 4711, 1_790_000_000.0)
    sign.touch()
    with hold_lock(tmp_path, also=other, signs=[sign]):
        pass
    with touched(sign), pytest.raises(LockHeld, match="n9"), hold_lock(tmp_path, also=other, signs=[sign]):
        pass
    assert not (tmp_path / LOCK).exists() or not (tmp_path / LOCK).stat().st_size


def test_a_holder_touches_its_file(tmp_path: Path) -> None:
    with hold_lock(tmp_path):
        first = (tmp_path / LOCK).stat().st_mtime_ns
        deadline = time.monotonic() + 5.0
        while (tmp_path / LOCK).stat().st_mtime_ns == first:
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """Its reason is told, and a holder of the same kernel is watched as well."""

    def refuse(handle: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with hold_lock(tmp_path) as lock:
        assert lock.refusal is not None and lock.refusal.errno == code
        with pytest.raises(LockHeld, match=str(os.getpid())), hold_lock(tmp_path):
            pass


def test_another_error_is_no_lack_of_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(handle: int, operation: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(OSError, match="Input/output"), hold_lock(tmp_path):
        pass


def test_a_link_or_a_pipe_is_not_opened(tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    (tmp_path / LOCK).symlink_to(target)
    with pytest.raises(OSError, match="symbolic"), hold_lock(tmp_path):
        pass
    assert not target.exists()
    (tmp_path / LOCK).unlink()
    os.mkfifo(tmp_path / LOCK)
    with pytest.raises(OSError, match="not a regular file"), hold_lock(tmp_path):
        pass
    assert stat.S_ISFIFO((tmp_path / LOCK).stat().st_mode)


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"\xff", b"[" * 9999, b'{"schema": 1}'])
def test_odd_content_names_nobody(tmp_path: Path, content: bytes) -> None:
    (tmp_path / LOCK).write_bytes(content)
    with hold_lock(tmp_path) as lock:
        assert lock.left_by is None


def test_a_file_that_its_holder_removed_meanwhile_is_not_taken(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), hold_lock(tmp_path):
        waiting = os.open(tmp_path / LOCK, os.O_RDWR)
        raise ZeroDivisionError
    with hold_lock(tmp_path):
        assert os.fstat(waiting).st_ino != (tmp_path / LOCK).stat().st_ino or is_held(tmp_path)
    os.close(waiting)


def test_signals_are_not_taken_by_the_thread(tmp_path: Path) -> None:
    """A signal that is held back by the thread that waits for it must not reach this one."""
    with hold_lock(tmp_path):
        (thread,) = (one for one in threading.enumerate() if one.name == "lock")
        status = Path(f"/proc/self/task/{thread.native_id}/status").read_text("ascii")
    (blocked,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigBlk"))
    assert int(blocked, 16) >> (signal.SIGUSR1 - 1) & 1
