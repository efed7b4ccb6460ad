"""Probe of the run directory: can ranks write, lock and map files there, how fast, on what disk.

A launch needs all three: checkpoints and metrics are written and synchronised, the launcher locks
the directory (mpctl/core/locks.py), and each rank maps a small file as shared memory. Files of the test
are removed again; a directory that does not exist is not created, but measured in the nearest
folder above it.
"""

from __future__ import annotations

import mmap
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from mpctl.core.locks import LockHeld, hold_lock
from mpctl.run.doctor.documents import Folder

WRITE_BYTES = 16 << 20
BLOCK = bytes(1 << 20)
SMALL = bytes(4096)
SYNCS = 5


def probe_folder(path: Path, nonce_file: str | None = None, nonce: str | None = None) -> Folder:
    """Measure the run directory at `path`. nonce: what `nonce_file` must contain in it where this
    host shares the directory with the launcher."""
    probed = nearest_folder(path)
    usage = shutil.disk_usage(probed)
    measured: dict[str, str | float | None] = _errors_and_speed(probed)
    return Folder(
        path=str(path),
        probed=str(probed),
        device=file_system(probed, _mounts()),
        total=usage.total,
        free=usage.free,
        is_shared=None if nonce_file is None else _text(probed / nonce_file) == nonce,
        **measured,  # type: ignore[arg-type]
    )


def nearest_folder(path: Path) -> Path:
    """`path` itself where it is a directory, else the nearest folder above it."""
    resolved = path.resolve()
    return next((folder for folder in (resolved, *resolved.parents) if folder.is_dir()), Path("/"))


def file_system(path: Path, mounts: str) -> str:
    """The type of the file system of `path`, by the longest mount point above it.

    mounts: the text of /proc/self/mounts, where a space in a path is written \\040.
    """
    rows = (line.split() for line in mounts.splitlines())
    points = [(row[1].replace("\\040", " "), row[2]) for row in rows if len(row) > 2]
    folders = {str(folder) for folder in (path, *path.parents)}
    below = [(len(point), number) for number, (point, _) in enumerate(points) if point in folders]
    return points[max(below)[1]][1] if below else "unknown"


def _errors_and_speed(folder: Path) -> dict[str, str | float | None]:
    """The fields of Folder that need a file; all files are in a folder that is removed."""
    nothing = dict.fromkeys(("lock_error", "map_error", "write_rate", "sync_seconds"))
    try:
        with tempfile.TemporaryDirectory(prefix=".mpctl-doctor-", dir=folder) as scratch:
            file = Path(scratch) / "file"
            return {
                "write_error": None,
                "write_rate": _write_rate(file),
                "sync_seconds": _sync_seconds(file),
                "lock_error": _error_of(_lock, Path(scratch)),
                "map_error": _error_of(_map, file),
            }
    except OSError as error:
        return {**nothing, "write_error": error.strerror or str(error)}


def _write_rate(file: Path) -> float:
    began = time.perf_counter()
    with file.open("wb") as stream:
        for _ in range(WRITE_BYTES // len(BLOCK)):
            stream.write(BLOCK)
        stream.flush()
        os.fsync(stream.fileno())
    return WRITE_BYTES / (time.perf_counter() - began)


def _sync_seconds(file: Path) -> float:
    """The median time to write 4 KiB and have them on the disk."""
    times: list[float] = []
    with file.open("r+b") as stream:
        for _ in range(SYNCS):
            began = time.perf_counter()
            stream.seek(0)
            stream.write(SMALL)
            stream.flush()
            os.fsync(stream.fileno())
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def _lock(folder: Path) -> None:
    """Lock a folder as a launch locks its run directory, and see that a second lock is refused."""
    with hold_lock(folder) as first:
        if first.refusal is not None:
            raise first.refusal
        try:
            with hold_lock(folder):
                raise OSError("two locks on one file were granted: locks are not enforced here")
        except LockHeld:
            return


def _map(file: Path) -> None:
    """Map the file as shared memory, write through the map and read it back."""
    with file.open("r+b") as stream, mmap.mmap(stream.fileno(), len(SMALL)) as memory:
        memory[:5] = b"mpctl"
        memory.flush()
        if os.pread(stream.fileno(), 5, 0) != b"mpctl":
            raise OSError("what was written through a shared map is not in the file")


def _error_of(action: Callable[[Path], None], path: Path) -> str | None:
    try:
        action(path)
    except OSError as error:
        return error.strerror or str(error)
    return None


def _mounts() -> str:
    return _text(Path("/proc/self/mounts")) or ""


def _text(path: Path) -> str | None:
    try:
        return path.read_text("utf-8", errors="replace")
    except OSError:
        return None
