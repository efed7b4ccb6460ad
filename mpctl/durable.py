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
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

POLL_SECONDS = 0.5
T = TypeVar("T")


def write_whole(path: Path, text: str) -> None:
    """Replace `path` by `text` in UTF-8: readers find the old file or the new one, also after a
    crash. The directory must exist. Raises OSError, and the old file is then unchanged."""
    temporary = temporary_path(path)
    try:
        with temporary.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


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
