"""Files that a crash leaves complete: written under another name, synchronised to the disk, then
renamed; and waiting for files of other hosts.

A rename is atomic, but a machine that loses power may keep the new name and lose the bytes behind
it, unless file and directory were synchronised first (man 2 fsync).
"""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

POLL_SECONDS = 0.5
MOST_WAITING = 10_000
T = TypeVar("T")


def write_whole(path: Path, text: str, *, sync: bool = True, mode: int = 0o666) -> None:
    """Replace `path` by `text` in UTF-8: readers find the old file or the new one, with `sync` also
    after a crash. mode: of the file, less the umask. The directory must exist. Raises OSError; the
    old file is then unchanged, and nothing else is left."""
    temporary = temporary_path(path)
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            if sync:
                os.fsync(handle)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    if sync:
        sync_folder(path.parent)


@dataclass
class LineFile:
    """A file to which one process appends lines. A line that cannot be written, as on a full disk,
    waits for the next one, so that the file has whole lines alone. waiting: the last MOST_WAITING
    of these."""

    path: Path
    waiting: deque[str] = field(default_factory=lambda: deque(maxlen=MOST_WAITING))

    def append(self, line: str) -> OSError | None:
        """Write a line and those that wait; returns why they cannot be written."""
        self.waiting.append(f"{line}\n")
        try:
            with self.path.open("ab", buffering=0) as stream:
                size, content = os.fstat(stream.fileno()).st_size, "".join(self.waiting).encode()
                try:
                    while content:
                        content = content[stream.write(content) :]
                except OSError:
                    os.ftruncate(stream.fileno(), size)
                    raise
        except OSError as error:
            return error
        self.waiting.clear()
        return None


def temporary_path(path: Path) -> Path:
    """A hidden name in the same directory that no other process takes, on any host: each pod has a
    process 1. It contains host and process."""
    who = f"{platform.node()}-{os.getpid()}-{os.urandom(4).hex()}"
    return path.with_name(f".{path.name}.{who}")


def wait_for_file(find: Callable[[], T | None], folder: Path, seconds: float) -> T | None:
    """The first result of `find` in a folder that is not None; None if there is none within
    `seconds`. A client of a network file system may cache files and listings for up to a minute;
    listing the folder makes it ask the server."""
    deadline = time.monotonic() + seconds
    while (found := find()) is None and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        refresh(folder)
    return found


def refresh(folder: Path) -> None:
    """List a folder, so that a client of a network file system asks the server about it."""
    with suppress(OSError):
        os.listdir(folder)  # noqa: PTH208


def remove(path: Path) -> None:
    """Remove a file or a directory, as far as it can be; links are not followed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def sync_folder(folder: Path) -> None:
    """Make the names in a directory last; does nothing where directories cannot be synchronised."""
    with suppress(OSError):  # some network file systems refuse it
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
