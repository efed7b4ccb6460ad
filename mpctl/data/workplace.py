"""A directory that is filled whole or not at all.

Files are made in OUT/.preparing and move up at the end, the one that makes the directory valid
last. A lock on OUT keeps a second writer out; what a killed one left is cleared by the next.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from mpctl.errors import InputError

WORKPLACE = ".preparing"


@contextmanager
def workplace(out: Path, *, overwrite: bool) -> Iterator[Path]:
    """OUT/.preparing, empty and ours alone; gone at the end, with OUT when that stayed empty.

    InputError when OUT is a file, holds anything (unless `overwrite`), or is being written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        names = sorted({path.name for path in out.iterdir()} - {WORKPLACE})
    except OSError as error:
        message, hint = f"not usable: {error.strerror}", "name a directory that can be written"
        raise InputError.of("data-out", str(out), message, hint) from None
    if names and not overwrite:
        message = f"already holds {', '.join(names[:6])}"
        hint = "choose another directory, or overwrite"
        raise InputError.of("data-occupied", str(out), message, hint)
    work = out / WORKPLACE
    with _lock(out):
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        try:
            yield work
        finally:
            shutil.rmtree(work, ignore_errors=True)
            with suppress(OSError):
                out.rmdir()  # succeeds only on an empty directory


@contextmanager
def _lock(out: Path) -> Iterator[None]:
    handle = os.open(out, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        message, hint = "another process is preparing data in it", "wait for that one to end"
        raise InputError.of("data-busy", str(out), message, hint) from None
    except OSError:
        pass  # some network file systems know no locks on directories
    try:
        yield
    finally:
        os.close(handle)


def publish(work: Path, out: Path, names: Sequence[str], last: str) -> None:
    """Move `names` and then `last` from work to out; an older `last` goes away before the rest."""
    with (work / last).open("rb") as stream:
        os.fsync(stream.fileno())
    (out / last).unlink(missing_ok=True)
    for name in (*names, last):
        (work / name).replace(out / name)
