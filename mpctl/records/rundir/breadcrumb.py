"""The memory through which a rank and the agent of its host communicate.

Whatever starts the ranks of a host, a node agent or the launcher itself, makes one unnamed file in
memory for them (HostBreadcrumbs) and passes its path to them in BREADCRUMBS. Writing there is a
store to memory: no system call, and no network file system that a rank could have to wait for. What
was written stays when the rank is killed or stopped. The rank writes how far it is, what it is
doing and why it failed, torchrun writes how the rank ended; the agent writes that the rank is to
stop. The agent reports what it reads to the launcher, which writes the reports of all hosts to
RUN/nodes/status.json (run/launch/attempt.py).

Layout, one after the other for each rank: TEXT_BYTES of UTF-8 text, padded with zero bytes, then
six little-endian 64-bit integers: how far the rank has come (STARTED to FINISHED), a counter that
rises while it runs, the bytes of its failure record, 1 once it is to finish its step, save and end,
the exit code of a rank that failed, and 1 where torchrun ended it; then two little-endian doubles,
both in seconds since 1970 by the clock of the rank's host: when the counter last rose, and when the
text was last replaced; then LOG_BYTES: the collectives that the rank has started and finished
(collective_log.py); then STEP_LOG_BYTES: what its last steps took (step_log.py); then
FAILURE_BYTES: the FailureRecord of a rank that an exception ended, as JSON.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO

from mpctl.records.rundir.collective_log import LOG_BYTES, CollectiveLog, CollectiveProgress, read_collectives
from mpctl.records.rundir.rank_files import FailureRecord
from mpctl.records.rundir.step_log import STEP_LOG_BYTES, StepLog, StepTimes, read_step_times

BREADCRUMBS = "MPCTL_BREADCRUMBS"
"""Environment variable of a rank: `8:/proc/4711/fd/9`, the first rank of its host and the file."""
TORCHRUN = "MPCTL_TORCHRUN"
"""Environment variable of a rank: the process id of the torchrun that started it."""
TEXT_BYTES = 256
START_AT, BEATS_AT, FAILED_AT, STOP_AT, EXIT_AT, TERMINATED_AT, BEAT_TIME_AT, TEXT_TIME_AT = (
    TEXT_BYTES + 8 * field for field in range(8)
)
HEAD_BYTES = TEXT_BYTES + 64
STEPS_AT = HEAD_BYTES + LOG_BYTES
FAILURE_AT, FAILURE_BYTES = STEPS_AT + STEP_LOG_BYTES, 1 << 14
RANK_BYTES = FAILURE_AT + FAILURE_BYTES
BEAT_SECONDS = 0.5
STACK_SIGNAL = signal.SIGUSR2
"""At this signal a rank writes its Python stacks to its log (run/launch/node/processes.py)."""
STARTED, JOINING, JOINED, FINISHED = 1, 2, 3, 4


def rank_memory(rank: int, environment: Mapping[str, str]) -> memoryview:
    """The part of this rank in the memory that BREADCRUMBS names; without that variable, memory of
    this process that nobody reads. Raises OSError when the file cannot be opened."""
    first, _, path = environment.get(BREADCRUMBS, "").partition(":")
    if not path:
        return memoryview(bytearray(RANK_BYTES))
    with Path(path).open("r+b") as stream:
        mapped = mmap.mmap(stream.fileno(), 0)
    return memoryview(mapped)[_place(rank - int(first))]


def note_exit(memory: memoryview, code: int, *, is_terminated: bool) -> None:
    """Record the exit code of a failed rank, and whether torchrun ended it; torchrun calls this."""
    struct.pack_into("<qq", memory, EXIT_AT, code, is_terminated)


def note_heartbeat(memory: memoryview, doing: str) -> None:
    """Count one more heartbeat of a rank and replace its text, from any process that the rank has
    started; a text that is empty leaves the last one."""
    if doing:
        _write_text(memory, doing)
    struct.pack_into("<q", memory, BEATS_AT, _integer(memory, BEATS_AT) + 1)
    struct.pack_into("<d", memory, BEAT_TIME_AT, time.time())


def is_stop_requested(memory: memoryview) -> bool:
    """Whether the rank of this memory is to finish its step, save and end."""
    return bool(_integer(memory, STOP_AT))


class Breadcrumb:
    """The breadcrumb of one rank, which it writes. memory: RANK_BYTES of zeros; collectives, steps:
    its parts for the collective log and the step log."""

    def __init__(self, memory: memoryview) -> None:
        self.memory = memory
        self.collectives = CollectiveLog(memory[HEAD_BYTES:STEPS_AT])
        self.steps = StepLog(memory[STEPS_AT:FAILURE_AT])
        self.beats = 0
        self.has_ended = False
        self.reach(STARTED, "starting")

    def write(self, doing: str) -> None:
        """Replace the text; at most TEXT_BYTES of it are stored."""
        _write_text(self.memory, doing)

    def reach(self, start: int, doing: str) -> None:
        """Store how far the start has come, JOINING or JOINED, and what the rank does next."""
        self.write(doing)
        struct.pack_into("<q", self.memory, START_AT, start)

    def beat(self) -> None:
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

    @property
    def stop_requested(self) -> bool:
        """Whether this rank is to finish its step, save and end."""
        return is_stop_requested(self.memory)

    def fail(self, record: FailureRecord) -> None:
        """Leave the record of a failure, with as many of the last entries of its traceback as there
        is room for."""
        content = json.dumps(record, ensure_ascii=False).encode()
        while len(content) > FAILURE_BYTES and record["traceback"]:
            record = {**record, "traceback": record["traceback"][1:]}
            content = json.dumps(record, ensure_ascii=False).encode()
        self.memory[FAILURE_AT : FAILURE_AT + len(content)] = content
        struct.pack_into("<q", self.memory, FAILED_AT, len(content))  # last: then it is complete

    def end(self, doing: str = "") -> None:
        """This rank has finished its work: it does nothing and waits for nobody any more. doing:
        what it did last, where that is not known to be the end of the run."""
        self.has_ended = True
        self.memory[START_AT + 8 :] = bytes(RANK_BYTES - START_AT - 8)
        self.memory[:TEXT_BYTES] = bytes(TEXT_BYTES)
        if doing:
            _write_text(self.memory, doing)
        struct.pack_into("<q", self.memory, START_AT, FINISHED)


class HostBreadcrumbs:
    """The memory for the ranks of one host, held by the process that starts them; gone when that
    process ends. ranks: of the host, consecutive; environment: the variable with its path."""

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
        return read_breadcrumb(self.memory[_place(rank - self.ranks[0])])

    @property
    def has_failed(self) -> bool:
        return any(_integer(self.memory, place.start + FAILED_AT) for place in self._places)

    @property
    def has_joined(self) -> bool:
        return all(_integer(self.memory, at.start + START_AT) >= JOINED for at in self._places)

    def failures(self) -> list[FailureRecord]:
        """The records of the ranks that an exception ended, by rank."""
        found = []
        for place in self._places:
            size = _integer(self.memory, place.start + FAILED_AT)
            start = place.start + FAILURE_AT
            with suppress(ValueError):  # an incomplete one is read the next time
                if size:
                    found.append(json.loads(self.memory[start : start + size]))
        return found

    @property
    def exit_codes(self) -> dict[int, int]:
        """The exit codes of the failed ranks, where torchrun has recorded them."""
        return self._integers(EXIT_AT)

    @property
    def terminated(self) -> list[int]:
        """Failed ranks that torchrun ended."""
        return list(self._integers(TERMINATED_AT))

    def request_stop(self) -> None:
        for place in self._places:
            struct.pack_into("<q", self.memory, place.start + STOP_AT, 1)

    def _integers(self, at: int) -> dict[int, int]:
        """A field that is not 0, by rank."""
        places = zip(self.ranks, self._places, strict=True)
        return {rank: n for rank, place in places if (n := _integer(self.memory, place.start + at))}

    @property
    def _places(self) -> list[slice]:
        return [_place(number) for number in range(len(self.ranks))]


def _write_text(memory: memoryview, doing: str) -> None:
    memory[:TEXT_BYTES] = doing.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")
    struct.pack_into("<d", memory, TEXT_TIME_AT, time.time())


def _integer(memory: memoryview | mmap.mmap, at: int) -> int:
    return int(struct.unpack_from("<q", memory, at)[0])


def _place(number: int) -> slice:
    """The part of the host's rank `number`."""
    return slice(number * RANK_BYTES, (number + 1) * RANK_BYTES)


@dataclass(frozen=True)
class BreadcrumbState:
    """State that a rank wrote. doing: the text; start: 0 before the rank has written any, else
    STARTED, JOINING, JOINED or FINISHED; beats: the heartbeat counter. beat_time, text_time:
    when the counter last rose and when the text was last replaced, in seconds since 1970, 0 if
    unknown. collectives: progress in the collectives of the rank's groups; steps: times of its last
    steps. Times do not count when two states are compared."""

    doing: str = ""
    start: int = 0
    beats: int = 0
    beat_time: float = field(default=0.0, compare=False)
    text_time: float = field(default=0.0, compare=False)
    collectives: CollectiveProgress = field(default_factory=CollectiveProgress)
    steps: StepTimes = field(default_factory=StepTimes, compare=False)

    @property
    def is_working(self) -> bool:
        return 0 < self.start < FINISHED


def read_breadcrumb(content: bytes) -> BreadcrumbState:
    """The state of a rank, from its RANK_BYTES."""
    start, beats = struct.unpack_from("<qq", content, START_AT)
    beat_time, text_time = struct.unpack_from("<dd", content, BEAT_TIME_AT)
    doing = content[:TEXT_BYTES].rstrip(b"\0").decode(errors="replace")
    collectives = read_collectives(content[HEAD_BYTES:STEPS_AT])
    steps = read_step_times(content[STEPS_AT:FAILURE_AT], len(collectives.groups))
    return BreadcrumbState(doing, start, beats, beat_time, text_time, collectives, steps)
