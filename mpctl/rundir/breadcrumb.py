"""What a rank is doing, and its heartbeat, in memory that it shares with the agent of its host.

Whatever starts the ranks of a host, a node agent or the launcher itself, makes one unnamed file in
memory for them (HostBreadcrumbs) and tells them by BREADCRUMBS where it is. Writing there is a
store to memory: no system call, and no network file system that a rank could have to wait for.
What was written stays when the rank is killed or stopped. The agent reads it to say what a failed
rank was doing and whether it still runs, and reports it; the launcher writes the reports of all
hosts to RUN/nodes/status.json (launch/status_file.py).

Layout, one after the other for each rank: TEXT_BYTES of UTF-8 text, padded with zero bytes, then
three little-endian 64-bit integers: how far the start has come (STARTED, JOINING, JOINED), a
counter that rises while the rank runs, and 1 once it has written RUN/failures/rank-N.json; then
two little-endian doubles, both in seconds since 1970 by the clock of the rank's host: when the
counter last rose, and when the text was last replaced; then LOG_BYTES: the collectives that the
rank has started and finished (collective_log.py).
"""

from __future__ import annotations

import mmap
import os
import signal
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO

from mpctl.rundir.collective_log import (
    LOG_BYTES,
    CollectiveLog,
    CollectiveProgress,
    read_collectives,
)

BREADCRUMBS = "MPCTL_BREADCRUMBS"
"""Environment variable of a rank: `8:/proc/4711/fd/9`, the first rank of its host and the file."""
TEXT_BYTES = 256
START_AT, BEATS_AT, FAILED_AT, BEAT_TIME_AT, TEXT_TIME_AT = (
    TEXT_BYTES + 8 * field for field in range(5)
)
HEAD_BYTES = TEXT_BYTES + 40
RANK_BYTES = HEAD_BYTES + LOG_BYTES
BEAT_SECONDS = 0.5
STACK_SIGNAL = signal.SIGUSR2
"""At this signal a rank writes its Python stacks to its log (launch/node/processes.py)."""
STARTED, JOINING, JOINED = 1, 2, 3


def rank_memory(rank: int, environment: Mapping[str, str]) -> memoryview:
    """The part of this rank in the memory that BREADCRUMBS names; memory of this process where that
    variable is not set, and nobody reads it. Raises OSError when the file cannot be opened."""
    first, _, path = environment.get(BREADCRUMBS, "").partition(":")
    if not path:
        return memoryview(bytearray(RANK_BYTES))
    with Path(path).open("r+b") as stream:
        whole = mmap.mmap(stream.fileno(), 0)
    return memoryview(whole)[_place(rank - int(first))]


class Breadcrumb:
    """What one rank writes. memory: RANK_BYTES of zeros; collectives: its part for the collective
    log."""

    def __init__(self, memory: memoryview) -> None:
        self.memory = memory
        self.collectives = CollectiveLog(memory[HEAD_BYTES:])
        self.beats = 0
        self.has_ended = False
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
        struct.pack_into("<q", self.memory, BEATS_AT, self.beats)
        struct.pack_into("<d", self.memory, BEAT_TIME_AT, time.time())

    def keep_beating(self) -> None:
        """Beat every BEAT_SECONDS from a thread of this process, until the rank ends."""
        threading.Thread(target=self._beat_on, name="heartbeat", daemon=True).start()

    def _beat_on(self) -> None:
        while not self.has_ended:
            self.beat()
            time.sleep(BEAT_SECONDS)

    def fail(self) -> None:
        """Say that this rank has recorded its failure."""
        struct.pack_into("<q", self.memory, FAILED_AT, 1)

    def end(self) -> None:
        """Clear it: this rank has finished its work."""
        self.has_ended = True
        self.memory[:] = bytes(RANK_BYTES)


class HostBreadcrumbs:
    """The memory for the ranks of one host, held by the process that starts them; gone when that
    process ends. ranks: of the host, consecutive; environment: tells them where it is."""

    file: IO[bytes]

    def __init__(self, ranks: Sequence[int], folder: Path) -> None:
        """folder: for the file where the system has no unnamed ones in memory (macOS). Raises
        OSError when it cannot be made."""
        self.ranks = ranks
        if hasattr(os, "memfd_create"):
            self.file = os.fdopen(os.memfd_create("mpctl-breadcrumbs"), "r+b", buffering=0)
            path = f"/proc/{os.getpid()}/fd/{self.file.fileno()}"
        else:
            self.file = NamedTemporaryFile(prefix="breadcrumbs-", dir=folder)  # noqa: SIM115
            path = self.file.name
        self.file.truncate(len(ranks) * RANK_BYTES)
        self.memory = mmap.mmap(self.file.fileno(), 0)
        self.environment = {BREADCRUMBS: f"{ranks[0]}:{path}"}

    def close(self) -> None:
        """No rank can open the file any more; what they wrote can still be read here."""
        self.file.close()

    def state(self, rank: int) -> BreadcrumbState:
        """What a rank wrote about itself."""
        return read_breadcrumb(self.memory[_place(rank - self.ranks[0])])

    @property
    def has_failed(self) -> bool:
        """Whether a rank has recorded its failure."""
        starts = (_place(number).start for number in range(len(self.ranks)))
        return any(struct.unpack_from("<q", self.memory, at + FAILED_AT)[0] for at in starts)


def _place(number: int) -> slice:
    """Where the part of the host's rank `number` lies."""
    return slice(number * RANK_BYTES, (number + 1) * RANK_BYTES)


@dataclass(frozen=True)
class BreadcrumbState:
    """What a rank wrote. doing: the text; start: 0 before the rank has written any and after it has
    finished, else STARTED, JOINING or JOINED; beats: the heartbeat counter. beat_time, text_time:
    when the counter last rose and when the text was last replaced, in seconds since 1970, 0 when
    that is not known. collectives: how far the rank is in the collectives of its groups. Times do
    not count when two states are compared."""

    doing: str = ""
    start: int = 0
    beats: int = 0
    beat_time: float = field(default=0.0, compare=False)
    text_time: float = field(default=0.0, compare=False)
    collectives: CollectiveProgress = field(default_factory=CollectiveProgress)


def read_breadcrumb(content: bytes) -> BreadcrumbState:
    """The state of a rank, from its RANK_BYTES."""
    start, beats, _, beat_time, text_time = struct.unpack_from("<qqqdd", content, START_AT)
    doing = content[:TEXT_BYTES].rstrip(b"\0").decode(errors="replace")
    collectives = read_collectives(content[HEAD_BYTES:])
    return BreadcrumbState(doing, start, beats, beat_time, text_time, collectives)
