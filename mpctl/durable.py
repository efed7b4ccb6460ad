"""Files that a crash leaves whole: written under another name, on the disk, then renamed.

A rename is atomic, but a machine that loses power may keep the new name and lose the bytes behind
it, unless file and directory were synchronised first (man 2 fsync).
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Replace `path` by `text` in UTF-8: readers find the old file or the new one, also after a
    crash. The directory must exist. Raises OSError, and then the old file is as it was."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
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
