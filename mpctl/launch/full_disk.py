"""Whether the disk of a run directory is full, found by writing there.

What a full disk breaks looks like something else: ranks that end without a record, a torchrun that
cannot write its log. A write also meets what free bytes do not show, a quota or a lack of inodes.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from mpctl.units import bytes_text

PROBE_BYTES = 1 << 16
FULL = (errno.ENOSPC, errno.EDQUOT)


def full_disk_text(folder: Path) -> str:
    """`the disk of /runs/a is full: No space left on device; 0 B of 8.0 MiB are free`; empty where
    PROBE_BYTES can be written into the folder."""
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(PROBE_BYTES))
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        if error.errno in FULL:
            return f"the disk of {folder} is full: {error.strerror}{_free(folder)}"
    return ""


def is_of_full_disk(words: str) -> bool:
    """Whether an error says that a disk is full."""
    return any(os.strerror(number) in words for number in FULL)


def _free(folder: Path) -> str:
    with suppress(OSError):
        usage = shutil.disk_usage(folder)
        return f"; {bytes_text(usage.free)} of {bytes_text(usage.total)} are free"
    return ""
