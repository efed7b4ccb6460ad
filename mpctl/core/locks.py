"""A lock on a directory that also holds between hosts: FOLDER/.lock.

The kernel's lock (flock) is taken on a file opened for writing. On a directory, NFS and Lustre
grant it on each host by itself, and NFS grants an exclusive one only to a writer (man 2 flock).
Some mounts grant locks per host even on files (NFS `nolock`, Lustre `localflock`), and some have
none. So the holder also writes into the file who it is, and touches the file every BEAT_SECONDS.
Whoever is granted a lock that another kernel's holder never released first watches the file: a
holder that still touches it is alive. Only changes are compared, so clocks need not agree.

The file is removed when the lock is released; one that is left names a holder that was killed.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import signal
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from threading import Event, Thread

LOCK = ".lock"
SCHEMA = "mpctl.lock/1"
BEAT_SECONDS = 2.0
LEAST_WATCH, LONGEST_WATCH = 6.0, 15.0
"""Time to watch a file for a sign of life: until its last one is LONGEST_WATCH old by this host's
clock, and at least LEAST_WATCH."""
POLL_SECONDS = 0.25
READER_SECONDS = 1.0
"""Time to retry a lock without a holder: `is_held` has it for a moment."""
TRIES = 20
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
RECORD_BYTES = 4096


@dataclass(frozen=True)
class Holder:
    """A process that has or had a lock. since: in seconds since 1970; kernel: the boot of its host
    and the file system, within which the kernel's lock can be relied on."""

    host: str
    pid: int
    since: float
    kernel: str = ""

    def __str__(self) -> str:
        """`process 4711 on n1, since 2026-11-22 03:40:12 UTC`."""
        moment = datetime.fromtimestamp(self.since, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return f"process {self.pid} on {self.host}, since {moment}"


class LockHeld(Exception):
    """Another process has the lock. holder: who, None where the file does not say."""

    def __init__(self, holder: Holder | None) -> None:
        super().__init__(str(holder or "unknown holder"))
        self.holder = holder


@dataclass(frozen=True)
class FolderLock:
    """A lock that this process has. refusal: why the file system has no locks, None where it has;
    left_by: the holder before, if it ended without releasing the lock."""

    refusal: OSError | None = None
    left_by: Holder | None = None


@contextmanager
def hold_lock(folder: Path, *, also: Holder | None = None, signs: Sequence[Path] = ()) -> Iterator[FolderLock]:
    """Lock a directory for the time of the block.

    also: who may be using the directory without holding this lock; signs: the files that such a
    process keeps changing. Raises LockHeld, and OSError when FOLDER/.lock cannot be opened.
    """
    path = folder / LOCK
    with ExitStack() as stack:
        handle, refusal = _locked(path)
        stack.callback(os.close, handle)
        before = _holder(handle)
        me = Holder(platform.node(), os.getpid(), time.time(), _kernel(handle))
        is_ours = before is not None and before.kernel == me.kernel and refusal is None
        other = also if before is None else None if is_ours else before
        if other is not None and _is_changing((path, *signs)):
            raise LockHeld(other)
        stack.callback(_remove, path, handle)
        with suppress(OSError):  # on a full disk the lock does without the record
            _write(handle, json.dumps({"schema": SCHEMA, **asdict(me)}) + "\n")
        stack.enter_context(_beating(handle))
        yield FolderLock(refusal, before)


def is_held(folder: Path) -> bool:
    """Whether another process has the kernel's lock on a directory; takes it for a moment, without
    keeping it from anybody. False where that cannot be seen."""
    with suppress(OSError):
        handle = os.open(folder / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(handle)
    return False


def _locked(path: Path) -> tuple[int, OSError | None]:
    """The open file with the kernel's lock, and why the file system has none. The holder before may
    have removed the file that was opened: then there is a new one. Raises LockHeld and OSError."""
    for _ in range(TRIES):
        handle = _open(path)
        try:
            refusal = _lock(handle)
            if _sign(path)[0] == os.fstat(handle).st_ino:
                return handle, refusal
        except BaseException as error:
            os.close(handle)
            if not (isinstance(error, OSError) and error.errno == errno.ESTALE):
                raise
        else:
            os.close(handle)
    raise LockHeld(None)


def _open(path: Path) -> int:
    """Open the file, which is made if it is missing. Raises OSError, also for a link, a device or a
    folder of that name."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    handle = os.open(path, flags, 0o666)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, f"{path.name} is not a regular file")
    return handle


def _lock(handle: int) -> OSError | None:
    """Take the kernel's lock; returns why it has none. Raises LockHeld and OSError."""
    deadline = time.monotonic() + READER_SECONDS
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(handle)
            if holder is not None or time.monotonic() > deadline:
                raise LockHeld(holder) from None
            time.sleep(POLL_SECONDS / 5)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            return error
        else:
            return None


def _holder(handle: int) -> Holder | None:
    """Return the last writer of the file; None if it released its lock and for other content."""
    try:
        record = json.loads(os.pread(handle, RECORD_BYTES, 0))
        if record.pop("schema") != SCHEMA:
            return None
        host, pid, since = str(record["host"]), int(record["pid"]), float(record["since"])
        datetime.fromtimestamp(since, UTC)
        return Holder(host, pid, since, str(record["kernel"]))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError):
        return None


def _write(handle: int, text: str) -> None:
    os.ftruncate(handle, 0)
    os.pwrite(handle, text.encode(), 0)
    os.fsync(handle)


def _remove(path: Path, handle: int) -> None:
    """Remove the file, unless another one has its name."""
    with suppress(OSError):
        os.ftruncate(handle, 0)
        if _sign(path)[0] == os.fstat(handle).st_ino:
            path.unlink()


@contextmanager
def _beating(handle: int) -> Iterator[None]:
    """Touch the file every BEAT_SECONDS in a thread, so that other hosts see this process alive."""
    ended = Event()

    def beat() -> None:
        while not ended.wait(BEAT_SECONDS):
            with suppress(OSError):
                os.utime(handle)

    thread = Thread(target=beat, name="lock", daemon=True)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    thread.start()  # signals stay with the threads that wait for them
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _is_changing(paths: Sequence[Path]) -> bool:
    """Watch files; whether one of them changes. Files that were changed recently, by this host's
    clock, are watched longer: their process may be slow."""
    first = [_sign(path) for path in paths]
    age = time.time() - max(changed for _, changed in first) / 1e9
    patience = min(max(LONGEST_WATCH - age, LEAST_WATCH), LONGEST_WATCH)
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        if [_sign(path) for path in paths] != first:
            return True
    return False


def _sign(path: Path) -> tuple[int, int]:
    """Number and time of the last change (ns) of a file, zeros without one. It is opened, since a
    client of a network file system asks the server only then."""
    with suppress(OSError):
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(handle)
            return status.st_ino, status.st_mtime_ns
        finally:
            os.close(handle)
    return 0, 0


def _kernel(handle: int) -> str:
    """The boot of this host and the file system of a file: two processes with the same one ask the
    same kernel for the same lock."""
    boot = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    return f"{boot or platform.node()}:{os.fstat(handle).st_dev}"
