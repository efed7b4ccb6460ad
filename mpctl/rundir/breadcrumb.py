"""RUN/doing/rank-N: what a rank is doing, and its heartbeat, in a file that the rank keeps mapped.

Writing there is a store to memory, not a system call, and the kernel keeps what was written when
the process is killed or stopped. The launcher reads the file to say what a failed rank was doing,
and whether it still runs.

Layout: TEXT_BYTES of UTF-8 text, padded with zero bytes, then two little-endian 64-bit integers:
how far the start has come (STARTED, JOINING, JOINED), and a counter that rises while the rank runs;
then two little-endian doubles, both in seconds since 1970 by the clock of the rank's host: when the
counter last rose, and when the text was last replaced; then LOG_BYTES: the collectives that the
rank has started and finished (collective_log.py). Files of older versions end before the times.
"""

from __future__ import annotations

import mmap
import struct
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from mpctl.rundir.collective_log import (
    LOG_BYTES,
    CollectiveLog,
    CollectiveProgress,
    read_collectives,
)

TEXT_BYTES = 256
START_AT, BEATS_AT, BEAT_TIME_AT, TEXT_TIME_AT = (TEXT_BYTES + 8 * field for field in range(4))
HEAD_BYTES = TEXT_BYTES + 32
FILE_BYTES = HEAD_BYTES + LOG_BYTES
UNTIMED_BYTES = TEXT_BYTES + 16
"""The size of the files of older versions, which have neither times nor collectives."""
BEAT_SECONDS = 0.5
STARTED, JOINING, JOINED = 1, 2, 3


class Breadcrumb:
    """The file of one rank, written by that rank. collectives: its part for the collective log."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(FILE_BYTES))
        self.path = path
        with path.open("r+b") as stream:
            self.memory = mmap.mmap(stream.fileno(), FILE_BYTES)
        self.collectives = CollectiveLog(memoryview(self.memory)[HEAD_BYTES:])
        self.beats = 0
        self.reach(STARTED, "starting")

    def write(self, doing: str) -> None:
        """Replace the text; at most TEXT_BYTES of it are stored."""
        self.memory[:TEXT_BYTES] = doing.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")
        struct.pack_into("<d", self.memory, TEXT_TIME_AT, time.time())

    def reach(self, start: int, doing: str) -> None:
        """Store how far the start has come, JOINING or JOINED, and what the rank does next."""
        self.write(doing)
        struct.pack_into("<q", self.memory, START_AT, start)

    def beat(self) -> None:
        """Increase the heartbeat counter by one."""
        self.beats += 1
        struct.pack_into("<qd", self.memory, BEATS_AT, self.beats, time.time())

    def keep_beating(self) -> None:
        """Beat every BEAT_SECONDS from a thread of this process, until the process ends."""
        threading.Thread(target=self._beat_on, name="heartbeat", daemon=True).start()

    def _beat_on(self) -> None:
        while True:
            self.beat()
            time.sleep(BEAT_SECONDS)

    def end(self) -> None:
        """Remove the file: this rank has finished its work."""
        self.path.unlink(missing_ok=True)


@dataclass(frozen=True)
class BreadcrumbState:
    """The content of the file. doing: the text; start: 0 before the rank has written any, then
    STARTED, JOINING or JOINED; beats: the heartbeat counter. beat_time, text_time: when the counter
    last rose and when the text was last replaced, in seconds since 1970, 0 when that is not known.
    collectives: how far the rank is in the collectives of its groups. Times do not count when two
    states are compared."""

    doing: str = ""
    start: int = 0
    beats: int = 0
    beat_time: float = field(default=0.0, compare=False)
    text_time: float = field(default=0.0, compare=False)
    collectives: CollectiveProgress = field(default_factory=CollectiveProgress)


def read_breadcrumb(path: Path) -> BreadcrumbState:
    """The state of a rank; an empty state when there is no file or only part of one."""
    try:
        content = path.read_bytes()
    except OSError:
        return BreadcrumbState()
    if len(content) < UNTIMED_BYTES:
        return BreadcrumbState(_text(content))
    content = content.ljust(FILE_BYTES, b"\0")
    start, beats, beat_time, text_time = struct.unpack_from("<qqdd", content, START_AT)
    collectives = read_collectives(content[HEAD_BYTES:])
    return BreadcrumbState(
        _text(content[:TEXT_BYTES]), start, beats, beat_time, text_time, collectives
    )


def _text(content: bytes) -> str:
    return content.rstrip(b"\0").decode(errors="replace")
